"""Which process computes which samples in which step. The global batches are the same for any number of processes."""

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
    """None in evaluation, which does not augment."""
    step: int
    """Optimizer steps completed before this micro-batch; in evaluation the index of the batch."""
    indices: np.ndarray
    """Sample numbers, int64 [n]. Never empty: see `num_real`."""
    num_real: int
    """How many of `indices` count: all; 0 if they only stand in for an empty micro-batch."""
    scale: float
    """The factor on the sum of the losses before backward. With it the mean over the ranks of the micro-batches'
    gradients (with virtual shards, their sum) is the gradient of the mean loss over the global batch, however unevenly
    that was split. Where a sample has many units, tokens or pixels, it is that of a nominal number of them, and the
    optimizer step divides by what the same factor and mean make of their true number."""
    is_last: bool
    """Whether it is the last of its optimizer step, in whose backward pass gradients are synchronised."""
    shard_index: int = 0
    """The index of this part of the global batch, over all processes."""
    sample_before: int = -1
    """The sample before the first of these in the global batch, or its last one: with it a part knows the predecessors
    of all its samples, see data/mix.py. In evaluation there is none."""


@dataclass(frozen=True)
class BatchPlan:
    """The samples of one process in each optimizer step of a run."""

    samples: int
    global_batch_size: int
    accumulation_steps: int
    steps: int
    """Optimizer steps of the whole run."""
    seed: int
    rank: int = 0
    world_size: int = 1
    virtual_shards: int | None = None
    """With `strategy=ordered`: the number of parts of a global batch, for any number of processes."""
    units_per_sample: float = 1.0
    """What the loss is a mean of, tokens or pixels, in a typical sample; 1 if that is the samples themselves."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch_size)

    @property
    def micro_batch_size(self) -> int:
        return self.global_batch_size // (self.accumulation_steps * self.world_size)

    def epoch_end(self, step: int) -> int:
        """The step at which the epoch of optimizer step `step` ends, or the run if that is earlier."""
        return min((step // self.steps_per_epoch + 1) * self.steps_per_epoch, self.steps)

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` optimizer steps complete an epoch or the run."""
        return step % self.steps_per_epoch == 0 or step == self.steps

    def is_full(self, step: int) -> bool:
        """Whether the global batch of an optimizer step has its full size."""
        ends = (step + 1) % self.steps_per_epoch == 0
        return not ends or self.samples % self.global_batch_size == 0

    def samples_seen(self, step: int) -> int:
        """Samples in the first `step` optimizer steps, over all processes."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + min(rest * self.global_batch_size, self.samples)

    def global_batch(self, step: int) -> np.ndarray:
        """The sample numbers of an optimizer step, over all processes: int64 [n]."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.global_batch_size
        return epoch_order(self.seed, epoch, self.samples)[start : start + self.global_batch_size]

    def micro_batches(self, first_step: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of this process from optimizer step `first_step` on."""
        for step in range(first_step, self.steps):
            yield from self._split(step, self.global_batch(step))

    def _split(self, step: int, indices: np.ndarray) -> Iterator[MicroBatch]:
        """Splits a global batch as evenly as possible, without padding. A short last batch has fewer micro-batches."""
        if self.virtual_shards:
            count, each = self.virtual_shards, self.virtual_shards // self.world_size
            numbers, sum_to_mean = range(self.rank * each, (self.rank + 1) * each), 1 / len(indices)
        else:  # DDP takes the mean over the processes
            count = -(-len(indices) // (self.micro_batch_size * self.world_size)) * self.world_size
            numbers, sum_to_mean = range(self.rank, count, self.world_size), self.world_size / len(indices)
        each, longer = divmod(len(indices), count)  # the parts of np.array_split, of which only this process's are made
        epoch = step // self.steps_per_epoch
        for number in numbers:
            start = number * each + min(number, longer)
            mine = indices[start : start + each + (number < longer)]
            # Every process must take part in the synchronised backward pass: one without samples computes the batch's
            # first sample with weight zero.
            real = len(mine) > 0
            scale = sum_to_mean if real else 0.0
            scale /= self.units_per_sample
            yield MicroBatch(
                epoch,
                step,
                mine if real else indices[:1],
                len(mine),
                scale,
                number == numbers[-1],
                number,
                int(indices[start - 1]),
            )


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of the samples in an epoch: a permutation of range(samples), int64."""
    return order(hash_key(seed, "order", epoch), samples).numpy()


def evaluation_batches(samples: int, batch_size: int, rank: int, world_size: int) -> list[MicroBatch]:
    """The evaluation batches of one rank. Each sample is in one; they are the same batches for any number of ranks."""
    indices = np.arange(samples)
    starts = range(rank * batch_size, samples, world_size * batch_size)
    batches = [(start // batch_size, indices[start : start + batch_size]) for start in starts]
    return [MicroBatch(None, number, batch, len(batch), 0.0, True) for number, batch in batches]
