"""Asynchronous copies from the host to a GPU, in a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_train.tensor_tree import map_tensors, tensors

BATCHES_AHEAD = 2
"""How many batches may be copied ahead of the computation. Without a limit a host that never waits,
as with captured steps, would fill the GPU's memory with batches."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a small tensor without waiting, unless it is there already. From pageable memory the
    host would wait for all queued work."""
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


class CopyStream:
    """Copies batches to a GPU in a stream of its own, while training's stream still computes on
    earlier batches.

    A copy in training's stream would begin only when all earlier computation has ended (CUDA C++
    Best Practices Guide, "Asynchronous and Overlapping Transfers with Computation").
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.queued: deque[Any] = deque()
        """For each of the last batches, the event that training's stream has computed on the batch
        before it."""

    def place(self, batch: Any, place: Callable[[Tensor], Tensor]) -> Any:
        """The batch with `place(tensor)` for each tensor. Later work in the current stream waits
        for the copies."""
        training = torch.cuda.current_stream(self.device)
        self.queued.append(training.record_event())
        if len(self.queued) > BATCHES_AHEAD:
            self.queued.popleft().synchronize()
        with torch.cuda.stream(self.stream):
            placed = map_tensors(place, batch)
        training.wait_stream(self.stream)
        for tensor in tensors(placed):  # its memory must not be reused before training has read it
            tensor.record_stream(training)
        return placed
