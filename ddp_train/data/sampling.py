"""Which samples an epoch has, and which of them stand together in a global batch, where that is not
each sample once in batches of one size: draws by weight, and batches by length. docs/batches.md
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ddp_train.data.rng import hash_key, order, uniform

ALIKE = 0.1
"""The samples of a global batch differ in length by this part of the longest, where there are
enough of them."""
LEAST_BATCHES = 2
"""Global batches that exchange their samples, at least: those of a single one would meet in every
epoch. More of them pad more: docs/benchmarks/padding.md."""


class WeightedDraws:
    """An epoch of n draws with replacement, each sample with a probability in proportion to its
    weight.

    A draw is a uniform number in [0, sum of the weights) whose place among the cumulative sums is
    looked up: O(log n). It depends on seed, epoch and its own number alone.
    """

    def __init__(self, weights: np.ndarray) -> None:
        """weights: float64 [n], finite, not negative, not all 0."""
        self.sums = np.cumsum(weights)
        self.last = int(np.flatnonzero(weights)[-1])

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The sample numbers in the order in which they are drawn, int64 [n]."""
        draws = uniform(hash_key(seed, "weights", epoch), torch.arange(len(self.sums)), 1)[
            :, 0
        ].numpy()
        drawn = np.searchsorted(self.sums, draws * self.sums[-1], side="right")
        return np.minimum(drawn, self.last)  # a product that was rounded up to the whole sum


class LengthEpoch(NamedTuple):
    """The global batches of one epoch."""

    samples: np.ndarray
    """Sample numbers, int64 [n], batch by batch in the order of `LengthBatches.cuts`."""
    batches: np.ndarray
    """Which of these batches is the first, second, ... of the epoch: int64 [steps]."""
    seen: np.ndarray
    """Samples before each batch of the epoch: int64 [steps]."""


class LengthBatches:
    """Global batches of samples of about one length, with at most so many tokens, each sample once
    in an epoch.

    The samples are sorted by length once and divided into buckets, the longest first; a bucket's
    batches all hold as many samples as fit if each were as long as its longest. Each epoch shuffles
    the samples within their buckets, and then the batches. So the sizes of the batches and their
    number follow from the lengths alone and are the same in every epoch, while other samples meet
    in each. Only the batch of the shortest samples may be part full.

    "At most" counts padding, as fairseq's max_tokens does: number of samples x longest sample.
    """

    def __init__(self, lengths: np.ndarray, tokens: int) -> None:
        """lengths: of each sample, int64 [n], at least 1 and at most `tokens`, which a global batch
        may have."""
        self.lengths = lengths
        by_length = np.argsort(-lengths, kind="stable")
        longest_first = -lengths[by_length]  # ascending, as searchsorted wants it
        self.bucket_of = np.empty(
            len(lengths), dtype=np.uint16
        )  # a few hundred; numpy sorts two bytes in linear time
        cuts = [0]
        firsts = []
        start = 0
        while start < len(lengths):
            longest = -int(longest_first[start])
            size = tokens // longest
            alike = (
                int(np.searchsorted(longest_first, -(1 - ALIKE) * longest, side="right")) - start
            )
            end = min(start + max(alike // size, LEAST_BATCHES) * size, len(lengths))
            self.bucket_of[by_length[start:end]] = len(firsts)
            cuts += [*range(start + size, end, size), end]
            firsts.append(start)
            start = end
        self.cuts = np.array(cuts)
        """Where each batch begins among the samples in the order of their buckets, and where the
        last one ends."""
        self.padding = 1 - int(lengths.sum()) / int(
            lengths[by_length][firsts] @ np.diff(firsts, append=len(lengths))
        )
        """The part of an epoch's tokens that is padding, if each batch were as long as its bucket's
        longest."""

    @property
    def steps(self) -> int:
        """Global batches of an epoch."""
        return len(self.cuts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each batch, int64 [steps]."""
        return np.diff(self.cuts)

    def epoch(self, seed: int, epoch: int) -> LengthEpoch:
        shuffled = order(hash_key(seed, "order", epoch), len(self.lengths)).numpy()
        samples = shuffled[np.argsort(self.bucket_of[shuffled], kind="stable")]
        batches = order(hash_key(seed, "batches", epoch), self.steps).numpy()
        sizes = self.sizes[batches]
        return LengthEpoch(samples, batches, sizes.cumsum() - sizes)

    def batch(self, epoch: LengthEpoch, number: int) -> np.ndarray:
        """The sample numbers of one global batch of an epoch, the longest sample first: int64
        [n]."""
        start, end = self.cuts[epoch.batches[number] :][:2]
        samples = epoch.samples[start:end]
        return samples[np.argsort(-self.lengths[samples], kind="stable")]


def even_cuts(lengths: np.ndarray, parts: int) -> list[int]:
    """Where to cut samples into parts so that the largest part is as small as possible with
    padding: number of samples x longest sample. Returns parts + 1 positions; parts are empty only
    if there are more parts than samples.

    lengths: int64 [n], the longest first.

    The smallest limit that is enough is found by bisection; with a limit each part, from the
    longest sample on, takes what it may. Below the limit, samples are spread evenly.
    """
    each = lengths.tolist()
    count = len(lengths)
    low = max(each[0], -(-sum(each) // parts))
    high = -(-count // parts) * each[0]
    while low < high:
        limit = (low + high) // 2
        position = 0
        for _ in range(parts):
            position += limit // each[position]
            if position >= count:
                break
        low, high = (low, limit) if position >= count else (limit + 1, high)
    cuts = [0]
    for left in range(parts, 0, -1):
        start = cuts[-1]
        cuts.append(
            start + min(high // each[start], -(-(count - start) // left))
            if start < count
            else count
        )
    return cuts
