"""All trackers of a run, on rank 0.

Each has a thread and a queue, see `delivery`: training waits for none.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_train.distributed.environment import set_default_variables
from ddp_train.telemetry.trackers.delivery import DeliveryLog, Line, TrackerThread
from ddp_train.telemetry.trackers.scalars import plain_values
from ddp_train.telemetry.trackers.tracker import TrackedRun, Tracker

FINISH_SECONDS = 30.0
"""Longest wait for the trackers of a completed run."""
STOPPED_SHARE = 0.25
"""Part of the grace in which a run that was stopped waits for them."""
FAILED_SECONDS = 2.0
"""Longest wait of a run that failed, and has not reported that yet."""
log = logging.getLogger(__name__)


class Tracking:
    """The trackers of a run; there may be none."""

    def __init__(
        self, trackers: Mapping[str, Tracker], grace_seconds: float, timeout_seconds: float
    ) -> None:
        """Take the trackers, and open none.

        trackers: by their names.
        grace_seconds: from a request to stop until SIGKILL.
        timeout_seconds: the longest that a rank may stay in one phase.
        """
        self.trackers = trackers
        self.grace_seconds = grace_seconds
        self.timeout_seconds = timeout_seconds
        self.threads: list[TrackerThread] = []

    def start(self, run: TrackedRun, lines: Sequence[Line]) -> None:
        """Open the trackers, in their threads, and send what they have not received yet.

        lines: those of metrics.jsonl up to `run.first_step`. A tracker lacks some after a killed
        process, and all if it is newly enabled.
        """
        if not self.trackers:
            return
        delivery_log = DeliveryLog(run.run_dir)
        for name, tracker in self.trackers.items():
            self.threads.append(TrackerThread(name, tracker, run, delivery_log))
        for thread in self.threads:
            thread.send(lines)

    def write(self, line: Line) -> None:
        """Send a line of metrics.jsonl."""
        for thread in self.threads:
            thread.send([line])

    def finish(self, summary: dict[str, Any]) -> None:
        """Send the summary of a run that is completed or was stopped, and end all threads."""
        status = summary["status"]
        if status == "completed":
            patience_seconds = FINISH_SECONDS
        else:
            patience_seconds = STOPPED_SHARE * self.grace_seconds
        values = plain_values(summary)
        known = {name: value for name, value in values.items() if value != "null"}
        self.close(status, known, min(patience_seconds, self.timeout_seconds / 2))

    def close(self, status: str, summary: dict[str, Any], patience_seconds: float) -> None:
        """End all threads that have not ended; leave behind those that take longer."""
        threads = self.threads
        self.threads = []
        for thread in threads:
            thread.end(status, summary)
        deadline = time.monotonic() + patience_seconds
        for thread in threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))
            if thread.thread.is_alive():
                log.warning(
                    "tracker %s did not finish within %g s: its last lines may be missing",
                    thread.name,
                    patience_seconds,
                )


@contextlib.contextmanager
def open_trackers(
    trackers: Mapping[str, Tracker], grace_seconds: float, timeout_seconds: float
) -> Iterator[Tracking]:
    """The trackers of a run, closed as failed if it ends before `Tracking.finish`."""
    for tracker in trackers.values():
        set_default_variables(tracker.environment)
    tracking = Tracking(trackers, grace_seconds, timeout_seconds)
    try:
        yield tracking
    finally:
        tracking.close("failed", {}, FAILED_SECONDS)
