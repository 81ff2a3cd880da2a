"""The task of a model: the loss of a batch, its units, and the scores of a data set."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ddp_train.errors import TaskError
from ddp_train.models.freezing import Frozen
from ddp_train.tasks.further_metrics import FurtherMetrics
from ddp_train.tasks.predictions import Predictions
from ddp_train.tasks.return_checks import checked_loss, checked_predictions, checked_scores
from ddp_train.text import see_page

ScoreSums = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""For each metric its sum and its weight over a batch: scalars, or tensors with one number per
class, [k]."""


class BatchScore(NamedTuple):
    """The scores of one batch in an evaluation."""

    sums: ScoreSums
    predictions: Predictions | None = None
    """For the further metrics; None if there are none."""


class Task:
    """The task of a model: the loss and the scores of a batch.

    A class of your own needs only the methods that it changes, and need not derive from Task:
    Task's own methods and attributes stand in for those that it lacks.

    Each process calls the methods with the model and with a part of the global batch, a
    micro-batch. The sum of the losses and the number of units (samples, tokens, pixels) are added
    up over all micro-batches of all processes. A run minimises their quotient, which does not
    depend on the numbers of processes and micro-batches.
    """

    unit: str = "unit"
    """The name of the unit that losses are averaged over, for messages: sample, token, pixel."""
    units_are_samples: bool = False
    """True if the number of units is always the number of samples. A run knows that number, so the
    processes need not communicate it."""
    loss_name: str = ""
    """The name of the loss in the plan that a run prints before its first step."""
    better: ClassVar[Mapping[str, str]] = {}
    """{metric: `max` or `min`}, the direction in which a metric is better. A metric that is missing
    here has the direction of the built-in metric of the same name (accuracy, mean_iou). Without a
    direction a metric can neither select the best checkpoint nor be the objective of a sweep."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        """Return the sum of the losses of a batch, and the number of its units.

        model: the model, to be called with the inputs.
        batch: one item of the data: (inputs, targets), or what the data set's `collate_fn`
            returned; its tensors are on the device.

        Returns (sum, units). The sum is a scalar tensor with gradients. `units` is a number or a
        scalar tensor: how many units were added up, or the sum of their weights.
        """
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Any) -> ScoreSums:
        """Return {metric: (sum, weight)} for one batch of an evaluation.

        The metric of a data set is the total of its sums divided by the total of its weights, with
        every sample counted once. Sum and weight are scalars, or tensors [classes]. With tensors
        each class has a quotient of its own, and the metric is the mean of those whose total weight
        is not zero: (intersections, unions) of all classes give the mean intersection over union.
        If there is no entry `loss`, the result of `loss()` is added.

        model: the model, in eval mode.
        batch: as in `loss`.
        """
        return {}

    def predict(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return (outputs, targets) of one batch, for the metrics of `metrics=[...]`.

        Outputs, and likewise targets, are a tensor with one row per sample, a list with one entry
        per sample, or a dict or tuple of these. For example, the boxes of images are a list with
        one dict per image.

        model: the model, in eval mode.
        batch: as in `loss`.
        """
        raise NotImplementedError

    def score_and_predict(self, model: nn.Module, batch: Any) -> tuple[ScoreSums, tuple[Any, Any]]:
        """Return (score(model, batch), predict(model, batch)), for a run with `metrics=[...]`.

        Override it to compute both with one forward pass.

        model: the model, in eval mode.
        batch: as in `loss`.
        """
        return self.score(model, batch), self.predict(model, batch)

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return the columns that mode=predict writes for one batch, {name: tensor [n, ...]}.

        By default there are two columns, `output` and `target`, which are what `predict` returns.
        `Trained.predict` works only for a class that overrides this method: it passes the inputs
        alone as `batch`, without targets.

        model: the model, in eval mode.
        batch: as in `loss`.
        """
        outputs, targets = self.predict(model, batch)
        return {"output": outputs, "target": targets}

    def derive(self, scores: dict[str, float]) -> dict[str, float]:
        """Compute additional metrics from those of a whole evaluation: a root, an exponential.

        scores: {metric: value}: the sum over all processes divided by the weight over all.

        Returns {metric: value} of the additional metrics only.
        """
        return {}

    def units_per_sample(self, batch: Any) -> float:
        """Return the approximate number of units of a batch that has one sample.

        It is called once, before training, to scale gradients so that their exchange in fp16
        neither overflows nor underflows. The result of a run does not depend on it.

        batch: as in `loss`, with one sample.
        """
        return 1.0


def can_predict(task: Task) -> bool:
    """True if a task has a method `predict`, or another that does its work."""
    return _overrides(task, "predict") or _overrides(task, "score_and_predict")


def has_own_columns(task: Task) -> bool:
    """True if the predictions of a task need no targets: those of `Task` do."""
    return _overrides(task, "predictions")


def has_columns(task: Task) -> bool:
    """True if a task has something for mode=predict."""
    return can_predict(task) or has_own_columns(task)


def _overrides(task: Task, method: str) -> bool:
    function = getattr(task, method)
    return getattr(function, "__func__", function) is not getattr(Task, method)


class ModelWithTask(nn.Module):
    """The model and its loss in one forward pass, as DDP and DataParallel wrap it.

    Autocast is entered in here: entered outside, bfloat16 becomes float16 in the replicas of
    DataParallel. `forward` returns the sum of the losses, a scalar, and the number of units,
    float64, or None where units are samples. DataParallel gathers them: [replicas].
    """

    has_replicas = False
    """True under DataParallel, which gathers what `forward` returns along a dimension."""

    def __init__(
        self, model: nn.Module, task: Task, device: str, autocast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.model = model
        self.task = task
        modules = (type(task).__module__, task.loss.__module__)
        self.is_trusted = all(module.startswith("ddp_train.") for module in modules)
        """True if what the loss returns needs no check, which takes microseconds in each step."""
        self.device_type = torch.device(device).type
        self.autocast = autocast
        self.further_metrics: FurtherMetrics | None = None
        """Metrics beside those of the task."""
        self.frozen: Frozen | None = None
        """The part of the model that does not train."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            for layer in self.frozen.at_rest:
                layer.training = False
        return self

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        loss, units = self.loss_of(batch)
        if self.has_replicas:
            loss = loss.view(1)
        if self.task.units_are_samples:
            return loss, None
        return loss, _units_beside(loss, units)

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor | float]:
        """The sum of the losses of a batch, and the number of units, as the task returns them."""
        # nn.Module looks for self.model elsewhere first, which takes 1.6 us.
        model = self._modules["model"]
        assert model is not None
        if self.autocast is None:
            result = self.task.loss(model, batch)
        else:
            with torch.autocast(self.device_type, self.autocast):
                result = self.task.loss(model, batch)
        if self.is_trusted:
            return result
        return checked_loss(result, self.task)

    def score(self, batch: Any) -> BatchScore:
        """The metrics of a batch, see `Task.score`, and what the further metrics need of it."""
        predictions = None
        with self._autocast():
            if self.further_metrics:
                scores, outputs = self.task.score_and_predict(self.model, batch)
                predictions = checked_predictions(outputs, self.task)
            else:
                scores = self.task.score(self.model, batch)
            sums = checked_scores(scores, self.task)
            if "loss" not in sums:
                sums = {"loss": self._loss_in_evaluation(batch), **sums}
        return BatchScore(sums, predictions)

    def predictions(self, batch: Any) -> Mapping[str, Tensor]:
        """The columns of a batch for mode=predict; see `Task.predictions`."""
        with self._autocast():
            return self.task.predictions(self.model, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.autocast)

    def _loss_in_evaluation(self, batch: Any) -> tuple[Tensor, Tensor | float]:
        """The loss for a task whose scores lack it. Raises TaskError if eval mode gives none."""
        try:
            result = self.task.loss(self.model, batch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if self.training or self.is_trusted:
                raise
            cause = f"{type(error).__name__}: {error}"
            raise TaskError(
                f"loss() of the task {type(self.task).__name__} failed in eval mode: {cause}",
                "if the model computes losses only in train mode, return 'loss': (sum, units)"
                f" from score() as well{see_page('Tasks')}; otherwise see the traceback in the"
                " log",
            ) from error
        return checked_loss(result, self.task)


def _units_beside(loss: Tensor, units: Tensor | float) -> Tensor:
    """The number of units as float64, on the device and in the shape of the loss; never waits."""
    if isinstance(units, Tensor):
        return units.detach().to(loss.device, torch.float64).view(loss.shape)
    return torch.full(loss.shape, float(units), dtype=torch.float64, device=loss.device)
