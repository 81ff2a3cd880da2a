"""The trial of a user's task: means and wrong units are refused, sums pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train import all_gather, noise_like
from ddp_train.assembly.metrics import metric_names
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import evaluation_batch
from ddp_train.errors import ConfigError
from ddp_train.tasks import trial
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tasks.trial import (
    check_evaluation,
    check_loss,
    check_model,
    check_scores,
    undisturbed,
)
from ddp_train.tasks.user_task import complete
from tests.support.task_samples import Returns, Scores


class OfOutputs:
    """A task whose loss is a function of the model's outputs."""

    def __init__(self, loss: Callable[[Tensor], Any], units_are_samples: bool = False) -> None:
        self.function = loss
        self.units_are_samples = units_are_samples

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.function(model(batch))


def tried(task: Any, model: nn.Module | None = None) -> ModelWithTask:
    """A task that was tried with 9 samples of 3 numbers each. Raises what the trial raises.

    model: of 3 numbers; None for a batch norm.
    """
    samples = torch.arange(27.0).view(9, 3) / 10 + 1
    module = ModelWithTask(model or nn.BatchNorm1d(3), complete(task), "cpu", None)
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


def weighted(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """By weights whose sum, in float32, depends on the order."""
    weights = torch.sin(outputs.float()).square()
    return (outputs * weights).sum(), weights.sum()


def valid(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mask = outputs > 1.2
    return outputs[mask].sum(), mask.sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: (outputs.square().sum(), len(outputs)),
        lambda outputs: (outputs.square().sum(), outputs.numel()),
        lambda outputs: (outputs.square().sum() + 0.5 * len(outputs), len(outputs)),
        lambda outputs: (-outputs.mean() * len(outputs), len(outputs)),
        lambda outputs: ((outputs * torch.rand_like(outputs)).sum(), len(outputs)),
        lambda outputs: (
            outputs.std(0).sum() * len(outputs),
            len(outputs),
        ),  # of one sample it is NaN
        lambda outputs: (outputs.sum() * 0, 0),
        contrast,
        valid,
        weighted,
    ],
)
def test_a_loss_that_is_a_sum_passes_the_trial(loss: Callable[[Tensor], Any]) -> None:
    tried(OfOutputs(loss))


def gathered(outputs: Tensor) -> tuple[Tensor, int]:
    rows, own = all_gather(outputs)
    return nn.functional.cross_entropy(outputs @ rows.T, own, reduction="sum"), len(own)


@pytest.mark.parametrize(
    ("loss", "ranks", "is_told"),
    [
        (contrast, 3, True),
        (lambda outputs: ((outputs - outputs.mean(0)).square().sum(), len(outputs)), 3, True),
        (contrast, 1, False),
        (gathered, 3, False),
        (valid, 3, False),
        (lambda outputs: (outputs.square().sum(), outputs.numel()), 3, False),
        (lambda outputs: ((outputs * torch.rand_like(outputs)).sum(), len(outputs)), 3, False),
        (lambda outputs: (outputs.std(0).sum() * len(outputs), len(outputs)), 3, False),
    ],
)
def test_a_loss_that_compares_samples_of_a_process_is_told(
    loss: Any,
    ranks: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trial, "ranks", lambda: ranks)
    tried(OfOutputs(loss))
    assert (trial.MIXED in caplog.text) == is_told


class Coupled(nn.Module):
    """Its output for a sample depends on those beside it."""

    def __init__(self, centre: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.centre = centre
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(inputs) - self.centre(self, inputs))


@pytest.mark.parametrize(
    ("centre", "ranks", "model_is_told", "task_is_told"),
    [
        (lambda model, inputs: inputs.mean(0), 3, True, True),
        (lambda model, inputs: inputs.mean(0) if model.training else 0, 3, False, True),
        (lambda model, inputs: inputs.mean(0), 1, False, False),
        (lambda model, inputs: all_gather(inputs)[0].mean(0), 3, False, False),
        (lambda model, inputs: inputs.mean(1, keepdim=True), 3, False, False),
        (lambda model, inputs: torch.rand_like(inputs) if model.training else 0, 3, False, False),
    ],
)
def test_a_model_that_couples_samples_of_a_process_is_told(
    centre: Any,
    ranks: int,
    model_is_told: bool,
    task_is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trial, "ranks", lambda: ranks)
    torch.manual_seed(0)
    task = OfOutputs(lambda outputs: (outputs.square().sum(), len(outputs)))
    module = ModelWithTask(Coupled(centre), complete(task), "cpu", None)
    samples = torch.rand(9, 3)
    batch_of = lambda numbers: samples[torch.from_numpy(numbers)]  # noqa: E731
    check_model(module, batch_of, 9, "model._target_=mine.Net")
    assert (f"model._target_=mine.Net: {trial.MIXED_BY_MODEL}" in caplog.text) == model_is_told
    check_loss(module, batch_of, 9, "task._target_=mine.Task")
    assert (trial.MIXED in caplog.text) == task_is_told


def penalised(outputs: Tensor) -> tuple[Tensor, int]:
    """A penalty that each process would add once."""
    return outputs.square().sum() + 0.5, len(outputs)


def test_a_penalty_that_is_not_multiplied_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        tried(OfOutputs(penalised))
    assert "of which 0.5 does not grow with the batch, as a penalty on weights" in str(
        refused.value
    )
    assert "return losses.sum() + penalty * units, units" in str(refused.value)


class InTraining:
    """A loss that is a sum in eval mode alone."""

    def __init__(self, loss: Callable[[Tensor], tuple[Tensor, int]]) -> None:
        self.function = loss

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        outputs = model(batch)
        if model.training:
            return self.function(outputs)
        return outputs.square().sum(), len(outputs)


def of_torch() -> nn.Module:
    """Layers that take statistics of a batch, or draw numbers, in train mode."""
    return nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Dropout(0.5), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (penalised, "of which 0.5 does not grow with the batch"),
        (lambda outputs: (outputs.mean(), len(outputs)), "that is a mean, not a sum"),
        (
            lambda outputs: (outputs.sum() + 0.5 * outputs.requires_grad, len(outputs)),
            "of which 0.5 does not grow with the batch",
        ),
    ],
)
def test_a_loss_that_is_no_sum_in_train_mode_alone_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tried(InTraining(loss), of_torch())
    assert "mine.Task: in train mode loss() gives " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: (outputs.sum() + 0.5 * len(outputs), len(outputs)),
        lambda outputs: (outputs.sum() + torch.rand(()), len(outputs)),
    ],
)
def test_a_loss_that_is_a_sum_in_train_mode_passes_the_trial(loss: Any) -> None:
    tried(InTraining(loss), of_torch())


def test_copies_with_draws_of_their_own_have_no_penalty() -> None:
    """Their losses lie on a line by chance, here to 0.5 %."""
    drawn = trial.LossTrial([(0.551102, 1), (1.224328, 2), (3.25791, 5)], (5.0, 7), [])
    assert drawn.constant_part == 0
    on_line = trial.LossTrial([(0.551102, 1), (1.224328, 2), (3.244006, 5)], (5.0, 7), [])
    assert on_line.constant_part == pytest.approx(-0.122124)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            OfOutputs(lambda outputs: (outputs.square().mean(), len(outputs))),
            r"that is a mean, not a sum; return the sum",
        ),
        (
            OfOutputs(lambda outputs: ((outputs + noise_like(outputs)).mean(), len(outputs))),
            r"that is a mean, not a sum; return the sum",
        ),
        (
            OfOutputs(lambda outputs: (outputs.square().sum(), 1)),
            (
                r"gives 3\.64996 for one sample and 18\.2498 for a batch of 5 copies of it, and"
                r" counts 1 unit for both"
            ),
        ),
        (
            OfOutputs(lambda outputs: (outputs.square().mean(), 3)),
            r"counts 3 units for both",
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
                r"counts 21 units in a batch of 7 samples, and 14 if they come one by one: .*"
                r" count only valid units"
            ),
        ),
    ],
)
def test_means_and_wrong_units_are_refused(task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tried(task)


class Remembers:
    """Its loss keeps a table of losses, in itself and in a buffer of the model, and a cache."""

    def __init__(self, scores: dict[str, Any], in_training: bool = False) -> None:
        self.scores = scores
        self.in_training = in_training
        self.table = torch.zeros(9)
        self.cache: Tensor | None = None

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        losses = model(batch).sum(1)
        self.cache = losses
        if model.training or not self.in_training:
            self.table[: len(losses)] = losses
            model.running_mean += 1
        return losses.sum(), len(losses)

    def score(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return self.scores


@pytest.mark.parametrize(
    ("task", "is_told"),
    [
        (Remembers({"accuracy": (1, 2)}), True),
        (Remembers({"accuracy": (1, 2), "loss": (1, 2)}), False),
        (Remembers({}, in_training=True), False),
        (OfOutputs(lambda outputs: (outputs.sum(), len(outputs))), False),
    ],
)
def test_state_that_an_evaluation_would_change_is_told(
    task: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModelWithTask(nn.BatchNorm1d(3), complete(task), "cpu", None)
    samples = torch.rand(9, 3)
    check_evaluation(module, lambda numbers: samples[torch.from_numpy(numbers)], 9, "mine.Task")
    told = "evaluations call loss(), which changes running_mean, task.table: samples"
    assert (told in caplog.text) == is_told
    assert is_told or not caplog.text


class Collects:
    """Keeps its outputs for a metric of the whole set."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return model(batch).sum(), len(batch)

    def score(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.outputs.append(model(batch))
        return {"loss": (self.outputs[-1].sum(), len(batch))}


@pytest.mark.parametrize(("ranks", "is_told"), [(3, True), (1, False)])
def test_what_a_score_collects_on_each_process_is_told(
    ranks: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trial, "ranks", lambda: ranks)
    module = ModelWithTask(nn.BatchNorm1d(3), complete(Collects()), "cpu", None)
    samples = torch.rand(9, 3)
    check_evaluation(module, lambda numbers: samples[torch.from_numpy(numbers)], 9, "mine.Task")
    assert ("mine.Task: score() changes task.outputs: each process" in caplog.text) == is_told
    assert is_told or not caplog.text


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
        "task._target_=mine.Task: loss() fails in a trial in eval mode, without gradients"
        " (RuntimeError: " in caplog.text
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


def test_scores_that_depend_on_the_division_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are scored once before the first step, which leaves no trace."""

    def names(score: Callable[[nn.Module, Tensor], Any]) -> list[str]:
        caplog.clear()
        task = Scores(None)
        task.score = score  # type: ignore[method-assign]
        module = ModelWithTask(nn.BatchNorm1d(3), complete(task), "cpu", None)
        before = torch.get_rng_state()
        batch = Batch(torch.arange(12.0).view(4, 3), evaluation_batch(0, np.arange(4)))
        assert metric_names(module, [batch]) == ["loss"]
        assert torch.equal(before, torch.get_rng_state()) and module.training
        assert not module.model.running_mean.any() and module.model.num_batches_tracked == 0
        return [
            record.getMessage()
            for record in caplog.records
            if "scoring a batch" in record.getMessage()
        ]

    assert names(lambda model, batch: {"loss": (model(batch).sum(), len(batch))}) == []
    assert names(lambda model, batch: {"loss": (noise_like(batch).sum(), len(batch))}) == []
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


def test_loss_that_fails_for_one_sample_is_tried_no_further(
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
        "score() fails in a trial in eval mode, without gradients (TaskError: loss() of the task"
        " Pairs failed" in caplog.text
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
    with undisturbed(module, "a trial") as done:
        del module.model.gone
        module.model.counted += 1
    assert done == ["changes the buffer counted"]
    assert [name for name, _ in module.model.named_buffers()] == ["gone", "kept", "counted"]
    assert not module.model.counted.any()
