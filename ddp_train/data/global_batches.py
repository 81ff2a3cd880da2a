"""The global batches of each pass over a data set, and the share that a process has of one.

They are the same for any number of processes. For loops of users; a run of the launcher has a plan,
see `batch_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ddp_train.data.batch_plan import MicroBatch, epoch_order, require_memory_for

REPETITION = 1 << 32
"""More than any run has epochs: a further pass in an epoch has draws of its own."""


@dataclass(frozen=True)
class Pass:
    """One pass over a data set."""

    epoch: int
    """The epoch in which it begins."""
    repetition: int = 0
    """Earlier passes over the same data that began in this epoch."""

    @property
    def key(self) -> int:
        """The key of its random draws; of the first pass of an epoch that epoch."""
        return self.epoch + self.repetition * REPETITION


class GlobalBatches(Protocol):
    """The sample numbers of each global batch."""

    def __len__(self) -> int:
        """Batches of a pass, of the data set as it is now. Raises TypeError if nobody knows."""
        ...

    def begin(self, begun: Pass) -> None:
        """Begin a pass. A collective: every process must call it."""
        ...

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """The batches of the pass that has begun, from number `first` on: int64 [n] each."""
        ...


@dataclass
class OrderedBatches:
    """The samples in the order of the data set, in every pass."""

    dataset: Sized
    size: int
    drop_last: bool = False

    def __len__(self) -> int:
        return number_of_batches(len(self.dataset), self.size, self.drop_last)

    def begin(self, begun: Pass) -> None:
        """There is nothing to prepare."""

    def batches(self, first: int) -> Iterator[np.ndarray]:
        samples = len(self.dataset)
        for number in range(first, len(self)):
            start = number * self.size
            yield np.arange(start, min(start + self.size, samples))


class ShuffledBatches:
    """Each sample once in a pass, in an order that is keyed by seed and pass."""

    def __init__(self, dataset: Sized, size: int, drop_last: bool, seed: int) -> None:
        self.dataset = dataset
        self.size = size
        self.drop_last = drop_last
        self.seed = seed
        self.order = np.empty(0, np.int64)
        require_memory_for(len(dataset))

    def __len__(self) -> int:
        return number_of_batches(len(self.dataset), self.size, self.drop_last)

    def begin(self, begun: Pass) -> None:
        self.order = epoch_order(self.seed, begun.key, len(self.dataset))

    def batches(self, first: int) -> Iterator[np.ndarray]:
        for number in range(first, len(self)):
            start = number * self.size
            yield self.order[start : start + self.size]


def number_of_batches(samples: int, size: int, drop_last: bool) -> int:
    """Batches of so many samples; the last one may be short, unless it is left out."""
    if drop_last:
        return samples // size
    return -(-samples // size)


def part_of_rank(samples: int, rank: int, world_size: int) -> slice:
    """The places of one process among some samples, which are split as evenly as possible."""
    smaller, larger_parts = divmod(samples, world_size)
    start = rank * smaller + min(rank, larger_parts)
    return slice(start, start + smaller + (rank < larger_parts))


def share_of(
    indices: np.ndarray, epoch: int, number: int, rank: int, world_size: int
) -> MicroBatch:
    """The share of one process in a global batch, see `part_of_rank`.

    indices: those of the global batch, int64 [n].
    epoch: the key of its pass, for the draws of samples.
    number: the place of the batch in its pass.
    """
    part = indices[part_of_rank(len(indices), rank, world_size)]
    count = len(part)
    scale = world_size / len(indices)
    if not count:
        part = indices[:1]  # stands in for it
        scale = 0.0
    return MicroBatch(
        epoch=epoch,
        step=number,
        indices=part,
        num_real=count,
        scale=scale,
        is_last=True,
        shard_index=rank,
        all_have_samples=len(indices) >= world_size,
    )
