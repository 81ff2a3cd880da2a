"""The plan of a run: the samples that each process computes in each step.

The global batches are the same for any number of processes.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ddp_train.data.length_batches import LengthBatches, LengthEpoch, even_cuts
from ddp_train.data.rng import hash_key, order
from ddp_train.data.weighted_draws import WeightedDraws
from ddp_train.errors import DataError

NUMBERS = 1 << 40
"""More than any data set has samples. An index is `place * NUMBERS + number`: the place tells the
draws of a sample that comes several times in an epoch apart, so that each is augmented anew."""
BYTES_OF_A_NUMBER = 32
"""Memory for the number of a sample while the order of an epoch is drawn."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward pass on one process."""

    epoch: int | None
    """None in evaluation, which does not augment."""
    step: int
    """Optimizer steps completed before this micro-batch; in evaluation the index of the batch."""
    indices: np.ndarray
    """Sample numbers, int64 [n]; of a sampler's draws with their places, see NUMBERS. Never empty:
    see `num_real`."""
    num_real: int
    """Number of `indices` that count: all, or 0 if they only stand in for an empty micro-batch."""
    scale: float
    """The factor on the sum of the losses before backward.

    With it the mean over the ranks of the micro-batches' gradients (with virtual shards, their sum)
    is the gradient of the mean loss over the global batch, however unevenly that was split. Where a
    sample has many units, tokens or pixels, it is that of a nominal number of them, and the
    optimizer step divides by what the same factor and mean make of their true number.
    """
    is_last: bool
    """The last of its optimizer step, in whose backward pass gradients are synchronised."""
    shard_index: int = 0
    """The index of this part of the global batch, over all processes."""
    sample_before: int = -1
    """The sample before the first of these in the global batch, or its last one: with it a part
    knows the predecessors of all its samples, see data/mix.py. In evaluation there is none."""
    seed: int = 0
    """The seed of the run, for what its steps draw, see data/keyed_noise.py. In evaluation 0."""
    all_have_samples: bool = True
    """In a session: every process has a sample of this global batch."""

    @property
    def sample_numbers(self) -> np.ndarray:
        """The `indices` without the places of draws: int64 [n]."""
        return self.indices % NUMBERS


class NumberedEpochs(Protocol):
    """Epochs whose samples somebody else chooses: see `data.sampled_epochs`."""

    option: str
    """The key that says who."""
    name: str
    """For people."""
    steps: int | None
    """Global batches of an epoch, where these are chosen too; None: the plan cuts them."""

    def __len__(self) -> int:
        """Samples of an epoch."""
        ...

    def epoch(self, epoch: int) -> np.ndarray:
        """The sample numbers in their order, int64 [n]."""
        ...

    def cuts(self, epoch: int) -> np.ndarray:
        """The first place of each chosen global batch among them, and the end of the last one:
        int64 [steps + 1]."""
        ...

    def digest(self, epoch: int) -> int:
        """A number below 2**48 that identifies the order of an epoch."""
        ...


@dataclass(frozen=True)
class BatchPlan:
    """The samples of one process in each optimizer step of a run."""

    samples: int
    """Samples of the training set, and of an epoch; with weights or a sampler, draws."""
    global_batch_size: int
    """Samples of an optimizer step; with lengths the most tokens, padding included."""
    accumulation_steps: int
    steps: int
    """Optimizer steps of the whole run."""
    seed: int
    rank: int = 0
    world_size: int = 1
    virtual_shards: int | None = None
    """With `strategy=ordered`: the number of parts of a global batch, for any number of
    processes."""
    units_per_sample: float = 1.0
    """Units of the loss, tokens or pixels, in a typical sample; 1 if samples are its units."""
    weights: WeightedDraws | None = field(default=None, compare=False)
    """None: each sample once in an epoch."""
    lengths: LengthBatches | None = field(default=None, compare=False)
    """None: global batches of one number of samples."""
    sampled: NumberedEpochs | None = field(default=None, compare=False)
    """None: the order is drawn by seed and epoch. It may choose the global batches too."""
    drop_last: bool = False
    """The last global batch of an epoch is left out if it is not full."""
    in_order: bool = False
    """The samples come in the order of their numbers: those of a stream."""

    def __post_init__(self) -> None:
        if not self.in_order:
            require_memory_for(self.samples)

    @property
    def steps_per_epoch(self) -> int:
        if self.lengths:
            return self.lengths.steps
        if self.sampled is not None and self.sampled.steps:
            return self.sampled.steps
        if self.drop_last:
            return self.samples // self.global_batch_size
        return -(-self.samples // self.global_batch_size)

    @property
    def chosen_batches(self) -> NumberedEpochs | None:
        """The epochs of a batch sampler; None if the plan cuts global batches of one size."""
        if self.sampled is not None and self.sampled.steps:
            return self.sampled
        return None

    @property
    def samples_per_epoch(self) -> int:
        """Samples that are trained on in an epoch."""
        if self.drop_last:
            return self.steps_per_epoch * self.global_batch_size
        return self.samples

    @property
    def micro_batch_size(self) -> int:
        """The size of the largest micro-batch in the unit of the global batch.

        With lengths it is approximate.
        """
        return -(-self.global_batch_size // (self.accumulation_steps * self.world_size))

    def epoch_end(self, step: int) -> int:
        """The step at which the epoch of optimizer step `step` ends, or the run."""
        return min((step // self.steps_per_epoch + 1) * self.steps_per_epoch, self.steps)

    def ends_epoch(self, step: int) -> bool:
        """True if `step` optimizer steps complete an epoch or the run."""
        return step % self.steps_per_epoch == 0 or step == self.steps

    def is_full(self, step: int) -> bool:
        """True if the global batch of an optimizer step has the full size, which most have."""
        if self.lengths:
            return False
        if self.chosen_batches:
            return len(self.global_batch(step)) == self.global_batch_size
        is_last_of_epoch = (step + 1) % self.steps_per_epoch == 0
        return not is_last_of_epoch or self.samples_per_epoch % self.global_batch_size == 0

    @property
    def has_empty_parts(self) -> bool:
        """True if some process may have no sample in some micro-batch."""
        if self.lengths or self.chosen_batches:
            return True
        samples = self.samples_per_epoch
        sizes = {min(samples, self.global_batch_size)}
        sizes.add(samples % self.global_batch_size or self.global_batch_size)
        return any(self._parts(size) > size for size in sizes)

    def samples_seen(self, step: int) -> int:
        """Samples in the first `step` optimizer steps, over all processes."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        seen_before = epochs * self.samples_per_epoch
        if not steps:
            return seen_before
        if self.lengths:
            return seen_before + int(_length_epoch(self.lengths, self.seed, epochs).seen[steps])
        if self.chosen_batches:
            return seen_before + int(self.chosen_batches.cuts(epochs)[steps])
        return seen_before + min(steps * self.global_batch_size, self.samples)

    def global_batch(self, step: int) -> np.ndarray:
        """The sample numbers of an optimizer step, over all processes: int64 [n].

        With weights a sample may be there several times, with lengths the longest is the first.
        """
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self.lengths:
            return self.lengths.batch(_length_epoch(self.lengths, self.seed, epoch), step_in_epoch)
        if self.chosen_batches:
            start, end = self.chosen_batches.cuts(epoch)[step_in_epoch:][:2]
            return self.chosen_batches.epoch(epoch)[start:end]
        start = step_in_epoch * self.global_batch_size
        if self.in_order:
            return np.arange(start, min(start + self.global_batch_size, self.samples))
        if self.sampled:
            samples = self.sampled.epoch(epoch)
        elif self.weights:
            samples = _weighted_epoch(self.weights, self.seed, epoch)
        else:
            samples = epoch_order(self.seed, epoch, self.samples)
        return samples[start : start + self.global_batch_size]

    def micro_batches(self, first_step: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of this process from optimizer step `first_step` on."""
        for step in range(first_step, self.steps):
            yield from self._split(step, self.global_batch(step))

    def from_step(self, first_step: int) -> PlannedMicroBatches:
        """`micro_batches(first_step)`, to be iterated more than once."""
        return PlannedMicroBatches(self, first_step)

    def digests(self) -> dict[str, str]:
        """sha256 of the weights, lengths or first epoch of a sampler, which decide which samples a
        batch has, by names."""
        arrays = {}
        if self.weights:
            arrays["weights"] = self.weights.sums
        if self.lengths:
            arrays["lengths"] = self.lengths.lengths
        if self.sampled:
            arrays["order"] = self.sampled.epoch(0)
        if self.chosen_batches:
            arrays["batches"] = self.chosen_batches.cuts(0)
        return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}

    def _split(self, step: int, indices: np.ndarray) -> Iterator[MicroBatch]:
        """Split a global batch as evenly as possible.

        A short last batch has fewer micro-batches.
        """
        size = len(indices)
        if self.virtual_shards:
            parts = self._parts(size)
            parts_of_rank = parts // self.world_size
            numbers = range(self.rank * parts_of_rank, (self.rank + 1) * parts_of_rank)
            sum_to_mean = 1 / size
        else:  # DDP takes the mean over the processes
            parts = self._parts(size)
            numbers = range(self.rank, parts, self.world_size)
            sum_to_mean = self.world_size / size
        cuts = self._cuts(indices, parts)
        # Every process must take part in the synchronised backward pass: one without samples
        # computes another's with weight zero, the first of the batch or, if they differ in length,
        # the shortest.
        stand_in = indices[-1:] if self.lengths else indices[:1]
        for number in numbers:
            start = cuts(number)
            part = indices[start : cuts(number + 1)]
            num_real = len(part)
            scale = sum_to_mean
            if not num_real:
                part = stand_in
                scale = 0.0
            yield MicroBatch(
                epoch=step // self.steps_per_epoch,
                step=step,
                indices=part,
                num_real=num_real,
                scale=scale / self.units_per_sample,
                is_last=number == numbers[-1],
                shard_index=number,
                sample_before=int(indices[start - 1]),
                seed=self.seed,
            )

    def _parts(self, size: int) -> int:
        """The micro-batches of all processes in a global batch of so many samples."""
        return self.virtual_shards or self._passes(size) * self.world_size

    def _passes(self, size: int) -> int:
        """The micro-batches of each process in a global batch of so many samples."""
        if self.lengths:
            return min(self.accumulation_steps, -(-size // self.world_size))
        return -(-size // (self.micro_batch_size * self.world_size))

    def _cuts(self, indices: np.ndarray, parts: int) -> Callable[[int], int]:
        """A function from the number of a part of a global batch to its first place.

        Parts are even in samples, as np.array_split cuts, or in tokens.
        """
        if self.lengths:
            return even_cuts(self.lengths.lengths[indices], parts).__getitem__
        smaller_size, larger_parts = divmod(len(indices), parts)
        return lambda number: number * smaller_size + min(number, larger_parts)


@dataclass(frozen=True)
class PlannedMicroBatches:
    """The micro-batches of a plan, to be iterated more than once as DataLoader's samplers are."""

    plan: BatchPlan
    first_step: int

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.plan.micro_batches(self.first_step)


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of the samples in an epoch: a permutation of range(samples), int64."""
    return order(hash_key(seed, "order", epoch), samples).numpy()


@functools.lru_cache(maxsize=2)
def _weighted_epoch(weights: WeightedDraws, seed: int, epoch: int) -> np.ndarray:
    return weights.epoch(seed, epoch)


# Two: loaders are ahead, in the next epoch perhaps, of who asks for samples_seen.
@functools.lru_cache(maxsize=2)
def _length_epoch(lengths: LengthBatches, seed: int, epoch: int) -> LengthEpoch:
    return lengths.epoch(seed, epoch)


def require_memory_for(samples: int) -> None:
    """Raise DataError if the numbers of so many samples do not fit into the memory of this host."""
    needed = samples * BYTES_OF_A_NUMBER
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise DataError(
            f"the data set has {samples:,} samples; their indices alone take {needed / 2**30:,.0f}"
            f" GiB, and this host has {memory / 2**30:,.0f} GiB",
            "let __len__ of the data set return the number of samples of an epoch, or use"
            " data.limit=NUMBER",
        )


def evaluation_batches(
    samples: int, batch_size: int, rank: int, world_size: int
) -> list[MicroBatch]:
    """The evaluation batches of one rank, the same batches for any number of ranks.

    Each sample is in one.
    """
    require_memory_for(samples)
    indices = np.arange(samples)
    batches = []
    for start in range(rank * batch_size, samples, world_size * batch_size):
        batch = indices[start : start + batch_size]
        batches.append(evaluation_batch(start // batch_size, batch))
    return batches


def evaluation_batch(number: int, indices: np.ndarray) -> MicroBatch:
    """A whole batch that is scored and not trained on. number: what its scores are kept under."""
    return MicroBatch(
        epoch=None, step=number, indices=indices, num_real=len(indices), scale=0.0, is_last=True
    )
