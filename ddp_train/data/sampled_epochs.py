"""Epochs by a sampler of the user's, which all processes draw alike. docs/guides/batches.md"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sized
from typing import Any

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
DIGEST_BYTES = 6
"""A float64, as which digests travel between processes, holds whole numbers of 53 bits."""


class SampledEpochs:
    """The numbers of the samples in each epoch, by a sampler.

    A sampler that keeps something from epoch to epoch, a generator of its own for instance, draws
    the epochs before the one that is asked for too.
    """

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
        self.kept: dict[int, np.ndarray] = {}
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
                        f"data.sampler: {self.name} draws other numbers each time that it is made,"
                        " and no resumed run would have its order; let it draw from torch's,"
                        " numpy's or Python's global generators, or from one with a fixed seed"
                    ]
                )

    def __len__(self) -> int:
        """Numbers of an epoch."""
        return self.length

    def epoch(self, epoch: int) -> np.ndarray:
        """The numbers of the samples of an epoch, in their order, int64 [n].

        Raises DataError if they are not as many as the sampler tells, or no numbers of samples.
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

    def _draw(self, epoch: int) -> np.ndarray:
        self.batches.set_epoch(epoch)
        portions = self.batches.draw(Pass(epoch))
        batches = [numbers for portion in portions for numbers in portion]
        numbers = np.concatenate([np.empty(0, np.int64), *batches])
        if len(numbers) != self.length:
            raise DataError(
                f"data.sampler: {self.name} gave {counted(len(numbers), 'number')} in epoch"
                f" {epoch + 1}, and its __len__ told {self.length:,}, by which steps are planned",
                "let both be the same in each epoch, or train in a loop of your own"
                " (ddp_train.session)",
            )
        self.next = epoch + 1
        self.digests[epoch] = digest_of(numbers)
        self.kept[epoch] = numbers
        while len(self.kept) > KEPT + 1:
            del self.kept[min(filter(None, self.kept))]
        return numbers

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
        sampler = BatchSampler(self.make(), AT_ONCE, drop_last=False)
        return SampledBatches(sampler, self.samples, self.key, "cpu")

    def _told_length(self) -> int:
        sampler = self.batches.batch_sampler.sampler  # type: ignore[attr-defined]
        try:
            length = len(sampler)
        except (TypeError, NotImplementedError):
            length = 0
        if length:
            return length
        rule = "has no __len__, by which steps are planned, or it is 0"
        remedy = "add one, or train in a loop of your own (ddp_train.session)"
        raise ConfigError([f"data.sampler: {self.name} {rule}; {remedy}"])


def digest_of(numbers: np.ndarray) -> int:
    """A number below 2**48 that identifies an order."""
    content = hashlib.sha256(numbers.tobytes()).digest()
    return int.from_bytes(content[:DIGEST_BYTES], "little")
