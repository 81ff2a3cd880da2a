"""What a model is trained for: the loss of a batch, what its mean is taken over, and the scores of
a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ddp_train.errors import TaskError
from ddp_train.models.freezing import Frozen
from ddp_train.tasks.further_metrics import FurtherMetrics
from ddp_train.tasks.predictions import PREDICTIONS
from ddp_train.tasks.return_checks import checked_loss, checked_predictions, checked_scores

ScoreSums = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""For each metric its sum and its weight over a batch: scalars, or tensors with one number per
class, [k]."""


class Task:
    """What a model is trained for. A task of your own needs no base class: what it lacks is taken
    from here.

    A run minimises sum / units over the global batch: `loss` returns both for a part of it, a
    micro-batch, and neither the number of processes nor of micro-batches changes the result.
    """

    unit: str = "unit"
    """What the mean is taken over, for messages: sample, token, pixel."""
    units_are_samples: bool = False
    """A promise that a batch has as many units as samples. The launcher knows their number: nothing
    is exchanged."""
    loss_name: str = ""
    """For the plan that a run prints."""
    better: ClassVar[Mapping[str, str]] = {}
    """Which direction is better, `max` or `min`, for each metric. One that is not named has that of
    the built-in metric of its name (accuracy, mean_iou); without any, it can neither select nor be
    an objective."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        """The sum of the losses of all units of a batch, a scalar, and the number of units.

        batch: what the data set gives: (inputs, targets), or whatever its `collate_fn` made.
        """
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Any) -> ScoreSums:
        """name -> (sum, weight) of a batch; reported as sum / weight over the whole set, each
        sample once.

        A sum and a weight per class, [k], are reported as the mean over the classes whose weight is
        not zero: of the intersection and the union of every class, that is the mean intersection
        over union. `loss` is added if missing.
        """
        return {}

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """(outputs, targets) of a batch: what the further metrics of `metrics=[...]` are updated
        with."""
        raise NotImplementedError

    def score_and_predict(
        self, model: nn.Module, batch: Any
    ) -> tuple[ScoreSums, tuple[Tensor, Tensor]]:
        """What `score` and `predict` return. Worth overriding where one forward pass serves
        both."""
        return self.score(model, batch), self.predict(model, batch)

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """name -> [n, ...], a row per sample: the columns of mode=predict. Without it: `output` and
        `target`, as `predict` returns them."""
        outputs, targets = self.predict(model, batch)
        return {"output": outputs, "target": targets}

    def derive(self, scores: dict[str, float]) -> dict[str, float]:
        """Further metrics, computed from those of the whole set: a root, an exponential."""
        return {}

    def units_per_sample(self, batch: Any) -> float:
        """Of a batch of one sample, about. It scales the gradients before their exchange, so that
        fp16 neither overflows nor underflows; the result does not depend on it."""
        return 1.0


def can_predict(task: Task) -> bool:
    """Whether it has a method `predict`, or another that does its work."""
    return any(
        getattr(found, "__func__", found) is not getattr(Task, name)
        for name in ("predict", "score_and_predict")
        if (found := getattr(task, name))
    )


def has_columns(task: Task) -> bool:
    """Whether mode=predict gets something from it."""
    return can_predict(task) or has_own_columns(task)


def has_own_columns(task: Task) -> bool:
    """Whether its predictions need no targets: those of `Task` do."""
    found = task.predictions
    return getattr(found, "__func__", found) is not Task.predictions


class ModelWithTask(nn.Module):
    """The model and its loss in one forward pass, as DDP and DataParallel wrap it.

    Autocast is entered in here: entered outside, bfloat16 becomes float16 in the replicas of
    DataParallel. `forward` returns the sum of the losses, a scalar, and the number of units,
    float64, or None where units are samples. DataParallel gathers them: [replicas].
    """

    gathered = False
    """Whether DataParallel will gather what `forward` returns: it wants a dimension to do it
    along."""

    def __init__(
        self, model: nn.Module, task: Task, device: str, autocast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.is_ours = all(
            one.__module__.startswith("ddp_train.") for one in (type(task), task.loss)
        )
        """Whether what its loss returns needs no look in each step, of some microseconds."""
        self.device_type = torch.device(device).type
        self.autocast = autocast
        self.further: FurtherMetrics | None = None
        """Metrics beside those of the task."""
        self.frozen: Frozen | None = None
        """What of the model does not train."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for layer in self.frozen.at_rest if self.frozen else ():
            layer.training = False
        return self

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        loss, units = self.loss_of(batch)
        if self.gathered:
            loss = loss.view(1)
        return loss, None if self.task.units_are_samples else _on_device(units, loss)

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor | float]:
        """The sum of the losses of a batch, and the number of units, as the task returns them."""
        model = self._modules[
            "model"
        ]  # self.model, which nn.Module looks for elsewhere first, for 1.6 us
        assert model is not None
        if self.autocast is None:
            found = self.task.loss(model, batch)
        else:
            with torch.autocast(self.device_type, self.autocast):
                found = self.task.loss(model, batch)
        return found if self.is_ours else checked_loss(found, self.task)

    def score(self, batch: Any) -> ScoreSums:
        """The metrics of a batch; see `Task.score`. With further metrics also its `PREDICTIONS`."""
        predictions = None
        with torch.autocast(
            self.device_type, self.autocast or torch.bfloat16, enabled=self.autocast is not None
        ):
            if self.further:
                scores, predictions = self.task.score_and_predict(self.model, batch)
            else:
                scores = self.task.score(self.model, batch)
            scores = checked_scores(scores, self.task)
            if "loss" not in scores:
                scores = {"loss": checked_loss(self._loss_of_scored(batch), self.task), **scores}
        if predictions is None:
            return scores
        return {**scores, PREDICTIONS: checked_predictions(predictions, self.task)}

    def _loss_of_scored(self, batch: Any) -> Any:
        try:
            return self.task.loss(self.model, batch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if self.training or self.is_ours:
                raise
            what = (
                f"loss() of the task {type(self.task).__name__} failed in eval mode:"
                f" {type(error).__name__}: {error}"
            )
            remedy = (
                "if the model gives losses in train mode alone, return 'loss': (sum, units) from"
                " score() as well"
            )
            raise TaskError(
                what, f"{remedy} (docs/tasks.md); else see the traceback in the log"
            ) from error

    def predictions(self, batch: Any) -> Mapping[str, Tensor]:
        """The columns of a batch for mode=predict; see `Task.predictions`."""
        with torch.autocast(
            self.device_type, self.autocast or torch.bfloat16, enabled=self.autocast is not None
        ):
            return self.task.predictions(self.model, batch)


def _on_device(units: Tensor | float, loss: Tensor) -> Tensor:
    """The number of units as float64, of the shape of the loss, beside it; no wait for the
    device."""
    if isinstance(units, Tensor):
        return units.detach().to(loss.device, torch.float64).view(loss.shape)
    return torch.full(loss.shape, float(units), dtype=torch.float64, device=loss.device)
