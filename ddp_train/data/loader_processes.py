"""The beginning and the end of loader processes that are forked."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data._utils import signal_handling

from ddp_train.linux import end_loader_with_parent, remove_shared_memory, wait_until
from ddp_train.resilience.preemption import ignore_signals
from ddp_train.text import counted

BEGIN_SECONDS = 10.0
"""From the fork of a loader process to its first line of Python: 0.05 s are usual."""
BEGIN_TRIES = 3
log = logging.getLogger(__name__)


class LoaderProcesses:
    """Those of one DataLoader.

    fork() copies the locks that other threads hold at that moment, and whoever needs one in the
    child waits for ever. Before 3.11.10 Python itself does: for the lock of its list of threads,
    which a thread of C++ holds while it enters Python (cpython#112275; docs/benchmarks/fuzz.md).
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun: mmap.mmap | None = None
        """Which of them run Python, a byte for each; None where they are not forked: it cannot be
        sent to a process."""

    def enter(self, worker: int) -> None:
        """Called first in each of them."""
        end_loader_with_parent(worker)
        ignore_signals()
        if self.begun is not None:
            self.begun[worker] = 1

    def first(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a DataLoader from the first one on. If a process has not come to life
        within BEGIN_SECONDS, all are started anew: they have no state, and no batch was taken."""
        method = (
            multiprocessing.get_start_method(allow_none=True)
            or multiprocessing.get_all_start_methods()[0]
        )
        if self.begun is None and self.count and method == "fork":
            self.begun = mmap.mmap(-1, self.count)
        for _ in range(BEGIN_TRIES if self.begun else 0):
            assert self.begun is not None
            if (
                getattr(loader, "_iterator", None) is None
            ):  # else it is persistent, and its processes live
                self.begun[:] = bytes(len(self.begun))
            batches = iter(loader)
            if self._have_begun(self.begun):
                return batches
            log.warning(
                "%s did not come to life within %g s of a fork: all are started anew (Python before"
                " 3.11.10 may hang there: cpython#112275)",
                counted(self.begun[:].count(0), "loader process"),
                BEGIN_SECONDS,
            )
            _kill(batches)
            vars(loader)["_iterator"] = None
        return iter(loader)

    def _have_begun(self, begun: mmap.mmap) -> bool:
        return wait_until(lambda: all(begun[:]), BEGIN_SECONDS, 0.001)


def _kill(batches: Any) -> None:
    """batches: torch's iterator over those of its processes. By SIGKILL: a process that stands
    still in fork() has the signal handlers of its rank, and would write SIGTERM, which torch sends,
    to that rank's pipe of stop requests."""
    # Else torch raises wherever the main thread is.
    signal_handling._remove_worker_pids(id(batches))  # pyright: ignore[reportPrivateImportUsage]
    batches._worker_pids_set = False
    # before: a process that dies while it looks at it keeps its lock
    batches._workers_done_event.set()
    for worker in batches._workers:
        worker.kill()
        worker.join(BEGIN_SECONDS)
        remove_shared_memory(worker.pid)
    batches._shutdown_workers()
