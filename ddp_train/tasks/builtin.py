"""The built-in tasks of inputs and targets, tensors [n, ...]. A model takes the inputs and returns
its outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.errors import ConfigError, DataError
from ddp_train.tasks.task import ScoreSums, Task
from ddp_train.text import counted

IGNORED = -100
"""torch's own: a target of this value is no unit."""
NO_LABEL = -(2**31)
"""torch leaves out labels of -100 without a word, which would count as samples here; no label has
this value."""
PAIR = (tuple, list)
"""As `tuple | list`, which is made anew in each step."""
TOP = 5
REGRESSION_LOSSES = {
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
    "smooth_l1": functional.smooth_l1_loss,
}


class BuiltIn(Task, ABC):
    """Scores and predictions from the same forward pass."""

    def check(self, batch: Any) -> None:
        """Of some samples: raises ConfigError if the targets cannot be right, whatever the
        model."""

    @abstractmethod
    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The outputs of the model, [n, ...], and the targets."""

    @abstractmethod
    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        """See `Task.score`."""

    @abstractmethod
    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Task.predict`; outputs in float32 at least."""

    def score(self, model: nn.Module, batch: Any) -> ScoreSums:
        return self.scores_of(*self.outputs_and_targets(model, batch))

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return self.predictions_of(*self.outputs_and_targets(model, batch))

    def score_and_predict(
        self, model: nn.Module, batch: Any
    ) -> tuple[ScoreSums, tuple[Tensor, Tensor]]:
        both = self.outputs_and_targets(model, batch)
        return self.scores_of(*both), self.predictions_of(*both)


class Supervised(BuiltIn):
    """Inputs and targets, and one tensor as the model's output."""

    unit = "sample"
    units_are_samples = True

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self.pair(batch)
        return one_tensor(model(inputs)), targets

    def pair(self, batch: Any) -> tuple[Any, Tensor]:
        """Inputs and targets. Raises DataError if the batch is something else."""
        if isinstance(batch, PAIR) and len(batch) == 2 and isinstance(batch[1], Tensor):
            inputs, targets = batch
            if targets.dtype == torch.int64 or targets.is_floating_point():
                return inputs, targets
            # Integers of other widths, and truth values, as numpy has them, are labels too.
            return inputs, targets.long()
        if isinstance(batch, tuple | list):
            what = f"{type(batch).__name__} of {len(batch)}"
        else:
            what = type(batch).__name__
        raise DataError(
            f"a batch is a {what}",
            "return (input, target) for each sample, or write a task of your own",
        )

    def check(self, batch: Any) -> None:
        self.check_targets(self.pair(batch)[1])

    def check_targets(self, targets: Tensor) -> None:
        """See `BuiltIn.check`."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        outputs, targets = self.outputs_and_targets(model, batch)
        return (
            self.sum_of_losses(outputs, targets),
            targets.shape[0],
        )  # len() takes a microsecond more

    @abstractmethod
    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A scalar: over all units of the batch."""

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Of a batch of inputs alone, too: data to be predicted may have no targets."""
        if isinstance(batch, Tensor):
            return self.columns(one_tensor(of_torchvision(model(batch))))
        inputs, targets = self.pair(batch)
        return {**self.columns(one_tensor(of_torchvision(model(inputs)))), "target": targets}

    @abstractmethod
    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        """What a model's outputs say of each sample."""


class Classification(Supervised):
    """Class labels, int64 [n], or soft labels, a part for each class, [n, k]. Outputs: logits [n,
    k]."""

    better: ClassVar[Mapping[str, str]] = {"accuracy": "max", "top5": "max"}

    def __init__(
        self,
        classes: int = 0,
        loss: str = "cross_entropy",
        label_smoothing: float = 0.0,
        class_weights: Any = None,
    ) -> None:
        """classes: 0 if the data set does not say. class_weights: a factor on the loss of each
        class; the mean is over samples all the same, not over weights as in torch's
        `reduction="mean"`."""
        self.classes = classes
        self.loss_name = loss
        self.label_smoothing = label_smoothing
        self.class_weights = _Constant("class_weights", class_weights)
        if class_weights and classes and len(class_weights) != classes:
            raise ConfigError(
                [
                    f"task.class_weights: has {len(class_weights)} numbers; the data have {classes}"
                    " classes"
                ]
            )

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[-1] < self.classes:  # a GPU would only say that an assertion failed
            refuse(outputs, f"the data have {self.classes} classes")
        try:
            wide = wide_of(outputs)
            weight = self.class_weights.like(wide)
            more = wide.shape[1] - targets.shape[1] if targets.ndim == 2 else 0
            if more > 0:  # a model may have more outputs than there are classes, as with labels
                targets = functional.pad(targets, (0, more))
            return functional.cross_entropy(
                wide,
                targets,
                reduction="sum",
                ignore_index=NO_LABEL,
                label_smoothing=self.label_smoothing,
                weight=weight,
            )
        except IndexError:
            refuse(outputs, f"the labels go from {int(targets.min())} to {int(targets.max())}")

    def check_targets(self, targets: Tensor) -> None:
        if targets.ndim != 2:
            return
        parts = targets[0].double()
        if parts.min() < 0 or abs(parts.sum() - 1) > 0.01:
            problem = (
                f"the first sample's soft label is {_some(parts)}, whose sum is {parts.sum():.4g}"
            )
            remedy = "parts of classes sum to 1; for several labels of a sample use task=multilabel"
            raise ConfigError([f"task=classification: {problem}; {remedy}"])

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        samples = len(targets)
        scores: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "loss": (self.sum_of_losses(outputs, targets), samples)
        }
        labels = targets.argmax(-1) if targets.ndim == 2 else targets
        scores["accuracy"] = ((outputs.argmax(-1) == labels).sum(), samples)
        if outputs.shape[-1] > TOP:
            scores["top5"] = ((outputs.topk(TOP).indices == labels[:, None]).sum(), samples)
        return scores

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return wide_of(outputs).log_softmax(-1), (
            targets.argmax(-1) if targets.ndim == 2 else targets
        )

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": outputs.argmax(-1), "probability": wide_of(outputs).softmax(-1)}


class Multilabel(Supervised):
    """Any number of labels per sample: float targets [n, k], each 0 or 1 (or between). Outputs:
    logits [n, k]."""

    better: ClassVar[Mapping[str, str]] = {"f1_macro": "max", "exact_match": "max"}

    def __init__(self, loss: str = "bce", pos_weight: Any = None) -> None:
        """pos_weight: a factor on the loss of a label that applies, one number or one per label.
        The loss of a sample is the mean over its labels."""
        self.loss_name = loss
        self.pos_weight = _Constant("pos_weight", pos_weight)

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Targets [n], of one label, as [n, 1]."""
        outputs, targets = super().outputs_and_targets(model, batch)
        if targets.ndim == 1 and outputs.numel() == len(targets):
            return outputs.view(-1, 1), targets[:, None]
        return outputs, targets

    def check_targets(self, targets: Tensor) -> None:
        if targets.min() < 0 or targets.max() > 1:
            problem = f"the first sample's targets are {_some(targets[0])}"
            raise ConfigError(
                [
                    f"task=multilabel: {problem}; give 1 for each label that applies, and 0 for the"
                    " others"
                ]
            )

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:
            refuse(outputs, f"the targets are of shape {list(targets.shape)}")
        wide = wide_of(outputs)
        losses = functional.binary_cross_entropy_with_logits(
            wide, targets.to(wide.dtype), reduction="sum", pos_weight=self.pos_weight.like(wide)
        )
        return losses / targets.shape[1]

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        found = outputs > 0
        true = targets > 0.5
        hits = (found & true).sum(0)
        both = found.sum(0) + true.sum(0)
        return {
            "loss": (self.sum_of_losses(outputs, targets), len(targets)),
            "f1_macro": (2 * hits, both),
            "exact_match": ((found == true).all(1).sum(), len(targets)),
        }

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return wide_of(outputs).sigmoid(), (targets > 0.5).long()

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": outputs > 0, "probability": wide_of(outputs).sigmoid()}


class Regression(Supervised):
    """Numbers: float targets [n] or [n, k]. Outputs of as many numbers; dimensions of size 1 may
    differ."""

    def __init__(self, loss: str = "mse") -> None:
        """loss: mse, mae, huber or smooth_l1; of a sample the mean over its k numbers."""
        self.loss_name = loss

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, targets = super().outputs_and_targets(model, batch)
        if outputs.numel() != targets.numel():
            refuse(outputs, f"the targets are of shape {list(targets.shape)}")
        return outputs.view_as(targets), targets

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        total = REGRESSION_LOSSES[self.loss_name](outputs, targets, reduction="sum")
        return total if targets.ndim == 1 else total / targets[0].numel()

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        error = (outputs - targets).double()
        return {
            "loss": (self.sum_of_losses(outputs, targets), len(targets)),
            "mae": (error.abs().sum(), targets.numel()),
            "mse": (error.square().sum(), targets.numel()),
        }

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return wide_of(outputs), targets

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": wide_of(outputs.squeeze(-1) if outputs.ndim == 2 else outputs)}

    def derive(self, scores: dict[str, float]) -> dict[str, float]:
        return {"rmse": math.sqrt(scores["mse"])}


class Segmentation(Supervised):
    """A class for every pixel: int64 targets [n, h, w]. Outputs: logits [n, k, h, w]. The mean is
    over valid pixels."""

    unit = "pixel"
    units_are_samples = False
    better: ClassVar[Mapping[str, str]] = {"pixel_accuracy": "max", "mean_iou": "max"}

    def __init__(
        self,
        classes: int = 0,
        loss: str = "cross_entropy",
        ignore_index: int = IGNORED,
        class_weights: Any = None,
    ) -> None:
        """classes: 0 if the data set does not say. ignore_index: pixels of this class are no units.
        class_weights: a factor on the loss of each class."""
        self.classes = classes
        self.loss_name = loss
        self.ignore_index = ignore_index
        self.class_weights = _Constant("class_weights", class_weights)

    def check_targets(self, targets: Tensor) -> None:
        valid = targets[targets != self.ignore_index]
        if len(valid) and self.classes and (valid.min() < 0 or valid.max() >= self.classes):
            detail, remedy = self._out_of_range(valid, f"the data have {self.classes} classes")
            raise ConfigError([f"task=segmentation: {detail}; {remedy}"])

    def _out_of_range(self, valid: Tensor, expected: str) -> tuple[str, str]:
        low = int(valid.min())
        high = int(valid.max())
        marked = low if low < 0 else high
        detail = f"the pixels of the first targets go from {low} to {high}, {expected}"
        return detail, f"if {marked} marks what is to be left out, use task.ignore_index={marked}"

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self.pair(batch)
        outputs = one_tensor(of_torchvision(model(inputs)))
        if outputs.ndim != 4 or outputs.shape[2:] != targets.shape[1:]:
            refuse(
                outputs,
                f"the targets are of shape {list(targets.shape)}; [n, classes, h, w] is needed",
            )
        return outputs, targets

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        outputs, targets = self.outputs_and_targets(model, batch)
        return self.sum_of_losses(outputs, targets), (targets != self.ignore_index).sum()

    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wide = wide_of(outputs)
        weight = self.class_weights.like(wide)
        if (
            torch.are_deterministic_algorithms_enabled()
        ):  # on GPUs torch's kernel for images is refused then
            wide = wide.movedim(1, -1).flatten(0, 2)
            targets = targets.flatten()
        try:
            return functional.cross_entropy(
                wide, targets, reduction="sum", ignore_index=self.ignore_index, weight=weight
            )
        except IndexError:  # on GPUs an assertion of the device
            valid = targets[targets != self.ignore_index]
            raise DataError(
                *self._out_of_range(valid, f"the model gives {outputs.shape[1]} classes")
            ) from None

    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        classes = outputs.shape[1]
        valid = targets != self.ignore_index
        found = outputs.argmax(1)[valid]
        true = targets[valid]
        pairs = torch.bincount(true * classes + found, minlength=classes**2).view(classes, classes)
        hits = pairs.diagonal()
        pixels = valid.sum()
        return {
            "loss": (self.sum_of_losses(outputs, targets), pixels),
            "pixel_accuracy": (hits.sum(), pixels),
            "mean_iou": (hits, pairs.sum(0) + pairs.sum(1) - hits),
        }

    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return wide_of(outputs).log_softmax(1), targets

    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        """Of each pixel the class; the logits would take classes times four bytes a pixel."""
        return {"prediction": outputs.argmax(1).int()}

    def units_per_sample(self, batch: Any) -> float:
        return self.pair(batch)[1][0].numel()


class _Constant:
    """Numbers of the config as a tensor beside the model's outputs, made once."""

    def __init__(self, key: str, numbers: Any) -> None:
        self.key = key
        self.numbers = numbers
        self.tensors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        """One for each GPU: the threads of DataParallel share this object."""

    def like(self, outputs: Tensor) -> Tensor | None:
        """outputs: [n, k, ...]. Raises DataError if there are not k numbers."""
        if self.numbers is None:
            return None
        count = outputs.shape[1]
        if isinstance(self.numbers, Sequence) and len(self.numbers) not in (1, count):
            numbers = counted(len(self.numbers), "number")
            raise DataError(
                f"task.{self.key} has {numbers}, the model {count} outputs",
                "give one number for each output",
            )
        place = outputs.device, outputs.dtype
        if place not in self.tensors:
            self.tensors[place] = torch.tensor(
                self.numbers, device=outputs.device, dtype=outputs.dtype
            )
        return self.tensors[place]


def wide_of(outputs: Tensor) -> Tensor:
    """As float32 at least, as autocast computes losses: weights of classes would be rounded too."""
    if outputs.dtype in (torch.bfloat16, torch.float16):
        return outputs.float()
    return outputs


def one_tensor(outputs: Any) -> Tensor:
    """Outputs of a model; an object with `logits`, as transformers' models return, stands for
    these. Raises DataError if it is something else."""
    if isinstance(
        outputs, Tensor
    ):  # first: what a tensor lacks is looked for in vain for a microsecond
        return outputs
    found = getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise DataError(
        f"the model returns a {type(outputs).__name__}",
        "return one tensor, [n, ...], in training and in eval, or write a task of your own",
    )


def of_torchvision(outputs: Any) -> Any:
    """torchvision's segmentation models return {"out": logits, ...}."""
    if isinstance(outputs, Mapping) and "out" in outputs:
        return outputs["out"]
    return outputs


def _some(numbers: Tensor) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers.flatten()[:TOP].tolist())
    return f"[{shown}{', ...' if numbers.numel() > TOP else ''}]"


def refuse(outputs: Tensor, expected: str) -> NoReturn:
    raise DataError(
        f"the model's outputs are of shape {list(outputs.shape)}, {expected}",
        "correct the model's last layer, or the targets, or choose another task=",
    )
