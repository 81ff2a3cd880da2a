"""Memory of a host in which the state of a run outlives its processes. Torch-free.

An anonymous file (memfd) that the launcher holds open, and that workers inherit. Each rank of the
host writes into places of its own. A place has a mark that is written last: what a killed process
has half written does not count. A place is larger than any state. Only what is written takes
memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum

from ddp_train.distributed.environment import kept_descriptor

PLACE_BYTES = 2**40
TEXT_BEGINS = mmap.PAGESIZE
"""Where the text of a place begins, behind its head."""
ROOM_BEGINS = PLACE_BYTES // 2
"""Where the room beside the text begins: it lies still, however long the text becomes."""


class Place(IntEnum):
    """The places of a rank."""

    FACTS = 0
    """What does not change in an attempt."""
    FIRST_STATE = 1
    FIRST_BESIDE = 2
    FIRST_BEFORE = 3
    FIRST_AFTER = 4
    SECOND_STATE = 5
    SECOND_BESIDE = 6
    SECOND_BEFORE = 7
    SECOND_AFTER = 8


@dataclass(frozen=True)
class StepPlaces:
    """The places of one step of a rank."""

    state: Place
    """Weights, moments, buffers and losses."""
    beside: Place
    """What changes with each step beside them: the numbers that the user's code has logged and no
    line has yet; of a session all that is no tensor."""
    before: Place
    """The states of hooks before they acted after this step."""
    after: Place
    """Those after they acted."""


TURNS = (
    StepPlaces(Place.FIRST_STATE, Place.FIRST_BESIDE, Place.FIRST_BEFORE, Place.FIRST_AFTER),
    StepPlaces(Place.SECOND_STATE, Place.SECOND_BESIDE, Place.SECOND_BEFORE, Place.SECOND_AFTER),
)
"""Steps are kept in turns: one is whole while the other one is written."""


def state_mark(step: int, is_later: bool) -> int:
    """The mark of a state: ranks have the same one only if it is of the same step, and of the same
    moment after it.

    is_later: hooks have changed it since; in a session its epoch has ended.
    """
    return 2 * step + is_later


def marked_step(mark: int) -> int:
    """The step of a state."""
    return mark // 2


class Record:
    """One place of one rank: a mark, a text of bytes, and room for tensors."""

    NUMBERS = 4
    mark_format = struct.Struct("=q")
    length_format = struct.Struct("=q")
    numbers_format = struct.Struct(f"={NUMBERS}d")
    LENGTH_BEGINS = mark_format.size
    NUMBERS_BEGIN = LENGTH_BEGINS + length_format.size

    def __init__(self, descriptor: int, begin: int) -> None:
        self.descriptor = descriptor
        self.begin = begin
        self.memory = mmap.mmap(descriptor, TEXT_BEGINS, offset=begin)
        self.mapped: mmap.mmap | None = None
        """The text that was written last; its mapping takes longer than most texts."""

    @property
    def mark(self) -> int | None:
        """The number under which the content was completed; None if it is not whole."""
        (mark,) = self.mark_format.unpack_from(self.memory)
        return mark - 1 if mark else None  # memory that was never written is zero

    def open(self) -> None:
        """Take the mark away, before the content changes."""
        self.mark_format.pack_into(self.memory, 0, 0)

    def complete(self, mark: int) -> None:
        """Set the mark, after the content has changed."""
        self.mark_format.pack_into(self.memory, 0, mark + 1)

    @property
    def numbers(self) -> tuple[float, ...]:
        """NUMBERS numbers beside the text."""
        return self.numbers_format.unpack_from(self.memory, self.NUMBERS_BEGIN)

    def set_numbers(self, *numbers: float) -> None:
        """Set the first numbers; the others become zero."""
        zeros = (0.0,) * (self.NUMBERS - len(numbers))
        self.numbers_format.pack_into(self.memory, self.NUMBERS_BEGIN, *numbers, *zeros)

    @property
    def text_bytes(self) -> int:
        (length,) = self.length_format.unpack_from(self.memory, self.LENGTH_BEGINS)
        return length

    @property
    def text(self) -> bytes:
        length = self.text_bytes
        return self._mapped_text(length)[:length] if length else b""

    @text.setter
    def text(self, text: bytes) -> None:
        if text:
            if self.mapped is None or len(self.mapped) < len(text):
                self.mapped = self._mapped_text(len(text))
            self.mapped[: len(text)] = text
        self.length_format.pack_into(self.memory, self.LENGTH_BEGINS, len(text))

    def _mapped_text(self, size: int) -> mmap.mmap:
        """The first `size` bytes behind the head."""
        return mmap.mmap(self.descriptor, size, offset=self.begin + TEXT_BEGINS)

    def room(self, size: int) -> mmap.mmap:
        """The first `size` bytes of the room beside the text."""
        return mmap.mmap(self.descriptor, size, offset=self.begin + ROOM_BEGINS)


class KeptMemory:
    """The memory of all ranks of a host."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls, ranks: int) -> KeptMemory | None:
        """New memory; None where the size of files is limited (ulimit -f).

        ranks: the most that the host may ever have.
        """
        descriptor = os.memfd_create("kept_state")
        try:
            os.ftruncate(descriptor, ranks * len(Place) * PLACE_BYTES)
        except OSError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    @classmethod
    def inherited(cls) -> KeptMemory | None:
        """The memory that the launcher hands on to this process; None without. Call it once."""
        descriptor = kept_descriptor()
        return None if descriptor is None else cls(descriptor)

    def record(self, rank: int, place: Place) -> Record:
        """A place of a rank. rank: its number on this host."""
        return Record(self.descriptor, (rank * len(Place) + place) * PLACE_BYTES)

    @property
    def ranks(self) -> int:
        """The number of processes that the run last had on this host; 0 if rank 0 of the host has
        not yet kept anything."""
        facts = self.record(0, Place.FACTS)
        return 0 if facts.mark is None else int(facts.numbers[1])

    def newest_state(self, ranks: int) -> int | None:
        """The mark of the last state that all ranks have kept, see `state_mark`; None if there is
        none.

        All ranks keep the same steps, and no rank is more than one kept step behind another.

        ranks: the number of processes of this host.
        """
        kept_by_all: set[int | None] | None = None
        for rank in range(ranks):
            kept = {self.record(rank, places.state).mark for places in TURNS}
            kept_by_all = kept if kept_by_all is None else kept_by_all & kept
        return max((mark for mark in kept_by_all or () if mark is not None), default=None)

    def newest_step(self, ranks: int) -> int | None:
        """The step of the last state that all ranks have kept; None if there is none.

        ranks: the number of processes of this host.
        """
        mark = self.newest_state(ranks)
        return None if mark is None else marked_step(mark)

    def forget(self) -> None:
        """Take all marks away. No rank may be alive."""
        for rank in range(self.ranks):
            for place in Place:
                self.record(rank, place).open()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
