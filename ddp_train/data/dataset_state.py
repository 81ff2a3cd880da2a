"""The state of a data set of the user's own: its epoch, and changes while it is read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.errors import DataError
from ddp_train.text import counted

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MUTABLE = (list, dict, set, bytearray)
ATTRIBUTES_PER_CHECK = 16
"""Attributes that are compared for one batch: a ConcatDataset of 1,000 parts with one each, which
takes 5 ms, is compared for every 63rd batch."""
TRIAL_SECONDS = 1.0
"""The longest time for which lengths of later epochs are tried before a run."""


class Reads:
    """The reads of any data set of the user's in this process, which may change its attributes."""

    def __init__(self) -> None:
        self.count = 0


READS = Reads()


class Epochs:
    """The epoch for which a data set is read, which is told to its `set_epoch(epoch)`, if any.

    Each sample is read with its epoch, by whatever process and however far ahead, so that no speed
    setting changes what a data set sees. Samples that are scored are read as those of epoch 0: they
    are the same in each evaluation.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        """Tell nothing yet. seed: of what the data set draws when it is told."""
        self.dataset = dataset
        self.seed = seed
        self.samples = len(dataset)
        self.current: int | None = None
        self.listeners = list(told_of_epochs(dataset))

    def enter(self, epoch: int | None) -> None:
        """Tell the epoch unless it is the current one; None: that of scored samples.

        Raises DataError if the data set has another length in it.
        """
        READS.count += 1
        wanted = epoch or 0
        if wanted == self.current:
            return
        with keyed_generators() as seed_generators:
            seed_generators(hash_key(self.seed, "set_epoch", wanted))
            for set_epoch in self.listeners:
                set_epoch(wanted)
        self.current = wanted
        if len(self.dataset) != self.samples:
            raise DataError(
                f"data._target_: {type(self.dataset).__name__} had"
                f" {counted(self.samples, 'sample')} when the run began, but has"
                f" {len(self.dataset):,} in epoch {wanted}",
                "return the same len() in every epoch; set_epoch(epoch) may change the samples"
                " themselves. For epochs of different lengths write a loop of your own"
                " (ddp_train.session)",
            )

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context around reads after which the data set is put back as it was before them."""
        if self.current is None:
            self.enter(None)  # once, and not again in each such context
        current = self.current
        try:
            yield
        finally:
            self.current = current

    def check_lengths(self, epochs: int) -> None:
        """Try the lengths of the epochs of a run, those that come within TRIAL_SECONDS.

        Raises DataError, see `enter`.
        """
        if not self.listeners:
            return
        end = time.monotonic() + TRIAL_SECONDS
        for epoch in range(epochs):
            self.enter(epoch)
            if time.monotonic() > end:
                break
        self.enter(None)


class AttributeWatch:
    """The attributes of a data set at the moment when others copied it, to be compared.

    Loader processes, and the device, read such a copy: what is changed later in the original has no
    effect on it. Numbers that are changed inside of an array of numpy are not seen.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.reads = READS.count
        self.before = _attributes(dataset)
        self.interval = 1 + len(self.before) // ATTRIBUTES_PER_CHECK
        """Checks to one comparison."""
        self.checks = 0

    def changed(self) -> str:
        """The name of an attribute that is another one now; "" if there is none.

        What this process has read since may have opened a file, or counted: that is no change.
        """
        now = _attributes(self.dataset)
        if self.reads != READS.count:
            self.reads = READS.count
            self.before = now
            return ""
        for name, (value, size) in now.items():
            value_before, size_before = self.before.get(name, (self, None))
            is_same = value is value_before or (isinstance(value, PLAIN) and value == value_before)
            if not is_same or size != size_before:
                return name
        return next((name for name in self.before if name not in now), "")

    def check(self, is_last: bool = True) -> None:
        """Raise DataError if an attribute has changed.

        is_last: no check follows; else many attributes are compared in some of the checks alone.
        """
        self.checks += 1
        if self.checks % self.interval and not is_last:
            return
        name = self.changed()
        if name:
            raise DataError(
                f"data._target_: `{name}` of {type(self.dataset).__name__} was changed, but"
                " samples are read from copies that keep the old value",
                "change it in a method set_epoch(epoch) of the class, which is called before the"
                " samples of an epoch are read, or use tuning.num_workers=0",
            )


def told_of_epochs(dataset: Any) -> Iterator[Callable[[int], Any]]:
    """The methods set_epoch of a data set, or of those that it consists of."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        yield set_epoch
        return
    for part in _parts(dataset):
        yield from told_of_epochs(part)


def _parts(dataset: Any) -> list[Any]:
    """The data sets that torch's Subset or ConcatDataset, or what is built alike, consists of."""
    attributes = getattr(dataset, "__dict__", {})
    parts = [attributes.get("dataset")]
    if isinstance(attributes.get("datasets"), list | tuple):
        parts += attributes["datasets"]
    return [part for part in parts if isinstance(part, Dataset)]


def _attributes(dataset: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The attributes of a data set and of its parts, with what tells that one was changed."""
    found = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        found[prefix + name] = (value, _size(value))
    for number, part in enumerate(_parts(dataset)):
        found |= _attributes(part, f"{prefix}dataset[{number}].")
    return found


def _size(value: Any) -> Any:
    """The size of a list, or the version of a tensor: it differs after a change in place."""
    if isinstance(value, MUTABLE):
        return len(value)
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value):
        return tuple(part._version for part in value)
    return None
