"""Epochs by a sampler of the user's, which all processes draw alike. docs/guides/batches.md"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sized
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler

from ddp_train.data.global_batches import Pass
from ddp_train.data.sampled_batches import SampledBatches
from ddp_train.errors import ConfigError, DataError
from ddp_train.text import counted

AT_ONCE = 1024
"""Numbers between which the global generators are exchanged."""
KEPT = 2
"""Epochs whose numbers are kept beside the first: loaders are ahead of who asks for the current
one, and the first is asked for at every start."""
TRIED = 3
"""Epochs that are drawn before a run begins."""
DIGEST_BYTES = 6
"""A float64, as which digests travel between processes, holds whole numbers of 53 bits."""


class Drawn(NamedTuple):
    """An epoch that was drawn."""

    numbers: np.ndarray
    """Sample numbers in their order, int64 [n]."""
    cuts: np.ndarray
    """The first place of each portion that the sampler gave, and the end of the last one."""


class SampledEpochs:
    """The numbers of the samples in each epoch, by a sampler.

    A sampler that keeps something from epoch to epoch, a generator of its own for instance, draws
    the epochs before the one that is asked for too.
    """

    option = "data.sampler"
    unit = "number"
    """The name of one item of the sampler, in messages."""
    steps: int | None = None
    """Global batches of an epoch, where the sampler gives these; None: it gives single numbers."""

    def __init__(self, make: Callable[[], Any], samples: Sized, key: int) -> None:
        """Make the sampler, and draw its first epoch twice.

        make: makes the sampler anew, the same each time.
        samples: the training set.
        key: the key of its draws from the global generators.

        Raises ConfigError if it tells no length, or draws otherwise when it is made again.
        """
        self.make = make
        self.samples = samples
        self.key = key
        self.kept: dict[int, Drawn] = {}
        self.digests: dict[int, int] = {}
        """A digest of each epoch that was drawn, which the processes compare in it."""
        self.batches = self._made()
        self.name = self.batches.name
        self.length = self._told_length()
        first = self.epoch(0)
        if self.batches.keeps_state:
            self._make_again()
            if not np.array_equal(first, self.epoch(0)):
                raise ConfigError(
                    [
                        f"{self.option}: {self.name} gives another order each time it is created,"
                        " so a resumed run would train in another order; let it draw from"
                        " torch's, numpy's or Python's global generators, or from one with a"
                        " fixed seed"
                    ]
                )

    def __len__(self) -> int:
        """Numbers of an epoch."""
        return self.length

    def epoch(self, epoch: int) -> np.ndarray:
        """The numbers of the samples of an epoch, in their order, int64 [n]. See `drawn`."""
        return self.drawn(epoch).numbers

    def cuts(self, epoch: int) -> np.ndarray:
        """The places of an epoch that portions begin at, with its end. See `Drawn`."""
        return self.drawn(epoch).cuts

    def drawn(self, epoch: int) -> Drawn:
        """An epoch.

        Raises DataError if it is not as long as the sampler tells, or has no numbers of samples.
        """
        if epoch in self.kept:
            return self.kept[epoch]
        if not self.batches.keeps_state:
            return self._draw(epoch)
        if epoch < self.next:
            self._make_again()
        while self.next < epoch:
            self._draw(self.next)
        return self._draw(epoch)

    def _draw(self, epoch: int) -> Drawn:
        self.batches.set_epoch(epoch)
        portions = self.batches.draw(Pass(epoch))
        batches = [numbers for portion in portions for numbers in portion]
        numbers = np.concatenate([np.empty(0, np.int64), *batches])
        cuts = np.cumsum([0, *map(len, batches)])
        drawn = Drawn(numbers, cuts)
        self._check(drawn, epoch)
        self.next = epoch + 1
        self.digests[epoch] = self._digest_of(drawn)
        self.kept[epoch] = drawn
        while len(self.kept) > KEPT + 1:
            del self.kept[min(filter(None, self.kept))]
        return drawn

    def _check(self, drawn: Drawn, epoch: int) -> None:
        """Raise DataError if the epoch is not as long as the sampler tells."""
        self._check_count(len(drawn.numbers), epoch)

    def _check_count(self, count: int, epoch: int) -> None:
        if count != self.length:
            raise DataError(
                f"{self.option}: {self.name} gave {counted(count, self.unit)} in epoch"
                f" {epoch + 1}, but its __len__, by which steps are planned, was {self.length:,}",
                "give in each epoch the number that __len__ says, or train in a loop of your own"
                " (ddp_train.session)",
            )

    def _digest_of(self, drawn: Drawn) -> int:
        return digest_of(drawn.numbers)

    def check_epochs(self, epochs: int) -> None:
        """Draw some of the epochs of a run, to refuse them before it begins. See `drawn`."""
        for epoch in range(min(epochs, TRIED)):
            self.drawn(epoch)

    def digest(self, epoch: int) -> int:
        """A number below 2**48 that identifies the order of an epoch."""
        if epoch not in self.digests:
            self.epoch(epoch)
        return self.digests[epoch]

    def _make_again(self) -> None:
        self.batches = self._made()
        self.kept = {}

    def _made(self) -> SampledBatches:
        self.next = 0
        """The epoch that a sampler which keeps something draws next."""
        self.sampler = self.make()
        return SampledBatches(self._batch_sampler(self.sampler), self.samples, self.key, "cpu")

    def _batch_sampler(self, sampler: Any) -> Any:
        """The sampler as an iterable of lists of numbers."""
        return BatchSampler(sampler, AT_ONCE, drop_last=False)

    def _told_length(self) -> int:
        try:
            length = len(self.sampler)
        except (TypeError, NotImplementedError):
            length = 0
        if length:
            return length
        rule = "needs a __len__ above 0, by which steps are planned"
        remedy = "add a __len__, or train in a loop of your own (ddp_train.session)"
        raise ConfigError([f"{self.option}: {self.name} {rule}; {remedy}"])


class EpochsInBatches(SampledEpochs):
    """The global batches of each epoch, by a batch sampler: as many in each, of any sizes."""

    option = "data.batch_sampler"
    unit = "batch"

    def __init__(self, make: Callable[[], Any], samples: Sized, key: int, largest: int) -> None:
        """Make the batch sampler, and draw its first epoch twice.

        largest: samples that a batch may have; see `SampledEpochs` for the rest.

        Raises ConfigError as there, and DataError for what `_check` refuses.
        """
        self.largest = largest
        super().__init__(make, samples, key)
        self.steps = self.length

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.epoch(0))

    def _batch_sampler(self, sampler: Any) -> Any:
        return sampler

    def _check(self, drawn: Drawn, epoch: int) -> None:
        """Raise DataError for other numbers of batches or samples, or a batch that is too large."""
        self._check_count(len(drawn.cuts) - 1, epoch)
        found = f"{self.option}: {self.name} gave"
        largest = int(np.diff(drawn.cuts).max())
        if largest > self.largest:
            raise DataError(
                f"{found} a batch of {largest:,} samples, but a batch sampler yields global"
                " batches, each to be divided among the processes, of at most"
                f" train.global_batch_size={self.largest} samples",
                f"use train.global_batch_size={largest} or more",
            )
        if epoch and len(drawn.numbers) != len(self):
            raise DataError(
                f"{found} {len(drawn.numbers):,} samples in epoch {epoch + 1}, but {len(self):,}"
                " in epoch 1",
                "give the same number of samples in each epoch, or train in a loop of your own"
                " (ddp_train.session)",
            )

    def _digest_of(self, drawn: Drawn) -> int:
        return digest_of(np.concatenate([drawn.numbers, drawn.cuts]))


def digest_of(numbers: np.ndarray) -> int:
    """A number below 2**48 that identifies an order."""
    content = hashlib.sha256(numbers.tobytes()).digest()
    return int.from_bytes(content[:DIGEST_BYTES], "little")
