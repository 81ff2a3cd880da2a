"""The status of every worker of a host, in memory that the workers share with their launcher.
Torch-free.

A worker publishes its step and phase by assigning to its `RankStatus`, which costs an assignment. A
thread of the worker counts beats, five a second: if the count stops, the process is stopped or some
code holds Python's lock (GIL).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ddp_train.distributed.environment import status_descriptor
from ddp_train.distributed.world import World
from ddp_train.linux import resident_bytes, wait_until

BEAT_SECONDS = 0.2
START_SECONDS = 120.0
"""The least hang timeout until a rank has done its first batch: torch is imported from a cold disk,
processes connect, models are compiled."""
UNREPORTED = 256
"""Stands for the exit code of a worker which did not announce its own; no process has it."""
EPOCH_END = "end of an epoch"
"""The phase of a session after the last batch of an epoch; a run has hooks there."""
END = "end"
"""The phase of a worker that has completed its work."""
PHASES = (
    "start",
    "data set",
    "build",
    "record",
    "evaluation data",
    "evaluation forward",
    "evaluation end",
    "hook",
    EPOCH_END,
    "checkpoint",
    "sample",
    "unfreeze",
    "profile",
    "data",
    "forward",
    "backward",
    "optimizer step",
    END,
)
"""In the order in which they follow a completed step: of ranks at the same step, the one in the
earliest phase is furthest behind."""
PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
KEPT_EXCHANGES = 64
"""More than a worker with a GPU, which does not wait for it, is ahead of another one."""


class StatusSnapshot(NamedTuple):
    """The status of a rank at one moment."""

    beats: int
    """0 until the worker has imported torch."""
    step: int
    batches: int
    phase: str
    samples_passed: int = 0

    @property
    def progress(self) -> tuple[int, int, int]:
        """The position of the rank, to be compared with others: greater is further ahead."""
        return min(self.beats, 1), self.step, PHASE_NUMBERS[self.phase]

    @property
    def has_started(self) -> bool:
        """Whether the rank has done its first batch; before that, START_SECONDS apply."""
        return self.batches > 1

    @property
    def where(self) -> str:
        """`forward of step 7`."""
        return f"{self.phase} of step {self.step}"


def _numbers(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    """Fields of a C structure."""
    return tuple((name, ctypes.c_int64) for name in names)


class RankStatus(ctypes.Structure):
    """Step and phase of a worker, as a C structure in shared memory."""

    _fields_ = (
        *_numbers("beats", "step", "batches", "resident_bytes", "saving", "phase_number"),
        *_numbers("_announced_code", "reported_code", "heeds_stop", "goes_on", "is_done"),
        *_numbers("is_examined", "has_saved", "samples_passed"),
        ("exchanges", ctypes.c_int64 * KEPT_EXCHANGES),
    )
    step: int
    batches: int
    """Batches fetched, in training and evaluation, so that a long evaluation counts as progress."""
    beats: int
    resident_bytes: int
    """Resident memory of the process at its last beat."""
    phase_number: int
    """The place of `phase` in PHASES."""
    saving: int
    """1 while a checkpoint is being written, in whatever phase the worker is."""
    reported_code: int
    """The exit code of the failure that the worker has reported to the user, whether that could be
    written to a file or not; 0 before."""
    heeds_stop: int
    """1 while a signal makes all ranks stop after the same step; before, it ends the process."""
    goes_on: int
    """1 once the launcher stops all ranks only to start another number of them; it sets it before
    it sends a signal."""
    is_done: int
    """1 once the run is over for this worker, and it runs the user's code that follows a
    session."""
    is_examined: int
    """1 once the launcher has found that the run hangs, and wants to know what this worker has
    called."""
    has_saved: int
    """1 once this worker has saved what was kept, since another host is lost."""
    samples_passed: int
    """Samples of streams that were read past, or counted, so that this counts as progress. A loader
    process adds to it too."""
    exchanges: ctypes.Array[ctypes.c_int64]
    """The last exchanges of a session that the worker has entered (sessions/exchange_watch.py)."""

    # Not shared with the launcher:
    place: tuple[int, int] | None = None
    """The descriptor of the board that it lies on, in this process, and the rank; None if it lies
    on none."""
    on_hang: Callable[[], None] | None = None
    """Called once, by the thread that beats, when the launcher has found a hang."""
    fetching: Sequence[Any] = ()
    """The micro-batches that loader processes are preparing, the next one first."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled by a process that was not forked, it lies in the same memory."""
        if self.place is None:
            return RankStatus, ()
        descriptor, rank = self.place
        return _status_in, (f"/proc/{os.getpid()}/fd/{descriptor}", rank)

    def __deepcopy__(self, memo: object) -> RankStatus:
        """A copy lies on no board."""
        return RankStatus()

    @property
    def phase(self) -> str:
        """One of PHASES."""
        return PHASES[self.phase_number]

    @phase.setter
    def phase(self, phase: str) -> None:
        self.phase_number = PHASE_NUMBERS[phase]

    def snapshot(self) -> StatusSnapshot:
        return StatusSnapshot(self.beats, self.step, self.batches, self.phase, self.samples_passed)

    def leaving(self, code: int) -> int:
        """Announce the exit code that this worker is about to exit with. Returns it."""
        self._announced_code = code + 1
        return code

    def believed(self, returncode: int | None) -> int | None:
        """The end of a worker: its exit code, or UNREPORTED if it did not announce that by
        `leaving`, since some code in it has called os._exit().

        returncode: as subprocess gives it.
        """
        if returncode is None or returncode < 0 or returncode + 1 == self._announced_code:
            return returncode
        return UNREPORTED

    def set_saving(self, saving: bool) -> None:
        """Publish whether a checkpoint is being written."""
        self.saving = int(saving)

    def wait_until_saved(
        self, seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until no checkpoint is being written, `seconds` at most or until `given_up()`.

        What is being written is a complete copy of an earlier state, valid whatever has failed
        since.
        """
        wait_until(lambda: not self.saving or given_up(), seconds)

    def beat(self) -> None:
        self.resident_bytes = resident_bytes()
        self.beats += 1

    def keep_beating(self) -> None:
        """Start the thread that beats until the process ends."""

        def run() -> None:
            while True:
                time.sleep(BEAT_SECONDS)
                self.beat()
                self.obey_launcher()

        self.beat()
        threading.Thread(target=run, name="heartbeat", daemon=True).start()

    def obey_launcher(self) -> None:
        if self.is_examined and self.on_hang:
            on_hang = self.on_hang
            self.on_hang = None
            with contextlib.suppress(OSError):  # a full disk: the diagnosis does without
                on_hang()


class StatusBoard:
    """The status of all ranks of a host.

    It is in an anonymous file (memfd), which exists as long as a process has it open.
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        size = ctypes.sizeof(RankStatus) * ranks
        statuses = (RankStatus * ranks).from_buffer(mmap.mmap(descriptor, size))
        # One object for each rank: an array makes a new one whenever it is asked, and `on_hang`
        # belongs to an object.
        self.ranks = list(statuses)
        for rank, status in enumerate(self.ranks):
            status.place = (descriptor, rank)

    @classmethod
    def create(cls, ranks: int) -> StatusBoard:
        """A new board, whose file descriptor the workers inherit."""
        descriptor = os.memfd_create("rank_status")
        os.ftruncate(descriptor, ctypes.sizeof(RankStatus) * ranks)
        return cls(descriptor, ranks)

    def close(self) -> None:
        os.close(self.descriptor)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A context that one process at a time is in. The kernel unlocks it if that process dies.

        A lock of the process (lockf): one of the open file (flock, see run_lock.py) would be shared
        by all processes, which inherit it.
        """
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def reported_code(self) -> int:
        """The exit code of the failure that a worker of this host has reported to the user; 0 if
        none has."""
        return next((status.reported_code for status in self.ranks if status.reported_code), 0)

    def wait_for_report(self, seconds: float) -> None:
        """Wait until `reported_code` is known, `seconds` at most."""
        wait_until(self.reported_code, seconds)

    def sizes(self) -> str:
        """Resident memory of each rank at its last beat: `rank 0 1.20 GiB, rank 1 3.40 GiB`."""
        return ", ".join(
            f"rank {rank} {status.resident_bytes / 2**30:.2f} GiB"
            for rank, status in enumerate(self.ranks)
        )


def _status_in(path: str, rank: int) -> RankStatus:
    """The status of a rank on a board that another process has open under this path.

    One that lies on no board if that process has ended, or may not be looked into.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return RankStatus()
    try:
        board = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return RankStatus.from_buffer(board, rank * ctypes.sizeof(RankStatus))


def status_on_board(world: World) -> tuple[StatusBoard | None, RankStatus]:
    """The board of our own launcher, None under torchrun, and the status of this process."""
    descriptor = status_descriptor()
    if descriptor is None:
        return None, RankStatus()
    board = StatusBoard(descriptor, world.local_size)
    return board, board.ranks[world.rank]
