"""The beginning and the end of loader processes that are forked."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from ddp_train.linux import end_loader_with_parent, remove_shared_memory, wait_until
from ddp_train.resilience.preemption import ignore_signals
from ddp_train.text import counted

START_SECONDS = 10.0
"""Seconds from the fork of a loader process to its first line of Python: 0.05 are usual."""
START_TRIES = 3
log = logging.getLogger(__name__)


class LoaderProcesses:
    """Starts the processes of one DataLoader, again if one of them never wakes up.

    fork() copies the locks that other threads hold at that moment, and whoever needs one in the
    child waits for ever. Before 3.11.10 Python itself does: for the lock of its list of threads,
    which a thread of C++ holds while it enters Python (cpython#112275;
    docs/inside/benchmarks/fuzz.md).
    """

    def __init__(self, count: int, init: Callable[[int], Any] | None = None) -> None:
        """init: the user's own, called with the number of each process."""
        self.count = count
        self.init = init
        self.awake: mmap.mmap | None = None
        """A byte for each process, 1 if it runs Python. None where processes are not forked, since
        it cannot be sent to one."""

    def enter(self, worker: int) -> None:
        """Runs first in each process. worker: its number."""
        end_loader_with_parent(worker)
        ignore_signals()
        if self.awake is not None:
            self.awake[worker] = 1
        if self.init is not None:
            self.init(worker)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of a DataLoader from the first one on.

        If a process does not wake up within START_SECONDS, all are started again: they have no
        state, and no batch was taken.
        """
        if self.awake is None and start_method() == "fork":
            self.awake = mmap.mmap(-1, self.count)
        if self.awake is None:
            return iter(loader)
        awake = self.awake
        for _ in range(START_TRIES):
            if loader._iterator is None:  # else it is persistent, and its processes live
                awake[:] = bytes(self.count)
            batches = iter(loader)
            if wait_until(lambda: all(awake[:]), START_SECONDS, 0.001):
                return batches
            log.warning(
                "%s did not start within %g s; restarting all of them (Python before 3.11.10 may"
                " hang after a fork: cpython#112275)",
                counted(awake[:].count(0), "loader process"),
                START_SECONDS,
            )
            _kill(batches)
            loader._iterator = None
        return iter(loader)

    def release(self, loader: DataLoader[Any]) -> None:
        """Ends the processes of a DataLoader that keeps them for a next pass."""
        loader._iterator = None


def start_method() -> str:
    """The start method of multiprocessing, which asking for it does not fix."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _kill(batches: Any) -> None:
    """Kills the processes of torch's iterator over batches.

    By SIGKILL: a process that stands still in fork() has the signal handlers of its rank, and would
    write SIGTERM, which torch sends, to that rank's pipe of stop requests.
    """
    # Else torch raises wherever the main thread is.
    signal_handling._remove_worker_pids(id(batches))  # pyright: ignore[reportPrivateImportUsage]
    batches._worker_pids_set = False
    # Set before: a process that dies while it looks at the event keeps its lock.
    batches._workers_done_event.set()
    for worker in batches._workers:
        worker.kill()
        worker.join(START_SECONDS)
        remove_shared_memory(worker.pid)
    batches._shutdown_workers()
