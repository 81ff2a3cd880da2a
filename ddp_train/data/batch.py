"""The samples of one micro-batch, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.tensor_tree import map_tensors


@dataclass(slots=True)
class Batch:
    """The samples of one micro-batch."""

    data: Any
    """(inputs, targets), tensors [n, ...]. From your own data sets whatever they return: nested
    dicts, lists and tuples."""
    micro_batch: MicroBatch

    @property
    def inputs(self) -> Any:
        """The first of (inputs, targets)."""
        return self.data[0]

    @property
    def targets(self) -> Tensor:
        """The second of (inputs, targets)."""
        return self.data[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with `change(tensor)` for each tensor."""
        return Batch(map_tensors(change, self.data), self.micro_batch)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory. The DataLoader's thread calls this."""
        return self.map(Tensor.pin_memory)
