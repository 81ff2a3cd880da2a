"""Tasks: what each takes and reports, and the exact mean over the units of a global batch, however
it is split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from ddp_train.assembly.batches import loader_options
from ddp_train.assembly.metrics import metric_names
from ddp_train.assembly.model import build_task
from ddp_train.assembly.plan import build_plan
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import ArraySource
from ddp_train.data.loader import Loader
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit
from ddp_train.errors import ConfigError, DataError, TaskError
from ddp_train.models.config import MlpConfig
from ddp_train.options.custom import CustomTaskConfig
from ddp_train.options.schema import Config
from ddp_train.runs.plan_report import task_row
from ddp_train.tasks.builtin import Classification, Multilabel, Regression, Segmentation
from ddp_train.tasks.catalog import choose
from ddp_train.tasks.config import ClassificationConfig
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.score import Score, Scorer
from ddp_train.tasks.supervised import BuiltIn
from ddp_train.tasks.task import BatchScore, ModelWithTask, Task
from ddp_train.tasks.trial import check_loss, check_scores, undisturbed
from ddp_train.tasks.user_task import complete
from ddp_train.tensor_tree import map_tensors
from tests.support.jobs import config_of, job_of, largest_difference
from tests.support.ranks import on_ranks

SAMPLES = 29
CLASSES = 3
WORDS = 7
LENGTH = 6
"""A prime: the last global batch has 13 of 16 samples, which 2, 3 and 4 processes share
unevenly."""
DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(SAMPLES, 4, generator=DRAW)
LABELS = torch.randint(0, CLASSES, (SAMPLES,), generator=DRAW)
IMAGES = torch.randn(SAMPLES, 2, 4, 4, generator=DRAW)
MASKS = torch.randint(0, CLASSES, (SAMPLES, 4, 4), generator=DRAW)
MASKS[
    torch.rand(MASKS.shape, generator=DRAW) < torch.linspace(0, 0.9, SAMPLES)[:, None, None]
] = -100
IDS = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=DRAW)
NEXT = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=DRAW)
NEXT[
    torch.arange(LENGTH) >= 1 + torch.arange(SAMPLES)[:, None] % LENGTH
] = -100  # from 1 to 6 valid tokens each
NEXT[3] = -100  # and one sample without any


class Ragged:
    """Sentences of 1 to 5 vectors, each with a weight: dicts, put together by the data set
    itself."""

    classes = ("no", "yes")

    def __init__(self, train: bool) -> None:
        self.lengths = [1 + number * 7 % 5 for number in range(SAMPLES)]
        self.words = torch.randn(SAMPLES, 5, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {
            "words": self.words[number, : self.lengths[number]],
            "weight": torch.tensor(1.0 + number % 3),
        }

    def collate_fn(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        counts = torch.tensor([len(sample["words"]) for sample in samples])
        return {
            "words": nn.utils.rnn.pad_sequence(
                [sample["words"] for sample in samples], batch_first=True
            ),
            "about": {
                "counts": counts,
                "weights": default_collate([sample["weight"] for sample in samples]),
            },
        }


class WeightedNorm:
    """No base class: what it lacks comes from `Task`. The mean is over weighted words, whose number
    is no integer."""

    better = {"mean_output": "max"}  # noqa: RUF012

    def parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        counts = batch["about"]["counts"]
        weights = batch["about"]["weights"]
        outputs = model(batch["words"]).squeeze(-1)
        valid = torch.arange(outputs.shape[1])[None] < counts[:, None]
        return outputs, valid * weights[:, None] / 3

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, weights = self.parts(model, batch)
        return ((outputs - 1).square() * weights).sum(), weights.sum()

    def score(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        outputs, weights = self.parts(model, batch)
        return {"mean_output": ((outputs * weights).sum(), weights.sum())}


class Head(nn.Module):
    """A model for every task here: a layer over the last dimension of numbers, or over channels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers: dict[str, nn.Module] = {
            "table": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
            "number": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
            "image": nn.Conv2d(2, CLASSES, 3, padding=1),
            "text": nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, WORDS)),
        }
        self.layers = layers[kind]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


SOFT = functional.one_hot(LABELS, CLASSES) * 0.8 + 0.2 / CLASSES
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "classification": (
        "table",
        {"name": "classification", "label_smoothing": 0.1, "class_weights": [1, 2, 3]},
        ArraySource(INPUTS, LABELS),
    ),
    "soft labels": ("table", {"name": "classification"}, ArraySource(INPUTS, SOFT)),
    "multilabel": (
        "table",
        {"name": "multilabel", "pos_weight": [1, 2, 3]},
        ArraySource(INPUTS, (SOFT > 0.5).float()),
    ),
    "regression": ("table", {"name": "regression", "loss": "huber"}, ArraySource(INPUTS, SOFT)),
    "segmentation": ("image", {"name": "segmentation"}, ArraySource(IMAGES, MASKS)),
    "language_model": ("text", {"name": "language_model"}, ArraySource(IDS, NEXT)),
    "custom": ("number", {"_target_": f"{__name__}.WeightedNorm"}, UserDataset(Ragged(True), 0)),
}
GLOBAL_BATCH = 16
STEPS = 6


def as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def mean_of_batch(name: str, model: nn.Module, data: Any) -> Tensor:
    """The mean over the units of a whole batch, as the formula of the task says."""
    if name == "custom":
        total, weight = WeightedNorm().loss(model, map_tensors(as_double, data))
        return total / weight
    inputs, targets = map(as_double, data)
    outputs = model(inputs)
    factors = torch.tensor([1.0, 2.0, 3.0]).double()
    if name == "classification":
        each = functional.cross_entropy(
            outputs, targets, weight=factors, label_smoothing=0.1, reduction="none"
        )
        return each.mean()  # torch's own mean would divide by the factors
    if name == "multilabel":
        return functional.binary_cross_entropy_with_logits(outputs, targets, pos_weight=factors)
    if name == "regression":
        return functional.huber_loss(outputs, targets)
    if name == "language_model":
        outputs = outputs.flatten(0, 1)
        targets = targets.flatten()
    return functional.cross_entropy(outputs, targets)


def by_hand(name: str) -> dict[str, Tensor]:
    """Plain PyTorch: each global batch in one pass on one process."""
    job = made(World(), name, "fp64", 1, strategy={"name": "single"})
    model = job.module.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_of_batch(
            name, model, CASES[name][2].get_batch(job.plan.global_batch(step), 0)
        ).backward()
        optimizer.step()
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def made(world: World, name: str, precision: str, accumulation: int, **more: Any) -> Any:
    kind, task, source = CASES[name]
    config = config_of(
        world,
        **{
            "task": task,
            "model": {"_target_": f"{__name__}.Head", "kind": kind},
            "data": {"_target_": f"{__name__}.Ragged"},
            "train": {
                "global_batch_size": GLOBAL_BATCH,
                "accumulation_steps": accumulation,
                "epochs": 3,
                "max_steps": STEPS,
            },
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "constant"},
            "tuning": {"precision": precision, "num_workers": 0},
            **more,
        },
    )
    return job_of(config, world, (source, source))


def trained(job: Any) -> tuple[dict[str, Tensor], float, Score]:
    """Weights, the mean loss of the last epoch, and the score."""
    fit(job)
    weights = {key: tensor.clone() for key, tensor in job.module.model.state_dict().items()}
    return weights, job.stepper.mean_loss().value, evaluate(job.evaluation)


def ladder(world: World) -> dict[tuple[str, str, int], Any]:
    rungs = itertools.product(CASES, ("fp64", "fp32"), (1, 4))
    return {
        (name, precision, accumulation): trained(made(world, name, precision, accumulation))
        for name, precision, accumulation in rungs
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_task_has_the_mean_over_the_units_of_the_global_batch_on_any_number_of_ranks() -> (
    None
):
    expected = {name: by_hand(name) for name in CASES}
    (alone,) = on_ranks(1, ladder)
    for name, weights in expected.items():
        untrained = made(
            World(), name, "fp64", 1, strategy={"name": "single"}
        ).module.model.state_dict()
        assert largest_difference(weights, untrained) > 1e-2, "the comparison would be idle"
    for ranks in (1, 2, 3, 4):
        for found in on_ranks(ranks, ladder, timeout_seconds=200) if ranks > 1 else [alone]:
            for (name, precision, accumulation), (weights, loss, score) in found.items():
                what = (ranks, name, precision, accumulation)
                tolerance = 1e-10 if precision == "fp64" else 1e-5
                assert largest_difference(weights, expected[name]) < tolerance, what
                reference = alone[name, precision, 1]
                assert loss == pytest.approx(reference[1], rel=tolerance), what
                assert score.metrics == pytest.approx(reference[2].metrics, rel=tolerance), what


def in_order(world: World) -> tuple[dict[str, Tensor], Score]:
    ordered = {"name": "ordered", "virtual_shards": 4}
    jobs = [made(world, name, "fp32", 1, strategy=ordered) for name in ("language_model", "custom")]
    return [trained(job) for job in jobs]


@pytest.mark.slow
def test_ordered_reduction_has_the_same_bits_for_units_that_are_no_samples() -> None:
    (alone,) = on_ranks(1, in_order)
    for ranks in (2, 4):
        for found in on_ranks(ranks, in_order):
            for (weights, loss, score), (expected, its_loss, its_score) in zip(
                found, alone, strict=True
            ):
                assert largest_difference(weights, expected) == 0
                assert (loss, score) == (its_loss, its_score)


def test_a_global_batch_without_units_changes_nothing() -> None:
    source = ArraySource(IDS[:8], torch.full_like(NEXT[:8], -100))
    config = config_of(
        World(),
        strategy={"name": "single"},
        task={"name": "language_model"},
        model={"_target_": f"{__name__}.Head", "kind": "text"},
        train={"global_batch_size": 8, "epochs": 1},
        optimizer={"name": "sgd"},
    )
    job = job_of(config, World(), (source, source))
    before = {key: tensor.clone() for key, tensor in job.module.model.state_dict().items()}
    fit(job)
    assert largest_difference(before, job.module.model.state_dict()) == 0
    assert math.isnan(job.stepper.mean_loss().value), "there is nothing to take a mean of"


# --- metrics --------------------------------------------------------------------------------------


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


def few_batches(world: World) -> Score | None:
    """Two batches on three processes: the last has none, and does not know which metrics there
    are."""
    kind, task, _ = CASES["segmentation"]
    sources = ArraySource(IMAGES, MASKS), ArraySource(IMAGES[:6], MASKS[:6])
    config = config_of(
        world,
        task=task,
        model={"_target_": f"{__name__}.Head", "kind": kind},
        train={"evaluate_batch_size": 4, "global_batch_size": 8},
    )
    return evaluate(job_of(config, world, sources).evaluation)


def test_processes_without_a_batch_have_the_score_of_all() -> None:
    (alone,), many = on_ranks(1, few_batches), on_ranks(3, few_batches)
    assert (
        alone
        and alone.samples == 6
        and set(alone.metrics) == {"loss", "pixel_accuracy", "mean_iou"}
    )
    assert many == [alone] * 3


# --- what fits, and what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "task"),
    [(LABELS, "classification"), (INPUTS[:, 0], "regression"), (INPUTS[:, :1], "regression")],
)
def test_auto_takes_what_has_one_meaning(targets: Tensor, task: str) -> None:
    assert choose("auto", (INPUTS, targets)) == task


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (
            (INPUTS, SOFT),
            (
                "task=auto: the targets are numbers of shape [n, 3]",
                "multilabel",
                "regression",
                "classif",
            ),
        ),
        ((IMAGES, MASKS), ("integers of shape [n, 4, 4]", "segmentation")),
        ((IDS, NEXT), ("integers of shape [n, 6]", "language_model", "multilabel")),
        (
            (INPUTS, LABELS[:, None]),
            ("integers of shape [n, 1]", "return its number, not a list of one"),
        ),
        (
            {"words": IDS, "label": LABELS},
            ("a dict of words, label;", "data.fields=[INPUT,TARGET]", "task._target_="),
        ),
        (IDS, ("a sample is no (input, target)", "task=language_model")),
        ((INPUTS, {"boxes": IDS}), ("whose target is a dict", "task._target_=")),
        (
            (INPUTS, ("cat", "dog")),
            ("whose target is a text, 'cat'; return the number of the class",),
        ),
    ],
)
def test_auto_never_guesses(sample: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose("auto", sample)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("task", "targets", "instead"),
    [
        ("classification", INPUTS[:, 0], "use task=regression"),
        ("regression", LABELS, "return them as float32; or use task=classification"),
        ("multilabel", LABELS, "use task=classification"),
        ("segmentation", LABELS, "use task=classification"),
        ("classification", MASKS, "use task=segmentation"),
        ("regression", IMAGES, "use task._target_="),
    ],
)
def test_a_task_that_does_not_fit_is_refused_with_one_that_does(
    task: str, targets: Tensor, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(task, (INPUTS, targets))
    assert f"task={task}: needs targets that are" in str(caught.value) and instead in str(
        caught.value
    )


class Returns:
    def __init__(self, found: Any) -> None:
        self.found = found

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(()), "a tensor [] of torch.float32"),
        ((torch.zeros(3), 3), "(a tensor [3] of torch.float32, int)"),
        ((torch.zeros((), dtype=torch.int64), 3), "(a tensor [] of torch.int64, int)"),
        (
            (torch.zeros(()), torch.zeros(2)),
            "(a tensor [] of torch.float32, a tensor [2] of torch.float32)",
        ),
        (None, "returned NoneType"),
    ],
)
def test_a_loss_of_another_form_is_told(found: Any, words: str) -> None:
    module = ModelWithTask(nn.Identity(), complete(Returns(found)), "cpu", None)
    with pytest.raises(TaskError) as caught:
        module(torch.zeros(2))
    assert "loss() of the task Returns returned" in str(caught.value)
    assert words in str(caught.value) and caught.value.remedy.startswith(
        "return (sum of the losses"
    )


class OfOutputs:
    """A task whose loss is a function of the model's outputs."""

    def __init__(self, loss: Callable[[Tensor], Any], units_are_samples: bool = False) -> None:
        self.function = loss
        self.units_are_samples = units_are_samples

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.function(model(batch))


def tried(task: Any) -> ModelWithTask:
    """A task that was tried with 9 samples of 3 numbers each. Raises what the trial raises."""
    samples = torch.arange(27.0).view(9, 3) / 10 + 1
    module = ModelWithTask(nn.BatchNorm1d(3), complete(task), "cpu", None)
    check_loss(
        module,
        lambda numbers: samples[torch.from_numpy(numbers)],
        len(samples),
        "task._target_=mine.Task",
    )
    assert module.training
    return module


def contrast(outputs: Tensor) -> tuple[Tensor, int]:
    own = torch.arange(len(outputs))
    return nn.functional.cross_entropy(outputs @ outputs.T, own, reduction="sum"), len(own)


def valid(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mask = outputs > 1.2
    return outputs[mask].sum(), mask.sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: (outputs.square().sum(), len(outputs)),
        lambda outputs: (outputs.square().sum(), outputs.numel()),
        lambda outputs: (-outputs.mean() * len(outputs), len(outputs)),
        lambda outputs: ((outputs * torch.rand_like(outputs)).sum(), len(outputs)),
        lambda outputs: (
            outputs.std(0).sum() * len(outputs),
            len(outputs),
        ),  # of one sample it is NaN
        lambda outputs: (outputs.sum() * 0, 0),
        contrast,
        valid,
    ],
)
def test_a_loss_that_is_a_sum_passes_the_trial(loss: Callable[[Tensor], Any]) -> None:
    tried(OfOutputs(loss))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            OfOutputs(lambda outputs: (outputs.square().mean(), len(outputs))),
            r"that is a mean, not a sum; return the sum",
        ),
        (
            OfOutputs(lambda outputs: (outputs.square().sum(), 1)),
            (
                r"gives 3\.64996 for one sample and 18\.2498 for a batch of 5 copies of it, and"
                r" counts 1 unit in either"
            ),
        ),
        (
            OfOutputs(lambda outputs: (outputs.square().mean(), 1)),
            r"would depend on the number of processes",
        ),
        (
            OfOutputs(lambda outputs: (outputs.sum(), outputs.numel()), units_are_samples=True),
            (
                r"mine.Task: units_are_samples is True, but loss\(\) counts 3 units in a batch of"
                r" 1; leave"
            ),
        ),
        (
            OfOutputs(
                lambda outputs: (outputs.sum(), len(outputs.unique(dim=0)) + len(outputs) - 1), True
            ),
            r"counts 13 units in a batch of 7",  # right for copies, wrong for samples that differ
        ),
        (
            OfOutputs(
                lambda outputs: (outputs.sum(), len(outputs) * outputs.round().max())
            ),  # as padding would
            (
                r"counts 21 units in a batch of 7 samples, and 14 if they come one by one: .* count"
                r" what is valid"
            ),
        ),
    ],
)
def test_a_mean_and_wrong_units_are_refused_before_the_first_step(task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tried(task)


def test_a_trial_leaves_no_trace() -> None:
    def enqueue(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        model.running_mean.add_(1)
        model.running_var = model.running_var * 2  # another tensor in its place
        return (model(batch) * torch.rand(())).sum(), len(batch)

    task = OfOutputs(lambda _: None)
    task.loss = enqueue  # type: ignore[method-assign]
    before = torch.get_rng_state()
    module = tried(task)
    assert torch.equal(before, torch.get_rng_state())
    assert (module.model.running_var == 1).all()
    assert not module.model.running_mean.any() and module.model.num_batches_tracked == 0


def test_a_loss_that_cannot_be_tried_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A gradient penalty, for one: the trial has no gradients."""
    tried(
        OfOutputs(
            lambda outputs: (torch.autograd.grad(outputs.sum(), outputs)[0].sum(), len(outputs))
        )
    )
    assert (
        "task._target_=mine.Task: its loss could not be tried in eval mode: RuntimeError: "
        in caplog.text
    )


class Scores(Returns):
    def score(self, model: nn.Module, batch: Any) -> Any:
        return self.found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(()), "score() of the task Scores returned a tensor [] of torch.float32"),
        ({"iou": torch.zeros(())}, "returned a tensor [] of torch.float32 for the metric iou"),
        (
            {"iou": (torch.zeros(3), 3)},
            "returned (a tensor [3] of torch.float32, int) for the metric iou",
        ),
        ({"iou": (torch.zeros(3, 3), torch.zeros(3, 3))}, "for the metric iou"),
        ({"loss": (1.0, 2), "iou": (1.0, 2, 3)}, "returned (float, int, int) for the metric iou"),
    ],
)
def test_scores_of_another_form_are_told(found: Any, words: str) -> None:
    module = ModelWithTask(nn.Identity(), complete(Scores(found)), "cpu", None)
    with pytest.raises(TaskError) as caught:
        module.score(torch.zeros(2))
    assert (
        words in str(caught.value)
        and "(sum, weight)" in caught.value.remedy
        and caught.value.kind == "task"
    )


def sound(batch: Tensor) -> dict[str, Any]:
    return {"loss": (batch.sum(), len(batch))}


def tried_scores(score: Callable[[Tensor], Any]) -> None:
    """Tries a task with these scores on seven samples of two numbers. Raises what the trial
    raises."""
    samples = torch.tensor([[1.0, 2], [4, 1], [0, 3], [2, 2], [5, 1], [1, 1], [0, 2]])
    task = Scores(None)
    task.score = lambda model, batch: score(batch)  # type: ignore[method-assign]
    module = ModelWithTask(nn.Identity(), complete(task), "cpu", None)
    check_scores(
        module,
        lambda numbers: samples[torch.from_numpy(numbers)],
        len(samples),
        "task._target_=mine.Task",
    )


@pytest.mark.parametrize(
    "score",
    [
        lambda batch: {
            "loss": (batch.sum(), batch.numel()),
            "iou": ((batch > 1).sum(0), (batch > 0).sum(0)),
        },
        lambda batch: {"loss": (0.0, 0), "top1": ((batch[:, 0] > 3).sum(), len(batch))},
        lambda batch: {
            "loss": contrast(batch),
            "top1": ((batch @ batch.T).argmax(1).eq(0).sum(), len(batch)),
        },
        lambda batch: {"loss": (batch.std(0).sum() * len(batch), len(batch))},
    ],
)
def test_scores_that_are_sums_pass_the_trial(score: Callable[[Tensor], Any]) -> None:
    tried_scores(score)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda batch: {"mae": (batch.mean(), len(batch)), **sound(batch)},
            "mae = (1.78571, 7) for 7",
        ),
        (
            lambda batch: {"loss": (batch.clamp(min=1).mean(), (batch > 0).sum())},
            "not (mean, weight)",
        ),
        (lambda batch: {"loss": (batch.mean(), 1)}, "would depend on train.evaluate_batch_size"),
        (
            lambda batch: {"top1": ((batch[:, 0] > 3).float().mean(), len(batch)), **sound(batch)},
            "top1",
        ),
    ],
)
def test_scores_that_are_means_are_refused(score: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tried_scores(score)
    assert message in str(caught.value), str(caught.value)


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
    assert "go from 0 to 255, the data have 3 classes" in (
        said := wrong_targets(Segmentation(3), masks)
    )
    assert "if 255 marks what is to be left out, use task.ignore_index=255" in said
    Segmentation(3, ignore_index=255).check((masks, masks))
    said = wrong_targets(Segmentation(), masks, torch.zeros(1, 3, 2, 2), DataError)
    assert "go from 0 to 255, the model gives 3 classes" in said and "task.ignore_index=255" in said
    assert "is -1; those that are to be left out must be -100" in wrong_targets(
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
        == "task.class_weights has 4 numbers, the model 3 outputs; give one number for each output"
    )
    said = wrong_targets(
        Multilabel(pos_weight=four), torch.zeros(1, 3), torch.zeros(1, 3), DataError
    )
    assert said.startswith("task.pos_weight has 4 numbers, the model 3 outputs")
    assert wrong_targets(
        Classification(class_weights=four), LABELS, torch.zeros(len(LABELS), 3), DataError
    )


def test_one_label_may_be_a_number_each() -> None:
    logits = torch.tensor([[0.3], [-2.0], [1.0]])
    labels = torch.tensor([1.0, 0.0, 0.0])
    loss, units = Multilabel().loss(nn.Identity(), (logits, labels))
    expected = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels, reduction="sum")
    assert (loss, units) == (expected, 3)


def test_numbers_of_0_and_1_alone_are_no_regression_unasked() -> None:
    """Behind a first sample of each: they may be sorted by class."""
    config = Config(model=MlpConfig())
    binary = ArraySource(torch.randn(40, 3), (torch.arange(40) > 19).float())
    sample = binary.get_batch(np.array([0]), None)
    with pytest.raises(ConfigError, match="0 or 1; choose task=multilabel if they say yes or no"):
        build_task(config.task, binary, sample)
    numbers = ArraySource(torch.randn(40, 3), torch.arange(40.0))
    assert (
        type(build_task(config.task, numbers, numbers.get_batch(np.array([0]), None))).__name__
        == "Regression"
    )


@pytest.mark.parametrize("kept", [[0, 2], [0, 1, 2, 0, 1, 2]])
def test_a_collate_function_that_drops_samples_or_adds_some_is_refused(kept: list[int]) -> None:
    data = [(torch.ones(2), number % 2) for number in range(6)]

    def other(samples: list[Any]) -> Any:
        inputs, labels = zip(*(samples[number] for number in kept), strict=True)
        return torch.stack(inputs), torch.tensor(labels)

    source = UserDataset(data, 0, outputs=2, collate=other)
    plan = [MicroBatch(0, 0, np.arange(3), 3, 1.0, True)]
    for task, refused in (
        (Classification(), True),
        (Segmentation(), False),
        (complete(Returns(None)), False),
    ):
        loader = Loader(source, plan, "cpu", loader_options(config_of(World()), task))
        if refused:
            with pytest.raises(
                DataError, match=f"a batch of 3 samples has {len(kept)} targets"
            ) as caught:
                next(iter(loader))
            assert "let collate_fn keep each sample once" in caught.value.remedy
        else:
            assert len(next(iter(loader)).data[1]) == len(kept)


def test_data_without_a_unit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer(1, "cpu", LanguageModel().derive)
    scorer.add(0, BatchScore({"loss": (torch.zeros(()), torch.tensor(0))}), 3)
    scorer.result()
    assert "the perplexity of an evaluation is" in caplog.text
    assert "there is no unit in all of the data: each target is left out" in caplog.text


def test_scores_that_depend_on_the_division_into_batches_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are scored once before the first step, which leaves no trace."""

    def names(score: Callable[[nn.Module, Tensor], Any]) -> list[str]:
        caplog.clear()
        task = Scores(None)
        task.score = score  # type: ignore[method-assign]
        module = ModelWithTask(nn.BatchNorm1d(3), complete(task), "cpu", None)
        before = torch.get_rng_state()
        batch = SimpleNamespace(data=torch.arange(12.0).view(4, 3))
        assert metric_names(module, [batch]) == ["loss"]  # type: ignore[list-item]
        assert torch.equal(before, torch.get_rng_state()) and module.training
        assert not module.model.running_mean.any() and module.model.num_batches_tracked == 0
        return [
            record.getMessage()
            for record in caplog.records
            if "scoring a batch" in record.getMessage()
        ]

    assert names(lambda model, batch: {"loss": (model(batch).sum(), len(batch))}) == []
    (drawn,) = names(
        lambda model, batch: {"loss": ((model(batch) * torch.rand(())).sum(), len(batch))}
    )
    assert (
        "scoring a batch draws random numbers: metrics and predictions depend on the number of"
        " processes" in drawn
    )
    (written,) = names(lambda model, batch: {"loss": (model.train()(batch).sum(), len(batch))})
    assert (
        "scoring a batch changes the buffer running_mean and changes the buffer running_var:"
        " metrics" in written
    )


def test_a_loss_that_fails_for_one_sample_alone_is_tried_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Pairs:
        def loss(self, model: nn.Module, batch: Any) -> Any:
            if len(batch) < 2:
                raise ValueError("needs pairs")
            return batch.sum(), len(batch)

        def score(self, model: nn.Module, batch: Any) -> Any:
            return {"iou": (1.0, len(batch))}

    samples = torch.ones(7, 2)
    module = ModelWithTask(nn.Identity(), complete(Pairs()), "cpu", None)
    check_scores(
        module, lambda numbers: samples[torch.from_numpy(numbers)], 7, "task._target_=mine.Pairs"
    )
    assert (
        "its score could not be tried in eval mode: TaskError: loss() of the task Pairs failed"
        in caplog.text
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.float32])
def test_buffers_of_any_type_are_put_back(dtype: torch.dtype) -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gone", torch.zeros(2, dtype=dtype))
            self.register_buffer("kept", torch.full((2,), math.nan).to(dtype))
            self.register_buffer("counted", torch.zeros(2))

    module = ModelWithTask(Forgets(), complete(Returns((torch.zeros(()), 1))), "cpu", None)
    with undisturbed(module) as done:
        del module.model.gone
        module.model.counted += 1
    assert done == ["changes the buffer counted"]
    assert [name for name, _ in module.model.named_buffers()] == ["kept", "counted", "gone"]
    assert not module.model.counted.any()


def test_a_loss_that_evaluations_lack_is_told_with_what_score_may_return() -> None:
    """Detectors of torchvision return losses in train mode, and boxes in eval mode."""

    class Detector(nn.Module):
        def forward(self, images: Tensor) -> Any:
            return {"loss": images.sum()} if self.training else [images]

    class Detection:
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return sum(model(batch).values()), len(batch)

        def score(self, model: nn.Module, batch: Any) -> Any:
            return {"iou": (1.0, len(batch))}

    module = ModelWithTask(Detector(), complete(Detection()), "cpu", None)
    assert module.loss_of(torch.ones(2, 1))[0] == 2
    with pytest.raises(
        TaskError,
        match=r"loss\(\) of the task Detection failed in eval mode: AttributeError: 'list' object",
    ) as caught:
        module.eval().score(torch.ones(2, 1))
    assert "return 'loss': (sum, units) from score()" in caught.value.remedy


def test_weights_in_a_task_that_nobody_trains_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = Returns((torch.zeros(()), 1))
    task.teacher = nn.Linear(2, 2)  # type: ignore[attr-defined]
    complete(task)
    assert (
        "the parameters of Returns.teacher want gradients, and nobody trains them; to train it,"
        in caplog.text
    )
    caplog.clear()
    task.teacher.requires_grad_(False).eval()  # type: ignore[attr-defined]
    complete(task)
    assert caplog.text == ""


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"task._target_: Linear has no method loss|Linear has parameters"
    ):
        complete(nn.Linear(2, 2))
    learned = nn.Linear(2, 2)
    learned.loss = lambda model, batch: (model(batch).sum(), 1)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="has parameters that no optimizer gets"):
        complete(learned)
    odd = Returns((torch.zeros(()), 1))
    odd.better = {"iou": "higher"}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"better\['iou'\]='higher': must be 'min' or 'max'"):
        complete(odd)


def test_a_batch_of_a_language_model_may_be_ids_a_pair_or_a_dict() -> None:
    task = LanguageModel()
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(WORDS, WORDS, generator=draw)

    def model(input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return table[input_ids]

    ids = IDS[:4]
    alone, units = task.loss(model, ids)
    assert units == 4 * (LENGTH - 1)
    for batch in ((ids[:, :-1], ids[:, 1:]), {"input_ids": ids}, {"input_ids": ids, "labels": ids}):
        loss, number = task.loss(model, batch)
        assert torch.equal(loss, alone) and number == units
    of_transformers = task.loss(
        lambda **given: SimpleNamespace(logits=model(**given)), {"input_ids": ids}
    )  # type: ignore[arg-type]
    assert torch.equal(of_transformers[0], alone), "its models return an object with logits"
    mask = (torch.arange(LENGTH) < 4).long().expand(4, LENGTH)
    padded = {"input_ids": ids, "attention_mask": mask}
    loss, number = task.loss(model, padded)
    assert torch.equal(loss, task.loss(model, ids[:, :4])[0]) and number == 4 * 3


def test_the_ladder_meets_uneven_batches_and_stand_ins() -> None:
    train = {"global_batch_size": GLOBAL_BATCH, "accumulation_steps": 4}
    sizes = []
    for rank in range(4):
        world = World(rank, 4, rank, 4)
        plan = build_plan(config_of(world, train=train), world, SAMPLES)
        sizes += [micro_batch.num_real for micro_batch in plan.micro_batches()]
    assert set(sizes) == {0, 1}


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16, torch.bool])
def test_labels_may_be_integers_of_any_width(dtype: torch.dtype) -> None:
    """As numpy arrays and masks have them; torch's own loss takes int64 and uint8 alone."""
    model = nn.Linear(3, 2)
    inputs = torch.ones(4, 3)
    labels = torch.tensor([0, 1, 1, 0])
    expected = Classification().loss(model, (inputs, labels))
    assert Classification().loss(model, (inputs, labels.to(dtype))) == expected
    assert choose("auto", (inputs, labels.to(dtype))) == "classification"
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


def test_the_plan_names_a_loss_only_where_it_is_that_of_the_built_in_task() -> None:
    assert (
        task_row(ClassificationConfig(), Classification())
        == "classification, cross_entropy, mean over samples"
    )
    assert (
        task_row(CustomTaskConfig(target="mine.Margin"), Margin())
        == "mine.Margin, mean over samples"
    )
