"""Means over parts of a process's batch, which a loop takes one after the other.

Each is a mean over the parts that all processes have at that moment: how many samples share a part,
and how many parts a batch has, depends on the number of processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = (
    "run.mean(losses, over=...) was called %d times in the first step, each time for a part of the"
    " batch. Each result is the mean over the parts that the processes have at that moment, so it"
    " depends on the number of processes. Call run.mean once for the whole batch:"
    " run.mean(torch.cat(losses)). To save memory, use run.mean(losses, over=len(part),"
    " accumulate=optimizer).backward() for each part of batch.tensor_split(4). For gradients of"
    " each sample, as in DP-SGD, use torch.autograd.grad and run.sum instead of run.mean"
)


class PartsOfBatch:
    """Tells of the first step whether its means are of parts of the batch.

    Parts have as many losses as they count, are all as large as the first but the last, and have
    all samples together. Each goes backward before the next is made, and its loss is not divided.
    Means over kinds of samples, as positives and negatives, are not like that.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """The samples of each part."""
        self.backwards = 0
        """Losses of parts that went backward as they were."""
        self.samples = 0
        """The samples of this process in the batch."""
        self.are_others = False
        """There are losses that are not of parts."""

    def see_mean(self, losses: Tensor, over: float | Tensor, samples: int) -> None:
        """Called with what each mean is made of. samples: of this process, in the batch."""
        counted = float(torch.as_tensor(over).sum())
        self.are_others |= counted != losses.numel() or self.backwards < len(self.sizes)
        self.sizes.append(losses.numel())
        self.samples = samples

    def see_backward(self, gradient: Tensor) -> None:
        """Called when a mean loss goes backward. gradient: of the loss."""
        self.backwards += 1
        self.are_others |= bool(gradient != 1)

    def warning(self) -> str | None:
        """The warning of the step, when it is over; None if its means are not of parts."""
        *first_sizes, last = self.sizes or [0]
        are_split = len(set(first_sizes)) == 1 and 0 < last <= first_sizes[0]
        if self.are_others or not are_split or sum(self.sizes) != self.samples:
            return None
        return PARTS % len(self.sizes)
