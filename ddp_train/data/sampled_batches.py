"""Global batches by a sampler of the user's, which all processes draw alike."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_train.data.batch_plan import NUMBERS
from ddp_train.data.global_batches import Pass
from ddp_train.data.rng import InterruptedDraws, hash_key, number_of_digest
from ddp_train.distributed.process_group import same_everywhere
from ddp_train.errors import DataError
from ddp_train.plain_state import plain_state
from ddp_train.text import counted

PORTION = 1024
"""Batches that are drawn at once from a sampler without state, and compared between the processes
together: an endless sampler takes no more memory than these."""
KEPT = 1 << 18
"""Batches that are kept, for loader processes that have to be started again: more than they are
ever given ahead."""
PLACES = 1 << 22
"""Draws of a pass after which their places, which augmentation is keyed by, begin again."""
SAME_DRAWS = (
    "let it draw from torch's, numpy's or Python's global generators, which are seeded before each"
    " pass, or from a generator of its own with a fixed seed; it must give the numbers of all"
    " samples, which run.loader divides among the processes"
)
_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_WITHOUT_STATE = (SequentialSampler, list, tuple, range, torch.Tensor, np.ndarray)


class SampledBatches:
    """The batches of a batch sampler, each a list of sample numbers.

    Each process draws them all. What the sampler draws from torch's, numpy's and Python's global
    generators is keyed by seed and pass. A sampler that keeps something from pass to pass, a
    generator of its own for instance, is brought where it was by drawing again all that was drawn
    before; one with `state_dict` and `load_state_dict` is restored, and one with `set_epoch` is
    taken to follow from the epoch.

    One that keeps something is asked for each batch when that is needed, as torch's loader does: a
    loop that is left by `break` leaves it where it would be left without this package.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        samples: Sized,
        key: int,
        device: str,
        *,
        keyed_by_place: bool = True,
        loader_generator: torch.Generator | None = None,
    ) -> None:
        """Draw nothing yet.

        batch_sampler: iterable, a pass each time.
        samples: the data set.
        key: the key of its draws from the global generators.
        keyed_by_place: a sample that is drawn twice in a pass is augmented in two ways; else its
            draws, if any, are those of its number.
        loader_generator: that of a DataLoader, which draws a number from it before each pass.
        """
        self.batch_sampler = batch_sampler
        self.samples = samples
        self.key = key
        self.device = device
        self.keyed_by_place = keyed_by_place
        self.loader_generator = loader_generator
        self.name = type(innermost(batch_sampler)).__name__
        self.keeps_state = keeps_state(batch_sampler) or loader_generator is not None
        self.at_once = 1 if self.keeps_state else PORTION
        self.history: list[list[int]] = []
        """Epoch, repetition and drawn portions of each pass, of a sampler that keeps state."""
        self.state_at_start: dict[str, Any] | None = None
        """The sampler's own state where the current pass began, if it has one."""
        self.digest = 0
        """The digest of the first portion of the current pass."""
        self.kept: list[list[np.ndarray]] = []
        """The portions of the current pass from the first one on, up to KEPT batches."""
        self.portions: Iterator[list[np.ndarray]] = iter(())

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Call the sampler's `set_epoch`, if it has one."""
        for sampler in layers(self.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
                return

    def begin(self, begun: Pass) -> None:
        """Draw the first portion. Raises PeerError if the processes draw different ones."""
        holder = self._state_holder()
        if holder:
            self.state_at_start = _state_of(holder)
        if self.keeps_state and not holder:
            self.history.append([begun.epoch, begun.repetition, 0])
        self.portions = self.draw(begun)
        first = next(self.portions, [])
        self.kept = [first]
        self.digest = digest_of(first)
        self._compare(self.digest)
        self.portions = self._compared(self.portions)

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """See GlobalBatches. Raises DataError for anything but numbers of samples."""
        place = 0
        number = 0
        for portion in self._portions_of_pass():
            for numbers in portion:
                if number >= first:
                    yield self._with_places(numbers, place)
                place += len(numbers)
                number += 1

    def _portions_of_pass(self) -> Iterator[list[np.ndarray]]:
        yield from list(self.kept)
        for portion in self.portions:
            if len(self.kept) * self.at_once < KEPT:
                self.kept.append(portion)
            yield portion

    def _compared(self, portions: Iterator[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
        """The portions of a pass, whose batches the processes compare, PORTION at a time."""
        unseen: list[np.ndarray] = []
        for portion in portions:
            unseen += portion
            if len(unseen) >= PORTION:
                self._compare(digest_of(unseen))
                unseen = []
            yield portion
        self._compare(digest_of(unseen))

    def pass_facts(self) -> dict[str, Any]:
        return {"drawn": self.digest}

    def state(self, in_pass: bool) -> dict[str, Any]:
        """The state from which a resumed run draws the same.

        in_pass: whether it is saved inside of the current pass.
        """
        history = [list(entry) for entry in self.history]
        state: dict[str, Any] = {"history": history}
        holder = self._state_holder()
        if holder:
            state["sampler"] = _state_of(holder)
            if in_pass:
                state["sampler_at_start"] = self.state_at_start
        return state

    def restore(self, state: dict[str, Any], in_pass: bool) -> None:
        """Bring the sampler where it was.

        in_pass: before the pass inside of which it was saved, which is drawn again.
        """
        holder = self._state_holder()
        saved = state.get("sampler_at_start" if in_pass else "sampler")
        if holder and saved is not None:
            holder.load_state_dict(saved)
            return
        history = [list(entry) for entry in state["history"]]
        if in_pass and history:
            history.pop()
        for epoch, repetition, portions in history:
            for _ in islice(self.draw(Pass(epoch, repetition), is_noted=False), portions):
                pass
        self.history = history

    def draw(self, begun: Pass, is_noted: bool = True) -> Iterator[list[np.ndarray]]:
        """The batches of a pass, a portion at a time."""
        draws = InterruptedDraws(hash_key(self.key, "sampler", begun.key))
        drawing = draws.drawing
        if draws_from_its_own(self.batch_sampler):
            drawing = contextlib.nullcontext
        with drawing():
            batches = iter(self.batch_sampler)
            if self.loader_generator is not None:
                # As torch's loader does, whose sampler often draws from the same generator.
                torch.empty((), dtype=torch.int64).random_(generator=self.loader_generator)
        while True:
            with drawing():
                portion = [self._numbers(batch) for batch in islice(batches, self.at_once)]
            if is_noted and self.history:
                self.history[-1][-1] += 1
            if not portion:
                return
            self._check_range(portion)
            yield portion

    def _numbers(self, batch: Any) -> np.ndarray:
        """The sample numbers of a batch, int64 [n]. Raises DataError for anything else."""
        try:
            numbers = np.fromiter(map(operator.index, batch), np.int64)
        except TypeError:
            raise DataError(
                f"{self.name} gave {str(batch)[:80]}, which are not numbers of samples",
                "let a batch_sampler give lists of whole numbers, and a sampler whole numbers;"
                " let the data set give whatever else a sample needs",
            ) from None
        if not len(numbers):
            raise DataError(f"{self.name} gave a batch without samples", "leave empty batches out")
        return numbers

    def _check_range(self, portion: list[np.ndarray]) -> None:
        """Raise DataError for a number that no sample has."""
        count = len(self.samples)
        lowest = min(int(numbers.min()) for numbers in portion)
        highest = max(int(numbers.max()) for numbers in portion)
        for number in (lowest, highest):
            if not 0 <= number < count:
                raise DataError(
                    f"{self.name} gave the number {number}, but the data set has"
                    f" {counted(count, 'sample')}",
                    f"give numbers from 0 to {count - 1}",
                )

    def _with_places(self, numbers: np.ndarray, place: int) -> np.ndarray:
        if not self.keyed_by_place:
            return numbers
        places = np.arange(place, place + len(numbers)) % PLACES
        return numbers + places * NUMBERS

    def _compare(self, digest: int) -> None:
        what = f"run.loader: the numbers that {self.name} gives"
        same_everywhere(digest, self.device, what, SAME_DRAWS)

    def _state_holder(self) -> Any:
        """The sampler with a state of its own; None if there is none."""
        for sampler in layers(self.batch_sampler):
            if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
                return sampler
        return None


def layers(batch_sampler: Any) -> list[Any]:
    """A batch sampler, and the sampler in it, if there is one."""
    inner = getattr(batch_sampler, "sampler", None)
    if inner is None:
        return [batch_sampler]
    return [batch_sampler, inner]


def innermost(batch_sampler: Any) -> Any:
    """The sampler that the user gave: torch's BatchSampler is made around one."""
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler
    return batch_sampler


def draws_from_its_own(batch_sampler: Any) -> bool:
    """True for a sampler of torch's with a generator: it leaves the global ones alone."""
    sampler = innermost(batch_sampler)
    return type(sampler) in _WITH_GENERATOR and sampler.generator is not None


def keeps_state(batch_sampler: Any) -> bool:
    """True if a sampler may draw otherwise in its second pass, by what it keeps."""
    sampler = innermost(batch_sampler)
    if any(hasattr(layer, "set_epoch") for layer in layers(batch_sampler)):
        return False
    if type(sampler) in _WITH_GENERATOR:
        return draws_from_its_own(batch_sampler)
    return type(sampler) not in _WITHOUT_STATE


def digest_of(portion: list[np.ndarray]) -> int:
    """A number that identifies batches, below 2**61."""
    content = hashlib.sha256()
    for numbers in portion:
        content.update(len(numbers).to_bytes(8, "little"))
        content.update(numbers.tobytes())
    return number_of_digest(content.digest())


def _state_of(sampler: Any) -> Any:
    """The state of a sampler. Raises StateError if it is no plain data."""
    return plain_state(sampler.state_dict(), "the state_dict of a sampler")
