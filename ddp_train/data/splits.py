"""What trains, what validates and what tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key, order
from ddp_train.errors import DataError


class Splits(NamedTuple):
    """The splits of a data set."""

    train: BatchSource
    test: BatchSource
    validation: BatchSource | None = None
    weights: np.ndarray | None = None
    """Of the samples that train, float64 [n]: they are drawn by them, with replacement. None: each
    once in an epoch."""

    numbers: dict[str, np.ndarray] = {}  # noqa: RUF012  nobody changes it
    """Of parts of the training set, `train` and `validation`: which of its samples they have, int64
    [n]."""

    def named(self, name: str) -> BatchSource | None:
        """train, validation or test; None if there is none."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]

    @property
    def scored(self) -> tuple[str, BatchSource]:
        """The split that is scored while a run trains, and by which it may select: its name, and
        itself."""
        if self.validation is None:
            return ("test", self.test)
        return ("validation", self.validation)

    def limited(self, limit: int | None) -> Splits:
        """The first `limit` samples of each, or all of them."""
        validation = None if self.validation is None else first(self.validation, limit)
        weights = None if self.weights is None else self.weights[:limit]
        return Splits(
            first(self.train, limit), first(self.test, limit), validation, weights, self.numbers
        )


def first(source: BatchSource, limit: int | None) -> BatchSource:
    """The first `limit` samples of a source, or all of them."""
    if limit is None or limit >= len(source):
        return source
    return source.select(np.arange(limit))


def parted(samples: int, part: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The sample numbers that train and those that validate, int64, in ascending order.

    A sample belongs to one or the other by a hash of seed and sample number, whatever the number of
    processes. part: of the samples, above 0 and below 1. Raises DataError if one side would have
    none.
    """
    count = round(part * samples)
    if not 0 < count < samples:
        few = (
            f"data.validation={part:g}: of {samples:,} samples, {count:,} would validate and"
            f" {samples - count:,} train"
        )
        raise DataError(
            few,
            (
                f"use at least {1 / samples:.2g}, or more samples"
                if not count
                else "use a smaller part"
            ),
        )
    shuffled = order(hash_key(seed, "validation"), samples).numpy()
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])
