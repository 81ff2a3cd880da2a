"""Global batches of samples of about one length. docs/guides/batches.md"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddp_train.data.rng import hash_key, order

ALIKE = 0.1
"""The samples of a global batch differ in length by this part of the longest, where there are
enough of them."""
LEAST_BATCHES = 2
"""Global batches that exchange their samples, at least: those of a single one would meet in every
epoch. More of them pad more: docs/inside/benchmarks/means.md."""


class LengthEpoch(NamedTuple):
    """The global batches of one epoch."""

    samples: np.ndarray
    """Sample numbers, int64 [n], batch by batch in the order of `LengthBatches.cuts`."""
    batches: np.ndarray
    """The numbers of these batches in the order of the epoch: int64 [steps]."""
    seen: np.ndarray
    """Samples before each batch of the epoch: int64 [steps]."""


class LengthBatches:
    """Global batches of samples of similar length, each sample once in an epoch.

    A batch has at most `tokens` tokens with padding, as fairseq's max_tokens: number of samples x
    longest sample.

    The samples are sorted by length and divided into buckets, the longest first. All batches of a
    bucket have the same number of samples: as many as would fit if each were as long as the longest
    of the bucket. Only the batch of the shortest samples may have fewer.

    Each epoch shuffles the samples within their buckets, and then the batches. Number and sizes of
    the batches therefore follow from the lengths alone.
    """

    def __init__(self, lengths: np.ndarray, tokens: int) -> None:
        """Divide the samples into buckets.

        lengths: tokens of each sample, int64 [n], at least 1 and at most `tokens`.
        tokens: the most tokens of a global batch, padding included.
        """
        self.lengths = lengths
        by_length = np.argsort(-lengths, kind="stable")
        longest_first = -lengths[by_length]  # ascending, as searchsorted wants it
        # A few hundred buckets, of two bytes: numpy sorts these in linear time.
        self.bucket_of = np.empty(len(lengths), dtype=np.uint16)
        cuts = [0]
        firsts = []
        start = 0
        while start < len(lengths):
            longest = -int(longest_first[start])
            size = tokens // longest
            shortest_alike = (1 - ALIKE) * longest
            end_of_alike = int(np.searchsorted(longest_first, -shortest_alike, side="right"))
            batches = max((end_of_alike - start) // size, LEAST_BATCHES)
            end = min(start + batches * size, len(lengths))
            self.bucket_of[by_length[start:end]] = len(firsts)
            cuts += [*range(start + size, end, size), end]
            firsts.append(start)
            start = end
        self.cuts = np.array(cuts)
        """The first place of each batch among the samples in the order of their buckets, and the
        end of the last one: int64 [steps + 1]."""
        bucket_sizes = np.diff(firsts, append=len(lengths))
        tokens_with_padding = int(lengths[by_length][firsts] @ bucket_sizes)
        self.padding = 1 - int(lengths.sum()) / tokens_with_padding
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
        """The shuffled batches of an epoch."""
        shuffled = order(hash_key(seed, "order", epoch), len(self.lengths)).numpy()
        samples = shuffled[np.argsort(self.bucket_of[shuffled], kind="stable")]
        batches = order(hash_key(seed, "batches", epoch), self.steps).numpy()
        sizes = self.sizes[batches]
        return LengthEpoch(samples, batches, sizes.cumsum() - sizes)

    def batch(self, epoch: LengthEpoch, number: int) -> np.ndarray:
        """The sample numbers of one global batch of an epoch, the longest first: int64 [n]."""
        start, end = self.cuts[epoch.batches[number] :][:2]
        samples = epoch.samples[start:end]
        return samples[np.argsort(-self.lengths[samples], kind="stable")]


def even_cuts(lengths: np.ndarray, parts: int) -> list[int]:
    """The positions at which to cut samples so that the largest part is as small as possible.

    The size of a part counts padding: number of samples x longest sample.

    The smallest limit that is enough is found by bisection. Below the limit, samples are spread
    evenly.

    lengths: int64 [n], the longest first.
    parts: more than there are samples leaves some of them empty.

    Returns parts + 1 positions.
    """
    limit = _smallest_limit(lengths.tolist(), parts)
    count = len(lengths)
    cuts = [0]
    for parts_left in range(parts, 0, -1):
        start = cuts[-1]
        if start == count:
            cuts.append(count)
            continue
        most = limit // int(lengths[start])
        even_part = -(-(count - start) // parts_left)
        cuts.append(start + min(most, even_part))
    return cuts


def _smallest_limit(lengths: list[int], parts: int) -> int:
    """The size, with padding, that the largest part needs.

    Each part takes as many samples as it may, from the longest on.
    """
    low = max(lengths[0], -(-sum(lengths) // parts))
    high = -(-len(lengths) // parts) * lengths[0]
    while low < high:
        middle = (low + high) // 2
        if _fits(lengths, parts, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _fits(lengths: list[int], parts: int, limit: int) -> bool:
    position = 0
    for _ in range(parts):
        position += limit // lengths[position]
        if position >= len(lengths):
            return True
    return False
