"""What a model is trained for: the loss of a batch, and how an evaluation is scored."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddp_train.distributed.process_group import total
from ddp_train.errors import DataError

log = logging.getLogger(__name__)


Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, ...], targets [n]) -> the sum of the sample losses, a scalar."""


def cross_entropy(classes: int, label_smoothing: float) -> Loss:
    """The loss of a classification. It raises DataError if a model has fewer outputs than there are classes, and on
    CPUs for a label that no output stands for. classes: 0 if the data set does not say.
    """

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[-1] < classes:  # a GPU would only say that an assertion failed
            _refuse(outputs, f"the data have {classes} classes")
        try:
            return nn.functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=label_smoothing)
        except IndexError:
            _refuse(outputs, f"the labels go from {int(targets.min())} to {int(targets.max())}")

    return loss


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a regression; outputs may have dimensions of size 1 that targets [n] lack.

    Raises DataError if a model has more than one output.
    """
    if outputs.numel() != targets.numel():
        _refuse(outputs, f"the targets are of shape {list(targets.shape)}")
    return nn.functional.mse_loss(outputs.view_as(targets), targets, reduction="sum")


def _refuse(outputs: Tensor, wanted: str) -> NoReturn:
    raise DataError(
        f"the model's outputs are of shape {list(outputs.shape)}, {wanted}",
        "correct the model's last layer, or the labels: those that are no integers make it a regression",
    )


def _one_tensor(outputs: Any) -> Tensor:
    """Raises DataError if it is something else."""
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"the model returns a {type(outputs).__name__}", "return one tensor, [n, ...], in training and in eval"
        )
    return outputs


class ModelWithLoss(nn.Module):
    """The model and its loss in one forward pass, as DDP and DataParallel wrap it.

    Autocast is entered in here: entered outside, bfloat16 becomes float16 in the replicas of DataParallel. `forward`
    returns the sum of the sample losses, a scalar (DataParallel gathers them: [replicas]); `score` also the number of
    samples whose class was predicted.
    """

    gathered = False
    """Whether DataParallel will gather the losses: it wants a dimension to do it along."""

    def __init__(self, model: nn.Module, loss: Loss, device: str, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.device_type, self.autocast = torch.device(device).type, autocast

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        if self.autocast is None:
            loss = self.loss(_one_tensor(self.model(inputs)), targets)
        else:
            with torch.autocast(self.device_type, self.autocast):
                loss = self.loss(_one_tensor(self.model(inputs)), targets)
        return loss.view(1) if self.gathered else loss

    def score(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The sum of the sample losses and, for class labels, the number of right predictions (int64)."""
        with torch.autocast(self.device_type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            outputs = _one_tensor(self.model(inputs))
            loss = self.loss(outputs, targets)
        correct = None if targets.is_floating_point() else (outputs.argmax(-1) == targets).sum()
        return loss, correct


@dataclass(frozen=True)
class Score:
    """The result of an evaluation: exact counts, each sample once."""

    loss: float
    accuracy: float | None
    correct: int | None
    samples: int

    def as_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "accuracy": self.accuracy, "correct": self.correct, "samples": self.samples}


class Scorer:
    """Collects an evaluation batch by batch, in a slot for each batch of the whole test set.

    The batches are the same on any number of processes, and so are the slots: their sum is bit for bit the same.
    """

    def __init__(self, batches: int, device: str) -> None:
        self.losses = torch.zeros(batches, dtype=torch.float64, device=device)
        self.counts = torch.zeros(batches, 2, dtype=torch.int64, device=device)
        self.labelled = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, batch: int, loss: Tensor, correct: Tensor | None, samples: int) -> None:
        """loss: the sum of the sample losses, a scalar."""
        self.losses[batch] = loss.double()
        self.counts[batch, 1] = samples
        if correct is not None:
            self.counts[batch, 0] = correct
            self.labelled += 1

    def result(self) -> Score | None:
        """The score over all processes, or None on all of them if a batch is missing."""
        loss = math.fsum(total(self.losses).tolist())
        counts = total(self.counts)
        labelled = int(total(self.labelled).item()) > 0
        if not counts[:, 1].all():
            return None
        if not math.isfinite(loss):
            log.warning("the test loss is %s: outputs of the model are not finite, or too large", loss)
        correct, samples = counts.sum(0).tolist()
        return Score(loss / samples, correct / samples if labelled else None, correct if labelled else None, samples)
