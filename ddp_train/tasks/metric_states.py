"""States of torchmetrics, batch by batch: taken out of the metrics, exchanged, and put back merged.

A metric never holds more than one batch. The states of each batch travel between the processes at
the end of an evaluation, and are merged in the order of the batches, each by its own reduction
(`dist_reduce_fx`). The batches are the same on any number of processes, and so are the bits of the
result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.exchange import tensors_from_all_ranks

StateOfBatches = dict[int, list[Tensor]]
"""Number of a batch -> the value of one state after that batch alone."""
StatesOfBatches = list[StateOfBatches]
"""One for each state of all metrics."""


@dataclass(frozen=True)
class MetricState:
    """One state of a metric, or of a metric inside of it."""

    owner: Any
    """The torchmetrics.Metric that has it as an attribute."""
    name: str
    reduction: Callable[[Any], Any] | None
    is_list: bool

    def tensors(self) -> list[Tensor]:
        """The present value: the tensors of a list, or one."""
        value = getattr(self.owner, self.name)
        # Copies: a compiled model with CUDA graphs of its own writes its next outputs where the
        # last ones are.
        if isinstance(value, list | tuple):
            return [part.detach().clone() for part in value]
        return [value.detach()]

    def add_to(self, batches: StateOfBatches, batch: int) -> None:
        """Adds the present value as that of a batch.

        Where the order of a reduction does not matter, batches are merged at once, under the number
        of the first: the confusion matrix of 1,000 classes has 8 MB.
        """
        tensors = self.tensors()
        first = next(iter(batches), batch)
        if first != batch and self._merges_in_any_order(tensors):
            batches[first] = [self._reduced([*batches[first], *tensors])]
        else:
            batches[batch] = tensors

    def merge(self, batches: StateOfBatches) -> None:
        """Sets the state to that of all batches."""
        in_order = [batches[batch] for batch in sorted(batches)]
        if self.is_list:
            parts = [part for tensors in in_order for part in tensors]
            if self.owner.compute_on_cpu:
                parts = [part.to("cpu") for part in parts]
            setattr(self.owner, self.name, parts)
            return
        parts = [part for (part,) in in_order]
        value = parts[0] if len(parts) == 1 else self._reduced(parts)
        setattr(self.owner, self.name, value)

    def _reduced(self, parts: list[Tensor]) -> Tensor:
        if self._reduction_name == "dim_zero_cat":
            return torch.cat(parts)
        if self.reduction is None:
            return torch.stack(parts)
        return self.reduction(torch.stack(parts))

    def _merges_in_any_order(self, tensors: list[Tensor]) -> bool:
        """True if the order of the reduction does not matter, not even for the last bit."""
        if self.is_list:
            return False
        if self._reduction_name in ("dim_zero_max", "dim_zero_min"):
            return True
        value = tensors[0]
        is_integer = not (value.is_floating_point() or value.is_complex())
        return self._reduction_name == "dim_zero_sum" and is_integer

    @property
    def _reduction_name(self) -> str:
        return getattr(self.reduction, "__name__", "")


def states_from_all_ranks(states: StatesOfBatches, device: str) -> StatesOfBatches:
    """The states of the batches of all processes. A collective."""
    tensors = [part for batches in states for parts in batches.values() for part in parts]
    layout = [[[batch, len(parts)] for batch, parts in batches.items()] for batches in states]
    merged: StatesOfBatches = [{} for _ in states]
    for rank_layout, rank_tensors in tensors_from_all_ranks(layout, tensors, device):
        remaining = iter(rank_tensors)
        for batches, counts in zip(merged, rank_layout, strict=True):
            for batch, count in counts:
                batches[batch] = [next(remaining) for _ in range(count)]
    return merged
