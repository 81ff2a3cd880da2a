"""The built-in tasks: their metrics, and the targets that they accept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.model import built_in_tasks
from ddp_train.errors import ConfigError, DataError
from ddp_train.options.custom import CustomTaskConfig
from ddp_train.runs.plan_report import task_row
from ddp_train.tasks.builtin import Classification, Multilabel, Regression, Segmentation
from ddp_train.tasks.catalog import choose
from ddp_train.tasks.config import ClassificationConfig
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.score import Scorer
from ddp_train.tasks.supervised import BuiltIn
from ddp_train.tasks.task import ModelWithTask, Task
from tests.support.task_samples import LABELS, WORDS


def scored(task: Task, outputs: Tensor, targets: Tensor, size: int = 4) -> dict[str, float]:
    """By the task, in batches."""
    batches = range(0, len(outputs), size)
    scorer = Scorer(len(batches), "cpu", task.derive)
    module = ModelWithTask(nn.Identity(), task, "cpu", None)
    for number, start in enumerate(batches):
        pair = outputs[start : start + size], targets[start : start + size]
        scorer.add(number, module.score(pair), len(pair[0]))
    score = scorer.result()
    assert score and score.samples == len(outputs)
    return score.metrics


def test_metrics_are_those_of_scikit_learn() -> None:
    from sklearn import metrics  # takes a second

    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(50, 7, generator=draw)
    labels = torch.randint(0, 7, (50,), generator=draw)
    found = scored(Classification(7), logits, labels)
    assert found["accuracy"] == metrics.accuracy_score(labels, logits.argmax(1))
    assert found["top5"] == metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(7))
    assert "top5" not in scored(Classification(5), logits[:, :5], labels.clamp(max=4)), (
        "from six classes on"
    )

    many = (torch.rand(50, 7, generator=draw) > 0.7).float()
    found = scored(Multilabel(), logits, many)
    assert found["f1_macro"] == pytest.approx(metrics.f1_score(many, logits > 0, average="macro"))
    assert found["exact_match"] == metrics.accuracy_score(many, logits > 0)
    assert found["loss"] == pytest.approx(
        metrics.log_loss(many.flatten(), logits.sigmoid().flatten()), rel=1e-5
    )

    numbers = torch.randn(50, 2, generator=draw)
    truth = torch.randn(50, 2, generator=draw)
    found = scored(Regression(), numbers, truth)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(truth, numbers))
    assert found["rmse"] == pytest.approx(
        metrics.root_mean_squared_error(truth.flatten(), numbers.flatten())
    )

    pixels = torch.randn(10, 4, 5, 5, generator=draw)
    masks = torch.randint(0, 4, (10, 5, 5), generator=draw)
    masks[torch.rand(masks.shape, generator=draw) < 0.3] = 9
    found = scored(Segmentation(ignore_index=9), pixels, masks)
    valid = masks != 9
    classes = pixels.argmax(1)[valid]
    true = masks[valid]
    assert found["mean_iou"] == pytest.approx(metrics.jaccard_score(true, classes, average="macro"))
    assert found["pixel_accuracy"] == pytest.approx(metrics.accuracy_score(true, classes))
    torch.use_deterministic_algorithms(True)
    try:  # another way to the same losses
        assert scored(Segmentation(ignore_index=9), pixels, masks) == pytest.approx(found, rel=1e-6)
    finally:
        torch.use_deterministic_algorithms(False)

    words = torch.randn(10, 6, WORDS, generator=draw)
    following = torch.randint(0, WORDS, (10, 6), generator=draw)
    following[:, 4:] = -100
    found = scored(LanguageModel(bytes_per_token=2.0), words, following)
    loss = functional.cross_entropy(words[:, :4].flatten(0, 1), following[:, :4].flatten()).item()
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) / 2, rel=1e-5)


def wrong_targets(
    task: BuiltIn,
    targets: Tensor,
    outputs: Tensor | None = None,
    error: type[Exception] = ConfigError,
) -> str:
    """What is said of them: of the data alone, or where the outputs show it."""
    with pytest.raises(error) as caught:
        (
            task.check((targets, targets))
            if outputs is None
            else task.loss(nn.Identity(), (outputs, targets))
        )
    return f"{caught.value}; {getattr(caught.value, 'remedy', '')}"


def test_targets_that_cannot_be_right_are_named() -> None:
    hot = torch.tensor([[1.0, 0, 1, 1]])
    said = wrong_targets(Classification(), hot)
    assert "soft label is [1, 0, 1, 1], whose sum is 3; " in said and "use task=multilabel" in said
    assert "the first sample's targets are [3, 0]" in wrong_targets(
        Multilabel(), torch.tensor([[3.0, 0]])
    )
    masks = torch.tensor([[[0, 1], [2, 255]]])
    assert "go from 0 to 255, the data set has 3 classes" in (
        said := wrong_targets(Segmentation(3), masks)
    )
    assert "to leave out the pixels with target 255, use task.ignore_index=255" in said
    Segmentation(3, ignore_index=255).check((masks, masks))
    said = wrong_targets(Segmentation(), masks, torch.zeros(1, 3, 2, 2), DataError)
    assert "go from 0 to 255, the model gives 3 classes" in said and "task.ignore_index=255" in said
    assert "is -1; targets to leave out must be -100" in wrong_targets(
        LanguageModel(), torch.tensor([[4, -1]])
    )
    unlabelled = wrong_targets(
        Classification(), torch.tensor([1, -100]), torch.zeros(2, 3), DataError
    )
    assert "the labels go from -100 to 1" in unlabelled, (
        "torch would leave it out, and the mean would count it"
    )


def test_numbers_for_classes_are_counted() -> None:
    four = [1.0, 1.0, 1.0, 1.0]
    logits = torch.zeros(1, 3, 2, 2)
    said = wrong_targets(
        Segmentation(class_weights=four), torch.zeros(1, 2, 2, dtype=torch.long), logits, DataError
    )
    assert (
        said
        == "task.class_weights has 4 numbers, but the model has 3 outputs; give one number for each output"
    )
    said = wrong_targets(
        Multilabel(pos_weight=four), torch.zeros(1, 3), torch.zeros(1, 3), DataError
    )
    assert said.startswith("task.pos_weight has 4 numbers, but the model has 3 outputs")
    assert wrong_targets(
        Classification(class_weights=four), LABELS, torch.zeros(len(LABELS), 3), DataError
    )


def test_one_label_may_be_a_number_each() -> None:
    logits = torch.tensor([[0.3], [-2.0], [1.0]])
    labels = torch.tensor([1.0, 0.0, 0.0])
    loss, units = Multilabel().loss(nn.Identity(), (logits, labels))
    expected = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels, reduction="sum")
    assert (loss, units) == (expected, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16, torch.bool])
def test_labels_may_be_integers_of_any_width(dtype: torch.dtype) -> None:
    """As numpy arrays and masks have them; torch's own loss takes int64 and uint8 alone."""
    model = nn.Linear(3, 2)
    inputs = torch.ones(4, 3)
    labels = torch.tensor([0, 1, 1, 0])
    expected = Classification().loss(model, (inputs, labels))
    assert Classification().loss(model, (inputs, labels.to(dtype))) == expected
    assert choose("auto", (inputs, labels.to(dtype)), built_in_tasks()) == "classification"
    masks = torch.ones(2, 3, 1, dtype=torch.int64)
    pixels = nn.Conv2d(1, 2, 1)
    scores = [
        Segmentation().score(pixels, (torch.ones(2, 1, 3, 1), one))
        for one in (masks, masks.to(dtype))
    ]
    assert scores[0]["loss"] == scores[1]["loss"]


class Margin(Classification):
    """With a loss of its own."""

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(outputs, targets, reduction="sum")


def test_plan_names_the_loss_of_built_in_tasks_alone() -> None:
    assert (
        task_row(ClassificationConfig(), Classification())
        == "classification, cross_entropy, mean over samples"
    )
    assert (
        task_row(CustomTaskConfig(target="mine.Margin"), Margin())
        == "mine.Margin, mean over samples"
    )


@pytest.mark.parametrize("shape", [(4, 3), (4, 1, 3), (4, 3, 1), (1, 4, 3)])
def test_dimensions_of_one_are_no_matter_to_a_regression(shape: tuple[int, ...]) -> None:
    outputs = torch.arange(12.0)
    targets = torch.ones(4, 3)
    loss, samples = Regression().loss(nn.Identity(), (outputs.view(shape), targets))
    assert loss.item() == pytest.approx((outputs - 1).square().sum().item() / 3)
    assert samples == 4


@pytest.mark.parametrize(
    ("task", "shape", "targets"),
    [
        (Regression(), (3, 4), torch.ones(4, 3)),
        (Classification(), (4, 1, 3), torch.zeros(4, dtype=torch.int64)),
        (Classification(), (4, 3, 1), torch.full((4, 3), 1 / 3)),
        (Multilabel(), (4, 1, 3), torch.ones(4, 3)),
    ],
)
def test_outputs_of_other_rows_are_refused_by_shape(
    task: BuiltIn, shape: tuple[int, ...], targets: Tensor
) -> None:
    outputs = torch.zeros(shape)
    with pytest.raises(DataError, match=rf"outputs are of shape \[{', '.join(map(str, shape))}\]"):
        task.loss(nn.Identity(), (outputs, targets))
