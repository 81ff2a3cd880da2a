"""The mean loss of training over all processes: an exact sum, divided by the number of units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.device_copy import to_device
from ddp_train.distributed.process_group import from_all_ranks, ranks

Number = float | Tensor
"""On the CPU a number. On a GPU, where the host would wait for that, a detached tensor: a scalar or
[replicas]."""
ForwardPass = tuple[Number, Number, MicroBatch]
"""The sum of the losses of all units, their number, and what was computed. A named tuple would take
0.7 us of each step."""


def is_finite(number: Number) -> bool:
    """True if a number is neither NaN nor infinite. Waits for the device."""
    if isinstance(number, Tensor):
        return bool(number.isfinite().all())
    return math.isfinite(number)


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum and the number of units that it is taken over."""

    sum: float = 0.0
    units: float = 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.units + other.units)

    @property
    def value(self) -> float:
        """The mean; NaN without units."""
        if not self.units:
            return math.nan
        return self.sum / self.units


class ExtraPayload(Protocol):
    """Numbers that travel with the losses, so that they need no collective of their own."""

    def collect(self) -> Sequence[Number]:
        """The numbers of this process; every rank has equally many."""
        ...

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Take what rank 0, 1, ... collected."""
        ...


class RunningLoss:
    """The losses since the last logging interval.

    Adding one costs no arithmetic and does not wait for the device.
    """

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []
        self.known_sum = 0.0
        """The sum of the losses that are numbers on the CPU and finite, as they came."""
        self.known_units = 0.0

    def add(self, loss: Number, units: Number, micro_batch: MicroBatch) -> None:
        """Add a forward pass: the sum of its losses, and its number of units."""
        self.passes.append((loss, units, micro_batch))
        if isinstance(loss, float) and micro_batch.num_real and math.isfinite(loss):
            self.known_sum += loss
            self.known_units += float(units)

    def known_with(self, loss: float, units: Number, micro_batch: MicroBatch) -> Mean:
        """The mean of the known losses if this one of the CPU were added."""
        if not (micro_batch.num_real and math.isfinite(loss)):
            return Mean(self.known_sum, self.known_units)
        return Mean(self.known_sum + loss, self.known_units + float(units))

    def of_step(self, step: int) -> list[ForwardPass]:
        """The forward passes of one optimizer step."""
        return [forward for forward in self.passes if forward[2].step == step]

    def forget(self, step: int) -> None:
        """Drop the losses of a step that was skipped."""
        remaining = [forward for forward in self.passes if forward[2].step != step]
        self._clear()
        for forward in remaining:
            self.add(*forward)

    def first_bad_step(self, never: int) -> int:
        """The first optimizer step with a loss that is not finite; `never` if there is none."""
        for loss, _, micro_batch in self.passes:
            if not is_finite(loss):
                return micro_batch.step
        return never

    def mean(self, device: str, extras: Sequence[ExtraPayload] = ()) -> Mean:
        """The mean loss over all units of all processes, by one exchange.

        It has no units if every step was skipped.

        Starts over, unless an extra raises. Sums are exact before they are rounded, so they do not
        depend on who computed which micro-batch. The host waits for the device once; from then
        until the next step is launched the device is idle.

        extras: travel with the losses.
        """
        if not (self.passes or extras):  # on all ranks alike: they skip the same steps
            return Mean()
        losses = []
        for loss, _, micro_batch in self.passes:
            is_stand_in = not micro_batch.num_real
            losses.append(_zero_like(loss) if is_stand_in else loss)
        units = [units for _, units, _ in self.passes]
        payloads = [extra.collect() for extra in extras]
        *for_extras, losses_of_ranks, units_of_ranks = _exchange([*payloads, losses, units], device)
        for extra, of_ranks in zip(extras, for_extras, strict=True):
            extra.deliver(of_ranks)
        self._clear()
        return Mean(_exact_sum(losses_of_ranks), _exact_sum(units_of_ranks))

    def _clear(self) -> None:
        self.passes.clear()
        self.known_sum = 0.0
        self.known_units = 0.0


def _exchange(columns: list[Sequence[Number]], device: str) -> list[list[list[float]]]:
    """The numbers of every rank in each column, by one all-gather."""
    # An isinstance for each number would take 20 us more.
    kinds = set(map(type, chain.from_iterable(columns)))
    if ranks() == 1 and kinds <= {int, float}:
        return [[cast("list[float]", column)] for column in columns]
    tensors = [as_tensor(column, device) for column in columns]
    rows = from_all_ranks(torch.cat(tensors)).cpu()
    widths = [len(tensor) for tensor in tensors]  # replicas have a number each
    return [part.tolist() for part in rows.split(widths, dim=1)]


def _exact_sum(rows: Iterable[Iterable[float]]) -> float:
    return math.fsum(chain.from_iterable(rows))


def _zero_like(loss: Number) -> Number:
    if isinstance(loss, Tensor):
        return torch.zeros_like(loss)
    return 0.0


def as_tensor(numbers: Sequence[Number], device: str) -> Tensor:
    """Numbers and tensors as one tensor on the device, float64 [n].

    Tensors are converted together: a kernel for each loss of an epoch takes a small model a third
    of the epoch.
    """
    if not any(isinstance(number, Tensor) for number in numbers):
        return _on_device(numbers, device)
    parts = []
    for are_tensors, group in itertools.groupby(numbers, lambda one: isinstance(one, Tensor)):
        if are_tensors:
            parts += [cast(Tensor, tensor).view(-1) for tensor in group]
        else:
            parts.append(_on_device([*group], device))
    return torch.cat(parts).to(device, torch.float64)


def _on_device(numbers: Sequence[Number], device: str) -> Tensor:
    """Numbers as float64 [n]. `torch.tensor(..., device=...)` would wait for a GPU."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return to_device(tensor, torch.device(device))
