"""The splits of a data set: what trains, what validates and what tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddp_train.data.batch_plan import require_memory_for
from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key, order
from ddp_train.errors import DataError
from ddp_train.scored_sets import TEST, VALIDATION, of_kind


class ScoredSplit(NamedTuple):
    """A set that is scored while a run trains, and may select."""

    name: str
    """validation, test, or that of a further set, validation/noisy."""
    source: BatchSource


class Splits(NamedTuple):
    """The splits of a data set."""

    train: BatchSource
    test: BatchSource
    validation: BatchSource | None = None
    weights: np.ndarray | None = None
    """Weights of the samples that train, float64 [n], by which they are drawn, with replacement.
    None: each sample once in an epoch."""

    numbers: dict[str, np.ndarray] = {}  # noqa: RUF012  nobody changes it
    """Indices into the whole training set of `train` and `validation`, int64 [n], where these are
    parts of it."""

    further: dict[str, BatchSource] = {}  # noqa: RUF012  nobody changes it
    """Further sets that are scored, by their names: validation/noisy, test/noisy."""

    @property
    def validation_sets(self) -> dict[str, BatchSource]:
        """All sets that validate, by their names."""
        sets = {} if self.validation is None else {VALIDATION: self.validation}
        return sets | self._further(VALIDATION)

    @property
    def test_sets(self) -> dict[str, BatchSource]:
        """All sets that test, by their names."""
        return {TEST: self.test} | self._further(TEST)

    def _further(self, kind: str) -> dict[str, BatchSource]:
        return {name: self.further[name] for name in of_kind(kind, self.further)}

    @property
    def scored_sets(self) -> dict[str, BatchSource]:
        """The sets that are scored while a run trains: those of validation, else those of test."""
        return self.validation_sets or self.test_sets

    @property
    def scored(self) -> ScoredSplit:
        """The first of `scored_sets`, which selects unless a key names another."""
        name, source = next(iter(self.scored_sets.items()))
        return ScoredSplit(name, source)

    def limited(self, limit: int | None) -> Splits:
        """The first `limit` samples of each split; None: all of them."""
        if limit is None:
            return self
        return Splits(
            _first_samples(self.train, limit),
            _first_samples(self.test, limit),
            None if self.validation is None else _first_samples(self.validation, limit),
            None if self.weights is None else self.weights[:limit],
            self.numbers,
            {name: _first_samples(source, limit) for name, source in self.further.items()},
        )


def split_for_validation(samples: int, part: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The sample numbers that train and those that validate, int64, in ascending order.

    A sample belongs to one or the other by a hash of seed and sample number, whatever the number of
    processes.

    samples: of the whole training set.
    part: of the samples that validate, above 0 and below 1.

    Raises DataError if one side would have none.
    """
    require_memory_for(samples)
    count = round(part * samples)
    if not 0 < count < samples:
        problem = (
            f"data.validation={part:g}: of {samples:,} samples, {count:,} would be for validation"
            f" and {samples - count:,} for training"
        )
        if count:
            raise DataError(problem, "use a smaller part")
        raise DataError(problem, f"use at least {1 / samples:.2g}, or more samples")
    shuffled = order(hash_key(seed, "validation"), samples).numpy()
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def _first_samples(source: BatchSource, limit: int) -> BatchSource:
    if limit >= len(source):
        return source
    return source.select(np.arange(limit))
