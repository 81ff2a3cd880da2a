"""Streams of samples: an order of the epoch, shared by loader processes, with a place or without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset[Any]):
    """A part of some samples, in an order of the epoch; loader processes share them."""

    def __init__(self, samples: Any, part: slice = slice(None)) -> None:
        """samples: with a length and numbers, as a map-style data set."""
        self.samples = samples
        self.part = part
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        count = len(self.samples)
        numbers = random.Random(self.epoch).sample(range(count), count)[self.part]
        if worker:
            numbers = numbers[worker.id :: worker.num_workers]
        for number in numbers:
            self.read += 1
            yield self.samples[number]


class Positioned(Stream):
    """A stream that goes on where it was."""

    place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        for sample in itertools.islice(super().__iter__(), self.place, None):
            self.place += 1
            yield sample
        self.place = 0
