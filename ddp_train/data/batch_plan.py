"""Which process computes which samples in which step. The sequence of global batches is the same for every world."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ddp_train.data.rng import hash_key, order


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward pass on one process."""

    epoch: int | None
    """None in evaluation: nothing is augmented."""
    step: int
    """Optimizer steps completed before this one; in evaluation, the number of the batch."""
    indices: np.ndarray
    """Sample numbers, int64. Never empty: see `num_real`."""
    num_real: int
    """How many of `indices` count: all, or none where a stand-in fills the place of an empty micro-batch."""
    scale: float
    """What the sum of the sample losses is multiplied by before backward: the world's mean of all micro-batches'
    gradients (or, with virtual shards, their sum) is then the gradient of the mean loss over the global batch, however
    unevenly
    that was split."""
    is_last: bool
    """The last micro-batch of its optimizer step: gradients are synchronised in its backward pass."""
    shard_index: int = 0
    """Which part of its global batch it is, counted over all processes."""


@dataclass(frozen=True)
class BatchPlan:
    """The whole training of one process, in numbers."""

    samples: int
    global_batch_size: int
    accumulation_steps: int
    steps: int
    """Optimizer steps of the whole run."""
    seed: int
    rank: int = 0
    world_size: int = 1
    virtual_shards: int | None = None
    """With `strategy=ordered`: the parts of a global batch, the same whatever the number of processes."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch_size)

    @property
    def micro_batch_size(self) -> int:
        return self.global_batch_size // (self.accumulation_steps * self.world_size)

    def epoch_end(self, step: int) -> int:
        """The step at which the epoch that holds optimizer step `step` ends, or the run."""
        return min((step // self.steps_per_epoch + 1) * self.steps_per_epoch, self.steps)

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` optimizer steps complete an epoch, or the run."""
        return step % self.steps_per_epoch == 0 or step == self.steps

    def is_full(self, step: int) -> bool:
        """Whether the global batch of an optimizer step is a whole one."""
        ends = (step + 1) % self.steps_per_epoch == 0
        return not ends or self.samples % self.global_batch_size == 0

    def samples_seen(self, step: int) -> int:
        """Samples that the first `step` optimizer steps consume, over all processes."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + min(rest * self.global_batch_size, self.samples)

    def global_batch(self, step: int) -> np.ndarray:
        """The sample numbers of an optimizer step, over all processes, in their order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch_size
        return epoch_order(self.seed, epoch, self.samples)[start : start + self.global_batch_size]

    def micro_batches(self, first_step: int = 0) -> Iterator[MicroBatch]:
        """What this process computes from `first_step` on."""
        for step in range(first_step, self.steps):
            yield from self._split(step, self.global_batch(step))

    def _split(self, step: int, indices: np.ndarray) -> Iterator[MicroBatch]:
        """As evenly as it goes, never padded. A short last batch takes as few micro-batches as hold it."""
        if self.virtual_shards:
            count, each = self.virtual_shards, self.virtual_shards // self.world_size
            numbers, sum_to_mean = range(self.rank * each, (self.rank + 1) * each), 1 / len(indices)
        else:  # DDP takes the mean over the processes
            count = -(-len(indices) // (self.micro_batch_size * self.world_size)) * self.world_size
            numbers, sum_to_mean = range(self.rank, count, self.world_size), self.world_size / len(indices)
        each, longer = divmod(len(indices), count)  # np.array_split's parts, of which only this process's are cut
        epoch = step // self.steps_per_epoch
        for number in numbers:
            start = number * each + min(number, longer)
            mine = indices[start : start + each + (number < longer)]
            # Every process must take part in the synchronised backward pass: one without samples computes the first
            # sample of the batch with weight zero.
            real = len(mine) > 0
            scale = sum_to_mean if real else 0.0
            yield MicroBatch(
                epoch, step, mine if real else indices[:1], len(mine), scale, number == numbers[-1], number
            )


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of the samples in an epoch: a permutation of range(samples)."""
    return order(hash_key(seed, "order", epoch), samples).numpy()


def evaluation_batches(samples: int, batch_size: int, rank: int, world_size: int) -> list[MicroBatch]:
    """Each sample once. The batches are the same for every world, only who computes them differs."""
    indices = np.arange(samples)
    starts = range(rank * batch_size, samples, world_size * batch_size)
    batches = [(start // batch_size, indices[start : start + batch_size]) for start in starts]
    return [MicroBatch(None, number, batch, len(batch), 0.0, True) for number, batch in batches]
