"""The samples of one micro-batch, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.stream_place import StreamPlace
from ddp_train.tensor_tree import ChangeObject, map_tensors, with_changed_parts


@dataclass(slots=True)
class Batch:
    """The samples of one micro-batch."""

    data: Any
    """(inputs, targets), tensors [n, ...]. From your own data sets whatever they return."""
    micro_batch: MicroBatch
    stream_place: StreamPlace | None = None
    """The place behind its last sample in a stream that has a state of its own."""

    @property
    def inputs(self) -> Any:
        """The first of (inputs, targets)."""
        return self.data[0]

    @property
    def targets(self) -> Tensor:
        """The second of (inputs, targets)."""
        return self.data[1]

    def map(
        self,
        change: Callable[[Tensor], Tensor],
        change_object: ChangeObject = with_changed_parts,
    ) -> Batch:
        """The same batch with `change(tensor)` for each tensor; see `map_tensors`."""
        data = map_tensors(change, self.data, change_object)
        return Batch(data, self.micro_batch, self.stream_place)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory. The DataLoader's thread calls this."""
        return self.map(Tensor.pin_memory, _pinned)


def _pinned(value: Any, pin: Callable[[Any], Any]) -> Any:
    """An object in page-locked memory, by its own method if it has one."""
    own = getattr(value, "pin_memory", None)
    if callable(own):
        return own()
    return with_changed_parts(value, pin)
