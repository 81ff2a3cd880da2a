"""The mean loss of training over all processes: sums and numbers of units are added up exactly,
then divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import from_all_ranks, ranks

Seen = float | Tensor
"""A number on the CPU, where looking costs nothing; on a GPU, where looking would wait for it, a
detached tensor, a scalar or [replicas]."""


def is_finite(number: Seen) -> bool:
    """Whether it is neither NaN nor infinite. Waits for the device."""
    if isinstance(number, Tensor):
        return bool(number.isfinite().all())
    return math.isfinite(number)


Forward = tuple[Seen, Seen, MicroBatch]
"""What one forward pass gave: the sum of the losses of all units, and their number. Names for the
three would take
0.7 us of each step."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum and the number of units that it is taken over."""

    sum: float = 0.0
    units: float = 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.units + other.units)

    @property
    def value(self) -> float:
        """NaN if there are no units."""
        return self.sum / self.units if self.units else math.nan


class ExtraPayload(Protocol):
    """Numbers that are exchanged together with the losses, so that they need no collective of their
    own."""

    def collect(self) -> Sequence[Seen]:
        """Those of this process; every rank has equally many."""
        ...

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """What rank 0, 1, ... collected."""
        ...


class RunningLoss:
    """The losses since the last logging interval. Adding one costs no arithmetic and does not wait
    for the device."""

    def __init__(self) -> None:
        self.seen: list[Forward] = []
        self.known_sum = self.known_units = 0.0
        """Of those that are numbers on the CPU and finite, added up as they came."""

    def add(self, loss: Seen, units: Seen, micro_batch: MicroBatch) -> None:
        """The sum of the losses of a forward pass, and its number of units."""
        self.seen.append((loss, units, micro_batch))
        if isinstance(loss, float) and micro_batch.num_real and math.isfinite(loss):
            self.known_sum += loss
            self.known_units += float(units)

    def known_with(self, loss: float, units: Seen, micro_batch: MicroBatch) -> Mean:
        """What is known of the losses since the last logging interval once this one of the CPU is
        added too."""
        if not (micro_batch.num_real and math.isfinite(loss)):
            return Mean(self.known_sum, self.known_units)
        return Mean(self.known_sum + loss, self.known_units + float(units))

    def of_step(self, step: int) -> list[Forward]:
        """What was added in one optimizer step since the last logging interval."""
        return [one for one in self.seen if one[2].step == step]

    def forget(self, step: int) -> None:
        """Drops the losses of a step that was skipped."""
        left = [one for one in self.seen if one[2].step != step]
        self.seen = []
        self.known_sum = 0.0
        self.known_units = 0.0
        for one in left:
            self.add(*one)

    def first_bad_step(self, never: int) -> int:
        """The first optimizer step here with a loss that is not finite; `never` if there is
        none."""
        return min(
            (micro_batch.step for loss, _, micro_batch in self.seen if not is_finite(loss)),
            default=never,
        )

    def mean(self, device: str, extras: Sequence[ExtraPayload] = ()) -> Mean:
        """The mean loss over all units of all processes, by one exchange; starts over, unless an
        extra raises. It has no units if every step was skipped.

        Sums are exact before they are rounded, so they do not depend on who computed which
        micro-batch. The host waits for the device once; from then until the next step is launched
        the device is idle.
        """
        if not (self.seen or extras):  # on all ranks alike: they skip the same steps
            return Mean()
        payloads = [extra.collect() for extra in extras]
        counted = [
            loss if micro_batch.num_real else _zero(loss) for loss, _, micro_batch in self.seen
        ]  # no stand-ins
        numbers = [units for _, units, _ in self.seen]
        row = [*chain(*payloads), *counted, *numbers]
        width = len(counted)
        if ranks() == 1 and {*map(type, row)} <= {
            int,
            float,
        }:  # an isinstance for each takes 20 us more
            rows = [cast(list[float], row)]
        else:
            columns = [_column(values, device) for values in (*payloads, counted, numbers)]
            # replicas have a column each
            rows = from_all_ranks(torch.cat(columns)).tolist()
            width = len(columns[-2])
        first = 0
        for extra, payload in zip(extras, payloads, strict=True):
            extra.deliver([row[first : first + len(payload)] for row in rows])
            first += len(payload)
        self.seen.clear()
        self.known_sum = self.known_units = 0.0
        total = math.fsum(loss for row in rows for loss in row[first : first + width])
        return Mean(total, math.fsum(number for row in rows for number in row[first + width :]))


def _zero(loss: Seen) -> Seen:
    return torch.zeros_like(loss) if isinstance(loss, Tensor) else 0.0


def _column(values: Sequence[Seen], device: str) -> Tensor:
    """float64 [n], of numbers or of tensors. Tensors are converted together: a kernel for each loss
    of an epoch takes a small model a third of the epoch."""
    if not any(isinstance(value, Tensor) for value in values):
        return _sent(values, device)
    parts = [
        value.view(-1) if isinstance(value, Tensor) else _sent([value], device) for value in values
    ]
    return torch.cat(parts).to(device, torch.float64)


def _sent(values: Sequence[Seen], device: str) -> Tensor:
    """Numbers as float64 [n]. `torch.tensor(..., device=...)` would wait for a GPU."""
    made = torch.tensor(values, dtype=torch.float64, device="cpu")
    if device == "cpu":
        return made
    return made.pin_memory().to(device, non_blocking=True)
