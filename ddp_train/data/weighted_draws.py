"""Epochs that draw samples by weight. docs/guides/batches.md"""

from __future__ import annotations

import numpy as np
import torch

from ddp_train.data.rng import hash_key, uniform


class WeightedDraws:
    """An epoch of n draws with replacement, by weight.

    The probability of a sample is in proportion to its weight.

    A draw is a uniform number in [0, sum of the weights) whose place among the cumulative sums is
    looked up: O(log n). It depends on seed, epoch and its own number alone.
    """

    def __init__(self, weights: np.ndarray) -> None:
        """weights: float64 [n], finite, not negative, not all 0."""
        self.sums = np.cumsum(weights)
        self.last = int(np.flatnonzero(weights)[-1])

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The sample numbers in the order in which they are drawn, int64 [n]."""
        key = hash_key(seed, "weights", epoch)
        draws = uniform(key, torch.arange(len(self.sums)), 1)[:, 0].numpy()
        numbers = np.searchsorted(self.sums, draws * self.sums[-1], side="right")
        return np.minimum(numbers, self.last)  # a product may be rounded up to the whole sum
