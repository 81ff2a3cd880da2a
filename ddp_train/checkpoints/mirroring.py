"""Copies the checkpoints of a run to its mirror while training continues."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import places, step_of
from ddp_train.checkpoints.mirror import Mirror, NotOwnedError, owner_of
from ddp_train.resilience.preemption import StopController

log = logging.getLogger(__name__)


class CopyState(StrEnum):
    """State of the copy of the newest checkpoint."""

    COPYING = "copying"
    COPIED = "copied"
    FAILED = "failed"
    LEFT = "left"
    """Left to the next start: after a stop, or before others take over."""


class Mirroring:
    """Copies checkpoints in a thread: the newest one whenever the one before is done. For one
    process only, rank 0."""

    def __init__(self, mirror: Mirror, run_dir: Path) -> None:
        """Checkpoints in `run_dir` that the mirror lacks are copied at once: an earlier process was
        ended before it could."""
        self.mirror = mirror
        self.run_dir = run_dir
        self.owner = owner_of(run_dir)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self.newest = next(iter(places(run_dir)), None)
        self.not_copied: set[Path] = set()
        """Checkpoints that were written and not yet copied."""
        self.error: Exception | None = None
        self.last: Future[Any] | None = None
        if self.newest:
            self.last = self.pool.submit(self._copy)
        self.stopped_at: float | None = None

    def submit(self, path: Path) -> None:
        """Copy a checkpoint that is written and verified. Does not wait."""
        self.newest = path
        self.not_copied.add(path)
        self.last = self.pool.submit(self._copy)

    def state(
        self, stop: StopController, patience_seconds: float, timeout_seconds: float
    ) -> CopyState:
        """The state of the last copy, looked at again and again at the end of a run.

        patience_seconds: the longest wait after a stop.
        timeout_seconds: a copy that does not move for so long has failed.
        """
        if self.last is None or self.last.done():
            return CopyState.FAILED if self.error else CopyState.COPIED
        now = time.monotonic()
        if stop.requested.is_set():
            if self.stopped_at is None:
                self.stopped_at = now
            if stop.goes_on or now - self.stopped_at > patience_seconds:
                return CopyState.LEFT
            return CopyState.COPYING
        if now - self.mirror.moved_at > timeout_seconds:
            self.error = TimeoutError(
                f"no data was copied for {timeout_seconds:g} s (launch.timeout_seconds)"
            )
            return CopyState.FAILED
        return CopyState.COPYING

    def _copy(self) -> None:
        newest = self.newest
        self.mirror.note_progress()
        try:
            self._copy_all()
            self.error = None
        except Exception as error:  # noqa: BLE001  the end of the run raises it if no later one succeeds
            if newest != self.newest:  # it is superseded, and was removed meanwhile
                return
            self.error = error
            prospect = "; copying is tried again with the next checkpoint"
            if isinstance(error, NotOwnedError):
                prospect = ""
            log.warning(
                "%s cannot be copied to checkpoint.mirror=%s: %s%s",
                newest,
                self.mirror.url,
                error,
                prospect,
            )

    def _copy_all(self) -> None:
        before = {*self.not_copied}
        kept = {step_of(path): path for path in places(self.run_dir)}
        self.mirror.check_owner(self.owner)
        steps_there = {*self.mirror.steps()}
        # An older one too: if the store is slow it was passed over, and may be the best.
        for step in sorted(kept, reverse=True):
            path = kept[step]
            if path in self.not_copied or step not in steps_there:
                self.mirror.push(path)
                self.not_copied.discard(path)
        self.mirror.remove_all_but({*kept})
        # Those that are removed need no copy. Not what is written meanwhile.
        self.not_copied -= before - {*kept.values()}
