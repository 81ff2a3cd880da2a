"""Copies from the host to a GPU for which neither of them waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_train.tensor_tree import map_tensors, tensors

BATCHES_AHEAD = 2
"""For how many batches the computation may be queued when one more is copied. Without a limit a host that waits for
nothing, with recorded steps for example, would fill the GPU's memory with batches."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on the device. From memory that is not page-locked, the host would wait for all that is queued."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


class CopyStream:
    """Places batches on a GPU in a stream of its own, while the stream of training still computes on those before.

    A copy that is queued in training's stream begins when all computation before it has ended (CUDA C++ Best Practices
    Guide, "Asynchronous and Overlapping Transfers with Computation").
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.queued: deque[Any] = deque()
        """An event for each of the last batches: training's stream has computed on the one before."""

    def place(self, batch: Any, place: Callable[[Tensor], Tensor]) -> Any:
        """`place(tensor)` for each tensor in a batch. What is queued later in the current stream finds them ready."""
        training = torch.cuda.current_stream(self.device)
        self.queued.append(training.record_event())
        if len(self.queued) > BATCHES_AHEAD:
            self.queued.popleft().synchronize()
        with torch.cuda.stream(self.stream):
            placed = map_tensors(place, batch)
        training.wait_stream(self.stream)
        for tensor in tensors(placed):  # its memory is not to be used again before training has read it
            tensor.record_stream(training)
        return placed
