"""The placement of batches on a device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ddp_train.data.batch import Batch
from ddp_train.errors import DataError
from ddp_train.tensor_tree import (
    SEQUENCES,
    holds_tensors,
    map_tensors,
    named_tensors,
    tensors,
    with_changed_parts,
)

BATCHES_AHEAD = 2
"""Batches that may be copied ahead of the computation. Without a limit a host that never waits, as
with captured steps, would fill the GPU's memory with batches."""

CONTAINERS = (Mapping, *SEQUENCES)
MOST_NAMES = 3
log = logging.getLogger(__name__)

BatchPlacement = Callable[[Batch], Batch]
"""A batch on the host -> the same batch on the device."""


@runtime_checkable
class FinishingSource(Protocol):
    """A BatchSource whose inputs are finished on the device.

    They are smaller on the way, and finishing is cheaper there.
    """

    def finish(
        self, inputs: Tensor, indices: np.ndarray, epoch: int | None, dtype: torch.dtype
    ) -> Tensor:
        """The inputs of a model.

        inputs: those of `get_batch`, on the device.
        indices: sample numbers, int64 [n].
        epoch: the epoch whose augmentation is applied; None: no augmentation.
        dtype: the number type of the result.
        """
        ...


class Placement:
    """Places batches on a device, in the run's number type and memory format."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        non_blocking: bool = False,
    ) -> None:
        """Keeps where tensors go, and how.

        device: where they go.
        dtype: the number type of floating-point tensors; None leaves them as they are.
        channels_last: images, tensors of four dimensions, get this memory format.
        non_blocking: the host does not wait for copies from page-locked memory.
        """
        self.device = device
        self.dtype = dtype
        self.channels_last = channels_last
        self.non_blocking = non_blocking
        self.known: set[type] = set()
        """Types of objects whose own way to the device was looked at."""

    def __call__(self, batch: Batch) -> Batch:
        return batch.map(self.place_tensor, self.place_object)

    def place_tensor(self, tensor: Tensor) -> Tensor:
        """One tensor on the device."""
        return self._converted(tensor.to(self.device, non_blocking=self.non_blocking))

    def _converted(self, placed: Tensor) -> Tensor:
        """A tensor on the device in the run's number type and memory format."""
        if self.dtype and placed.is_floating_point():
            placed = placed.to(self.dtype)
        if self.channels_last and placed.ndim == 4:
            placed = placed.contiguous(memory_format=torch.channels_last)
        return placed

    def place_object(self, value: Any, place: Callable[[Any], Any]) -> Any:
        """An object on the device: by its own `to(device)`, or part by part.

        Raises DataError for one that holds tensors and is neither a container nor a dataclass.
        """
        if moves_itself(value):
            return self._moved_by_itself(value)
        if holds_tensors(value) and not _has_known_parts(value):
            name = type(value).__name__
            path, _ = next(named_tensors(value))
            raise DataError(
                f"a batch has a {name}, whose tensors (`{name}{path}`) cannot be moved to the"
                " device: it has no method to(device)",
                f"give {name} a method to(device) that returns it there, or let collate_fn return"
                " tensors in dicts, lists, tuples and dataclasses",
            )
        return with_changed_parts(value, place)

    def _moved_by_itself(self, value: Any) -> Any:
        options = {}
        if self.non_blocking and "non_blocking" in _parameters_of_to(type(value)):
            options["non_blocking"] = True
        clone = copy.copy(value)  # some change themselves
        moved = clone.to(self.device, **options)
        if moved is None:
            moved = clone
        if type(value) not in self.known:
            self.known.add(type(value))
            self._name_what_stays(value, moved)
        if self.dtype or self.channels_last:
            return map_tensors(self._converted, moved)
        return moved

    def _name_what_stays(self, value: Any, moved: Any) -> None:
        """Log the tensors that an object's own `to` leaves on the host, on the CPU too.

        There a copy without content shows them.
        """
        if isinstance(value, PackedSequence):
            return  # torch wants its batch_sizes on the host
        device = self.device
        if device.type == "cpu":
            device = torch.device("meta")
            # It is a trial of code that may know real devices alone.
            with contextlib.suppress(Exception):
                clone = map_tensors(Tensor.detach, value)
                moved = clone.to(device) or clone
        left = [
            path
            for path, tensor in named_tensors(moved)
            if tensor.device.type != device.type and "._" not in path
        ]
        if left and len(left) < len(list(tensors(moved))):
            name = type(value).__name__
            log.warning(
                "a batch has a %s, whose to(device) moves some of its tensors but leaves %s on"
                " the CPU, which a model on a GPU cannot use; move all its tensors in to(device)",
                name,
                ", ".join(f"`{name}{path}`" for path in left[:MOST_NAMES]),
            )


def moves_itself(value: Any) -> bool:
    """True for an object with a method that takes it to a device."""
    if not callable(getattr(value, "to", None)):
        return False
    # Times and quantities have one too, which takes something else.
    return bool({"device", "args"} & _parameters_of_to(type(value))) or holds_tensors(value)


@functools.cache
def _parameters_of_to(kind: type) -> frozenset[str]:
    """The names of the parameters of a class's method `to`; none if Python cannot tell them."""
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return frozenset()
    return frozenset(parameters)


def _has_known_parts(value: Any) -> bool:
    """True for containers, dataclasses and classes of attrs: a copy with other parts is whole."""
    is_record = dataclasses.is_dataclass(value) or hasattr(value, "__attrs_attrs__")
    return is_record or isinstance(value, CONTAINERS)


class CopyStream:
    """Places batches on a GPU in a stream of its own, while training computes on earlier ones.

    A copy in training's stream would begin only when all earlier computation has ended (CUDA C++
    Best Practices Guide, "Asynchronous and Overlapping Transfers with Computation").
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.stream: torch.cuda.Stream | None = None
        """Made with the first batch, since a constructor must not touch the GPU."""
        self.queued: deque[Any] = deque()
        """For each of the last batches, the event that training's stream has computed on the batch
        before it."""

    def __call__(self, batch: Batch) -> Batch:
        """Places one batch. Later work in the current stream waits for the copies."""
        device = self.placement.device
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        training = torch.cuda.current_stream(device)
        self.queued.append(training.record_event())
        if len(self.queued) > BATCHES_AHEAD:
            oldest = self.queued.popleft()
            oldest.synchronize()
        with torch.cuda.stream(self.stream):
            placed = self.placement(batch)
        training.wait_stream(self.stream)
        for tensor in tensors(placed.data):
            if tensor.device.type == device.type:  # an object may leave some on the host
                # Its memory must not be reused before training has read it.
                tensor.record_stream(training)
        return placed


class FinishedPlacement:
    """Places batches, and lets their data set finish the inputs on the device."""

    def __init__(
        self, placement: BatchPlacement, source: FinishingSource, dtype: torch.dtype
    ) -> None:
        self.placement = placement
        self.source = source
        self.dtype = dtype

    def __call__(self, batch: Batch) -> Batch:
        placed = self.placement(batch)
        micro_batch = batch.micro_batch
        inputs = self.source.finish(
            placed.inputs, micro_batch.indices, micro_batch.epoch, self.dtype
        )
        return Batch((inputs, placed.targets), micro_batch)
