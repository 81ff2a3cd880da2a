"""The global batches of each pass over a data set, and the share that a process has of one.

They are the same for any number of processes. For loops of users; a run of the launcher has a plan,
see `batch_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

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

    def set_epoch(self, epoch: int) -> None:
        """Called where an epoch begins, before the user's loop has it."""
        ...

    def begin(self, begun: Pass) -> None:
        """Begin a pass. A collective: every process must call it."""
        ...

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """The batches of the pass that has begun, from number `first` on: int64 [n] each."""
        ...

    def pass_facts(self) -> dict[str, Any]:
        """Facts that identify the batches of the pass that has begun."""
        ...

    def state(self, in_pass: bool) -> dict[str, Any]:
        """The state that `restore` takes, plain data. in_pass: inside of the current pass."""
        ...

    def restore(self, state: dict[str, Any], in_pass: bool) -> None:
        """Continue from `state`. in_pass: in the pass inside of which it was saved."""
        ...


class EvenBatches:
    """Each sample once in a pass, in batches of one size but for the last one.

    The order is that of the data set, or keyed by seed and pass. Nothing is kept from pass to pass.
    """

    def __init__(
        self,
        dataset: Sized,
        size: int,
        drop_last: bool,
        seed: int | None = None,
        short_batch_at: int | None = None,
    ) -> None:
        """seed: None for the order of the data set.
        short_batch_at: the place of the last batch if it is short; None: the end.
        """
        self.dataset = dataset
        self.size = size
        self.drop_last = drop_last
        self.seed = seed
        self.short_batch_at = short_batch_at
        self.order: np.ndarray | None = None
        """The sample numbers of the pass, int64 [n]; None: in order, of which there is no list."""
        if seed is not None:
            require_memory_for(len(dataset))

    def __len__(self) -> int:
        return number_of_batches(len(self.dataset), self.size, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """The pass says it."""

    def begin(self, begun: Pass) -> None:
        if self.seed is not None:
            self.order = epoch_order(self.seed, begun.key, len(self.dataset))

    def batches(self, first: int) -> Iterator[np.ndarray]:
        samples = len(self.dataset)
        for number in self._numbers()[first:]:
            start = number * self.size
            end = min(start + self.size, samples)
            if self.order is None:
                yield np.arange(start, end)
            else:
                yield self.order[start:end]

    def _numbers(self) -> Sequence[int]:
        """The numbers of the batches, in the order in which they come."""
        numbers = range(len(self))
        if self.short_batch_at is None or len(self.dataset) % self.size == 0 or self.drop_last:
            return numbers
        *others, last = numbers
        return [*others[: self.short_batch_at], last, *others[self.short_batch_at :]]

    def pass_facts(self) -> dict[str, Any]:
        return {}

    def state(self, in_pass: bool) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], in_pass: bool) -> None:
        """Seed and pass say all."""


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
