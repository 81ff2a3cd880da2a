"""What a model is trained for: the loss of a batch, the mean of losses over all processes, and the score of a data set.

Classification and regression so far. Sums are kept per micro-batch and added up exactly, so that no number depends on
how many processes there are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import from_all_ranks, total
from ddp_train.errors import ConfigError, DataError

log = logging.getLogger(__name__)


# --- losses -----------------------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, ...], targets [n]) -> the sum of the sample losses, a scalar."""


def is_regression(loss: str, targets: Tensor) -> bool:
    """Whether targets are numbers, which are regressed, or class labels. loss: `train.loss`.

    Raises ConfigError if the loss does not fit the targets.
    """
    regression = targets.is_floating_point()
    if loss != "auto" and regression != (loss == "mse"):
        kind = "numbers" if regression else "class labels"
        raise ConfigError([f"train.loss={loss}: the targets of this data set are {kind}; use train.loss=auto"])
    return regression


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


def _refuse(outputs: Tensor, expected: str) -> NoReturn:
    raise DataError(
        f"the model's outputs are of shape {list(outputs.shape)}, {expected}",
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
        self.model = model
        self.loss = loss
        self.device_type = torch.device(device).type
        self.autocast = autocast

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


# --- the mean loss of training ----------------------------------------------------------------------------------------

SeenLoss = float | Tensor
"""The sum of the sample losses of a forward pass: a number on CPU, where looking costs nothing; on a GPU, where looking
would wait for it, a detached tensor, a scalar or [replicas]."""


def is_finite(loss: SeenLoss) -> bool:
    """Whether it is neither NaN nor infinite. Waits for the device."""
    return bool(loss.isfinite().all()) if isinstance(loss, Tensor) else math.isfinite(loss)


class ExtraPayload(Protocol):
    """Numbers that are exchanged together with the losses, so that they need no collective of their own."""

    def collect(self) -> list[float]:
        """Those of this process; every rank has equally many."""
        ...

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """What rank 0, 1, ... collected."""
        ...


class RunningLoss:
    """The losses since the last logging interval. Adding one costs no arithmetic and does not wait for the device."""

    def __init__(self) -> None:
        self.seen: list[tuple[SeenLoss, MicroBatch]] = []

    def add(self, loss: SeenLoss, micro_batch: MicroBatch) -> None:
        """The loss of a forward pass over these samples."""
        self.seen.append((loss, micro_batch))

    def of_step(self, step: int) -> list[tuple[SeenLoss, MicroBatch]]:
        """What was added in one optimizer step since the last logging interval."""
        return [(loss, micro_batch) for loss, micro_batch in self.seen if micro_batch.step == step]

    def forget(self, step: int) -> None:
        """Drops the losses of a step that was skipped."""
        self.seen = [(loss, micro_batch) for loss, micro_batch in self.seen if micro_batch.step != step]

    def first_bad_step(self, never: int) -> int:
        """The first optimizer step here with a loss that is not finite; `never` if there is none."""
        return min((micro_batch.step for loss, micro_batch in self.seen if not is_finite(loss)), default=never)

    def mean(self, device: str, extra: ExtraPayload | None = None) -> float:
        """The mean loss per sample over all processes, by one exchange; starts over.

        The sum is exact before it is rounded, so it does not depend on who computed which micro-batch.
        """
        collected = extra.collect() if extra else []
        here = [sum(micro_batch.num_real for _, micro_batch in self.seen), *collected]
        here += [loss if batch.num_real else 0.0 for loss, batch in self.seen if not isinstance(loss, Tensor)]
        on_device = [
            (loss if batch.num_real else torch.zeros_like(loss)).view(-1)  # a stand-in does not count
            for loss, batch in self.seen
            if isinstance(loss, Tensor)
        ]
        numbers = torch.tensor(here, device=device, dtype=torch.float64)
        if on_device:
            numbers = torch.cat([numbers, torch.cat(on_device).double()])  # a short batch fills fewer replicas
        rows = from_all_ranks(numbers).tolist()
        first_loss = 1 + len(collected)
        self.seen.clear()
        if extra:
            extra.deliver([row[1:first_loss] for row in rows])
        samples = sum(row[0] for row in rows)  # none if every step of the interval was skipped
        return math.fsum(loss for row in rows for loss in row[first_loss:]) / samples if samples else math.nan


# --- the score of a data set ------------------------------------------------------------------------------------------


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
