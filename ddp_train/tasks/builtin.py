"""The built-in tasks of inputs and targets, tensors [n, ...], between which a model stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.data.corpus.windows import IGNORED
from ddp_train.errors import ConfigError, DataError
from ddp_train.tasks.supervised import (
    OutputFactors,
    Supervised,
    TargetForm,
    at_least_float32,
    first_numbers,
    form_of,
    logits_of_any_model,
    refuse,
    refuse_targets,
)
from ddp_train.tasks.task import ScoreSums

NO_LABEL = -(2**31)
"""torch leaves out labels of -100 without a word, which would count as samples here; no label has
this value."""
TOP = 5
REGRESSION_LOSSES = {
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
    "smooth_l1": functional.smooth_l1_loss,
}


class Classification(Supervised):
    """Class labels, int64 [n], or soft labels, a part for each class, [n, k].

    Outputs: logits [n, k].
    """

    better: ClassVar[Mapping[str, str]] = {"accuracy": "max", "top5": "max"}
    target_forms = (TargetForm("integers", 1), TargetForm("numbers", 2))
    needed_targets = "integers [n], or numbers [n, classes]"

    def __init__(
        self,
        classes: int = 0,
        loss: str = "cross_entropy",
        label_smoothing: float = 0.0,
        class_weights: Any = None,
    ) -> None:
        """Set up the loss.

        classes: their number; 0 if the data set does not say.
        class_weights: a factor on the loss of each class; the mean is over samples all the same,
            not over weights as in torch's `reduction="mean"`.
        """
        self.classes = classes
        self.loss_name = loss
        self.label_smoothing = label_smoothing
        self.class_weights = OutputFactors("class_weights", class_weights)
        if class_weights and classes and len(class_weights) != classes:
            counts = f"has {len(class_weights)} numbers, but the data set has {classes} classes"
            raise ConfigError([f"task.class_weights: {counts}"])

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # A GPU would only say that an assertion failed.
        if outputs.shape[-1] < self.classes:
            refuse(outputs, f"the data set has {self.classes} classes")
        if outputs.ndim > 2:
            refuse(outputs, "[n, classes] is needed: squeeze or average the other dimensions")
        try:
            wide = at_least_float32(outputs)
            return functional.cross_entropy(
                wide,
                _pad_soft_labels(targets, wide.shape[1]),
                reduction="sum",
                ignore_index=NO_LABEL,
                label_smoothing=self.label_smoothing,
                weight=self.class_weights.like(wide),
            )
        except IndexError:
            refuse(outputs, f"the labels go from {int(targets.min())} to {int(targets.max())}")

    def check_targets(self, targets: Tensor) -> None:
        if targets.ndim != 2:
            return
        parts = targets[0].double()
        total = parts.sum()
        if parts.min() < 0 or abs(total - 1) > 0.01:
            label = first_numbers(parts)
            refuse_targets(
                "classification",
                f"the first sample's soft label is {label}, whose sum is {total:.4g}",
                "soft labels must sum to 1; for several labels of a sample use task=multilabel",
            )

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        samples = len(targets)
        labels = _hard_labels(targets)
        scores: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "loss": (self.sum_of_losses(outputs, targets), samples),
            "accuracy": ((outputs.argmax(-1) == labels).sum(), samples),
        }
        if outputs.shape[-1] > TOP:
            is_top = outputs.topk(TOP).indices == labels[:, None]
            scores["top5"] = (is_top.sum(), samples)
        return scores

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return at_least_float32(outputs).log_softmax(-1), _hard_labels(targets)

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        return {
            "prediction": outputs.argmax(-1),
            "probability": at_least_float32(outputs).softmax(-1),
        }


def _pad_soft_labels(targets: Tensor, outputs: int) -> Tensor:
    """Soft labels for a model that has more outputs than there are classes; others as they are."""
    if targets.ndim != 2 or targets.shape[1] >= outputs:
        return targets
    return functional.pad(targets, (0, outputs - targets.shape[1]))


def _hard_labels(targets: Tensor) -> Tensor:
    """Class labels [n]; for soft labels the class with the largest part."""
    if targets.ndim == 2:
        return targets.argmax(-1)
    return targets


class Multilabel(Supervised):
    """Any number of labels per sample: float targets [n, k], each 0 or 1 (or between).

    Outputs: logits [n, k].
    """

    better: ClassVar[Mapping[str, str]] = {"f1_macro": "max", "exact_match": "max"}
    target_forms = (TargetForm("numbers", 1), TargetForm("numbers", 2), TargetForm("integers", 2))
    needed_targets = "0 or 1 in [n, labels], or numbers 0 or 1 in [n]"

    def __init__(self, loss: str = "bce", pos_weight: Any = None) -> None:
        """Set up the loss, which is for a sample the mean over its labels.

        pos_weight: a factor on the loss of a label that applies, one number or one per label.
        """
        self.loss_name = loss
        self.pos_weight = OutputFactors("pos_weight", pos_weight)

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Outputs and targets [n, k]; targets [n], of one label, become [n, 1]."""
        outputs, targets = super().outputs_and_targets(model, batch)
        if targets.ndim == 1 and outputs.numel() == len(targets):
            return outputs.view(-1, 1), targets[:, None]
        return outputs, targets

    def check_targets(self, targets: Tensor) -> None:
        if targets.min() < 0 or targets.max() > 1:
            refuse_targets(
                "multilabel",
                f"the first sample's targets are {first_numbers(targets[0])}",
                "give 1 for each label that applies, and 0 for the others",
            )

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:
            refuse(outputs, f"the targets are of shape {list(targets.shape)}")
        wide = at_least_float32(outputs)
        losses = functional.binary_cross_entropy_with_logits(
            wide, targets.to(wide.dtype), reduction="sum", pos_weight=self.pos_weight.like(wide)
        )
        return losses / targets.shape[1]

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        predicted = outputs > 0
        true = targets > 0.5
        hits = (predicted & true).sum(0)
        predicted_or_true = predicted.sum(0) + true.sum(0)
        exact = (predicted == true).all(1)
        return {
            "loss": (self.sum_of_losses(outputs, targets), len(targets)),
            "f1_macro": (2 * hits, predicted_or_true),
            "exact_match": (exact.sum(), len(targets)),
        }

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return at_least_float32(outputs).sigmoid(), (targets > 0.5).long()

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": outputs > 0, "probability": at_least_float32(outputs).sigmoid()}


def _have_same_rows(outputs: Tensor, targets: Tensor) -> bool:
    """True if both are as many numbers for each sample: [n, k] and [k, n] are not."""
    if outputs.shape == targets.shape:
        return True
    if outputs.numel() != targets.numel():
        return False
    if outputs.shape[:1] == targets.shape[:1]:
        return True
    return [size for size in outputs.shape if size > 1] == [
        size for size in targets.shape if size > 1
    ]


class Regression(Supervised):
    """Numbers: float targets [n] or [n, k].

    Outputs: as many numbers; dimensions of size 1 may differ.
    """

    target_forms = (TargetForm("numbers", 1), TargetForm("numbers", 2))
    needed_targets = "numbers [n] or [n, k]"

    def __init__(self, loss: str = "mse") -> None:
        """Set up the loss: mse, mae, huber or smooth_l1, for a sample the mean over its numbers."""
        self.loss_name = loss

    @classmethod
    def advice(cls, targets: Tensor) -> str:
        kind, ndim = form_of(targets)
        if kind == "integers" and ndim < 3:
            return "return them as float32"
        return ""

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, targets = super().outputs_and_targets(model, batch)
        if not _have_same_rows(outputs, targets):
            refuse(outputs, f"the targets are of shape {list(targets.shape)}")
        return outputs.reshape(targets.shape), targets

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        total = REGRESSION_LOSSES[self.loss_name](outputs, targets, reduction="sum")
        if targets.ndim == 1:
            return total
        return total / targets[0].numel()

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        error = (outputs - targets).double()
        return {
            "loss": (self.sum_of_losses(outputs, targets), len(targets)),
            "mae": (error.abs().sum(), targets.numel()),
            "mse": (error.square().sum(), targets.numel()),
        }

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return at_least_float32(outputs), targets

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        if outputs.ndim == 2:
            outputs = outputs.squeeze(-1)
        return {"prediction": at_least_float32(outputs)}

    def derive(self, scores: dict[str, float]) -> dict[str, float]:
        return {"rmse": math.sqrt(scores["mse"])}


class Segmentation(Supervised):
    """A class for every pixel: int64 targets [n, h, w].

    Outputs: logits [n, k, h, w]. The mean is over valid pixels.
    """

    unit = "pixel"
    units_are_samples = False
    better: ClassVar[Mapping[str, str]] = {"pixel_accuracy": "max", "mean_iou": "max"}
    target_forms = (TargetForm("integers", 3),)
    needed_targets = "integers [n, h, w]"

    def __init__(
        self,
        classes: int = 0,
        loss: str = "cross_entropy",
        ignore_index: int = IGNORED,
        class_weights: Any = None,
    ) -> None:
        """Set up the loss.

        classes: their number; 0 if the data set does not say.
        ignore_index: pixels of this class are not units.
        class_weights: a factor on the loss of each class.
        """
        self.classes = classes
        self.loss_name = loss
        self.ignore_index = ignore_index
        self.class_weights = OutputFactors("class_weights", class_weights)

    def check_targets(self, targets: Tensor) -> None:
        valid = targets[targets != self.ignore_index]
        if not len(valid) or not self.classes:
            return
        if valid.min() < 0 or valid.max() >= self.classes:
            problem, remedy = _out_of_range(valid, f"the data set has {self.classes} classes")
            refuse_targets("segmentation", problem, remedy)

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self.pair(batch)
        outputs = logits_of_any_model(model(inputs))
        if outputs.ndim != 4 or outputs.shape[2:] != targets.shape[1:]:
            shape = f"the targets are of shape {list(targets.shape)}"
            refuse(outputs, f"{shape}; [n, classes, h, w] is needed")
        return outputs, targets

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        outputs, targets = self.outputs_and_targets(model, batch)
        return self.sum_of_losses(outputs, targets), (targets != self.ignore_index).sum()

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wide = at_least_float32(outputs)
        weight = self.class_weights.like(wide)
        # On GPUs torch's kernel for images is refused then.
        if torch.are_deterministic_algorithms_enabled():
            wide = wide.movedim(1, -1).flatten(0, 2)
            targets = targets.flatten()
        try:
            return functional.cross_entropy(
                wide, targets, reduction="sum", ignore_index=self.ignore_index, weight=weight
            )
        except IndexError:  # on GPUs an assertion of the device
            valid = targets[targets != self.ignore_index]
            expected = f"the model gives {outputs.shape[1]} classes"
            raise DataError(*_out_of_range(valid, expected)) from None

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        classes = outputs.shape[1]
        valid = targets != self.ignore_index
        predicted = outputs.argmax(1)[valid]
        true = targets[valid]
        confusion = torch.bincount(true * classes + predicted, minlength=classes**2)
        confusion = confusion.view(classes, classes)
        hits = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - hits
        pixels = valid.sum()
        return {
            "loss": (self.sum_of_losses(outputs, targets), pixels),
            "pixel_accuracy": (hits.sum(), pixels),
            "mean_iou": (hits, union),
        }

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return at_least_float32(outputs).log_softmax(1), targets

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        """The class of each pixel; its logits would take classes times four bytes."""
        return {"prediction": outputs.argmax(1).int()}

    def units_per_sample(self, batch: Any) -> float:
        _, targets = self.pair(batch)
        return targets[0].numel()


def _out_of_range(valid: Tensor, expected: str) -> tuple[str, str]:
    """Problem and remedy where a pixel is not a class."""
    low = int(valid.min())
    high = int(valid.max())
    stray = low if low < 0 else high
    return (
        f"the pixels of the first targets go from {low} to {high}, {expected}",
        f"to leave out the pixels with target {stray}, use task.ignore_index={stray}",
    )
