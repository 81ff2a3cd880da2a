"""A trial of a user's `collate_fn`: whether a sample depends on what else is in its batch.

Each process collates its own samples, so such a batch is another one on each number of processes.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from torch import Tensor

from ddp_train.data.dataset_content import bytes_of
from ddp_train.data.datasets import spread
from ddp_train.data.rng import global_states, keyed_generators
from ddp_train.data.sample_tensors import collate as default_collate
from ddp_train.data.user_dataset import SeedGenerators, UserDataset
from ddp_train.tensor_tree import tensors

SAMPLES = 4
"""Samples that are read: one, and three others beside it."""
DRAWS = "draws random numbers for a batch"
MIXES = "mixes the samples of a batch"
WARNING = (
    "%s %s, but each process makes a batch of its own samples alone, so the result depends on the"
    " number of processes. Draw in __getitem__ of the data set, whose random numbers depend on the"
    " sample and the epoch alone, and choose there what to mix a sample with:"
    " other = torch.randint(len(self), ()).item()"
)


def dependence_of_collate(source: UserDataset) -> str:
    """DRAWS or MIXES if the batches of a collate_fn depend on how they are divided; else "".

    Batches are made of copies of samples; the global generators stay as they are.
    """
    if source.can_make_batches or source.collate is default_collate:
        return ""
    read = copy.copy(source)
    read.collate = list
    try:
        samples = read.get_batch(spread(source, SAMPLES), None)
        with keyed_generators() as seed_generators:
            trial = _Trial(source.collate, samples, seed_generators)
            if trial.draws():
                return DRAWS
            if trial.mixes():
                return MIXES
    except Exception:  # noqa: BLE001  the first batch of training raises it again
        return ""
    return ""


class _Trial:
    """Batches of a few samples."""

    def __init__(self, collate: Any, samples: list[Any], seed_generators: SeedGenerators) -> None:
        self.collate = collate
        self.samples = samples
        self.seed_generators = seed_generators

    def batch(self, *places: int) -> list[Tensor]:
        """The tensors of a batch of these samples, with the same draws each time."""
        samples = copy.deepcopy([self.samples[place] for place in places])
        self.seed_generators(0)
        return list(tensors(self.collate(samples)))

    def draws(self) -> bool:
        """Whether it draws from a global generator, or gives another batch each time."""
        places = range(min(2, len(self.samples)))
        first = self.batch(*places)
        after = global_states()
        self.seed_generators(0)
        if global_states() != after:
            return True
        again = self.batch(*places)
        return list(map(bytes_of, first)) != list(map(bytes_of, again))

    def mixes(self) -> bool:
        """Whether no row of a batch of two samples is one beside any other second sample."""
        counts = [self.batch(*[0] * count) for count in (1, 2, 3)]
        of_others = [self.batch(0, other) for other in range(1, len(self.samples))]
        if len({len(batch) for batch in (*counts, *of_others)}) > 1:
            return False
        for number, dimension in enumerate(map(_dimension_of_samples, *counts)):
            if dimension is None:
                continue
            beside = [batch[number] for batch in of_others]
            pairs = list(itertools.combinations(beside, 2))
            if pairs and all(_have_no_common_row(*pair, dimension) for pair in pairs):
                return True
        return False


def _dimension_of_samples(one: Tensor, two: Tensor, three: Tensor) -> int | None:
    """The dimension whose length is the number of samples, from batches of one, two and three of
    them; None if there is none."""
    if not one.ndim == two.ndim == three.ndim:
        return None
    lengths = list(zip(one.shape, two.shape, three.shape, strict=True))
    if lengths.count((1, 2, 3)) != 1:
        return None
    return lengths.index((1, 2, 3))


def _have_no_common_row(first: Tensor, second: Tensor, dimension: int) -> bool:
    """Whether tensors of one shape, as without padding to other lengths, have no row in common."""
    if first.shape != second.shape:
        return False
    rows = {bytes_of(row) for row in first.unbind(dimension)}
    return rows.isdisjoint(bytes_of(row) for row in second.unbind(dimension))
