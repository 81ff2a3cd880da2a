"""How a batch on the host becomes a batch on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.tensor_tree import tensors

BATCHES_AHEAD = 2
"""Batches that may be copied ahead of the computation. Without a limit a host that never waits, as
with captured steps, would fill the GPU's memory with batches."""

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

    def __call__(self, batch: Batch) -> Batch:
        return batch.map(self.place_tensor)

    def place_tensor(self, tensor: Tensor) -> Tensor:
        """One tensor on the device."""
        placed = tensor.to(self.device, non_blocking=self.non_blocking)
        if self.dtype and placed.is_floating_point():
            placed = placed.to(self.dtype)
        if self.channels_last and placed.ndim == 4:
            placed = placed.contiguous(memory_format=torch.channels_last)
        return placed


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
