"""Where every worker of a host is, in memory that they share with their launcher. Torch-free.

A worker says where it is by assigning to its `RankStatus`, at the price of an assignment; a thread of it shows five
times a second that it lives. A thread that falls silent tells something too: its process is stopped, or some code keeps
Python's lock.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp_train.linux import resident_bytes

BEAT_SECONDS = 0.2
SAVED_POLL_SECONDS = 0.02
START_SECONDS = 120.0
"""Where launch.timeout_seconds is less, this holds until the first batch is done: torch is imported from a cold disk,
processes find each other, models are compiled."""
END = "end"
"""The phase of a worker that has done all its work."""
PHASES = (
    *("start", "data set", "build", "record", "evaluation data", "evaluation forward", "evaluation end"),
    *("checkpoint", "data", "forward", "backward", "optimizer step", END),
)
"""In the order in which they come once a step is done: at the same step, the rank in the earliest phase keeps the
others waiting."""
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


class StatusSnapshot(NamedTuple):
    """Where a rank was at one moment."""

    beats: int
    """0 before it has started Python and torch."""
    step: int
    batches: int
    phase: str

    @property
    def progress(self) -> tuple[int, int, int]:
        """Increases as a rank advances."""
        return min(self.beats, 1), self.step, _NUMBERS[self.phase]

    @property
    def where(self) -> str:
        return f"{self.phase} of step {self.step}"


class RankStatus(ctypes.Structure):
    """Where a process is. Those who wait or work say so, the loop does not. `phase` is one of PHASES."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("beats", "step", "batches", "resident_bytes", "saving", "_phase")
    )
    step: int
    batches: int
    """That were fetched, in training and evaluation: a long evaluation moves on too."""
    beats: int
    resident_bytes: int
    """The memory of the process at its last beat."""
    saving: int
    """1 while a checkpoint is being written, beside whatever the phase says."""
    fetching: Sequence[Any] = ()
    """The shares that loader processes are working on, the next one first. Not shared with the launcher."""

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = _NUMBERS[phase]

    def snapshot(self) -> StatusSnapshot:
        return StatusSnapshot(self.beats, self.step, self.batches, self.phase)

    def set_saving(self, saving: bool) -> None:
        """Says whether a checkpoint is being written."""
        self.saving = int(saving)

    def wait_until_saved(self, seconds: float, given_up: Callable[[], bool] = lambda: False) -> None:
        """A checkpoint that is being written is a copy, whole whatever happened since: lets it come to its end."""
        deadline = time.monotonic() + seconds
        while self.saving and time.monotonic() < deadline and not given_up():
            time.sleep(SAVED_POLL_SECONDS)

    def beat(self) -> None:
        self.resident_bytes = resident_bytes()
        self.beats += 1

    def keep_beating(self) -> None:
        """From now on, in a thread."""

        def go_on() -> None:
            pause = threading.Event()  # never set
            while not pause.wait(BEAT_SECONDS):
                self.beat()

        self.beat()
        threading.Thread(target=go_on, name="heartbeat", daemon=True).start()


class StatusBoard:
    """The positions of all ranks of a host, in a file without a name that lives as long as somebody has it open."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        self.ranks = (RankStatus * ranks).from_buffer(mmap.mmap(descriptor, ctypes.sizeof(RankStatus) * ranks))

    @classmethod
    def create(cls, ranks: int) -> StatusBoard:
        """A new one, whose file descriptor workers inherit."""
        descriptor = os.memfd_create("board")
        os.ftruncate(descriptor, ctypes.sizeof(RankStatus) * ranks)
        return cls(descriptor, ranks)

    def close(self) -> None:
        os.close(self.descriptor)

    def sizes(self) -> str:
        """`rank 0 1.20 GiB, rank 1 3.40 GiB`: what they hold, or held last."""
        return ", ".join(f"rank {rank} {at.resident_bytes / 2**30:.2f} GiB" for rank, at in enumerate(self.ranks))


def stack_file(run_dir: Path, rank: int) -> Path:
    """Where a rank's stacks go: on SIGUSR2, and when it is ended by a fault (SIGSEGV, SIGABRT ...)."""
    return run_dir / "logs" / f"rank_{rank}.stack"


def show_stacks(run_dir: Path, rank: int) -> None:
    """Python's stacks of all threads, written by C code that needs neither Python's lock nor a free main thread."""
    file = stack_file(run_dir, rank).open("w")  # faulthandler keeps it open
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file)


def remove_empty_stacks(run_dir: Path, rank: int) -> None:
    """At the end of a run in which nobody asked."""
    file = stack_file(run_dir, rank)
    if file.exists() and file.stat().st_size == 0:
        file.unlink()
