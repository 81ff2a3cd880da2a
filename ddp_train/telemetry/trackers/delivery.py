"""Delivery of lines of metrics.jsonl to one tracker, from a thread, each once."""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception
from typing import Any

from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.trackers.scalars import scalars_of
from ddp_train.telemetry.trackers.tracker import TrackedRun, Tracker
from ddp_train.text import first_line

FILE = "trackers.json"
"""In the run directory: for each tracker the id of its run, and the last step by kind of line."""
WAITING_LINES = 10_000
"""A tracker may be so far behind: a server that does not answer must not fill the memory."""
Line = dict[str, Any]
"""A line of metrics.jsonl: `kind`, `step` and numbers."""
Call = Callable[[], None]
log = logging.getLogger(__name__)


@dataclass
class Delivered:
    """The lines of a run that a tracker has received."""

    run_id: str | None = None
    """Id of the run in the tracker; None before it was opened."""
    last_steps: dict[str, float] = field(default_factory=dict)
    """Step of the last line, by the kind of line."""


class DeliveryLog:
    """trackers.json, for all trackers of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self.lock = threading.Lock()
        self.entries: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            try:
                content = json.loads(self.path.read_text())
                self.entries = {name: dict(entry) for name, entry in content.items()}
            except (ValueError, TypeError, AttributeError) as error:
                log.warning(
                    "%s is damaged (%s), so each tracker begins a new run",
                    self.path,
                    first_line(error),
                )

    def load(self, tracker: str) -> Delivered:
        entry = dict(self.entries.get(tracker, {}))
        run_id = entry.pop("id", None)
        return Delivered(run_id, entry)

    def save(self, tracker: str, delivered: Delivered) -> None:
        with self.lock:
            self.entries[tracker] = {"id": delivered.run_id, **delivered.last_steps}
            write_json(self.path, self.entries)


class TrackerThread:
    """A tracker, and the thread that makes all calls to it, one after the other.

    A call that fails is reported once. Lines that were not accepted are sent again, before the
    next one.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, delivery_log: DeliveryLog
    ) -> None:
        self.name = name
        self.tracker = tracker
        self.run = run
        self.delivery_log = delivery_log
        self.delivered = delivery_log.load(name)
        self.is_open = False
        self.has_warned = False
        self.unsent: deque[Line] = deque(maxlen=WAITING_LINES)
        """Lines that failed, and those of the current call."""
        self.calls: queue.Queue[Call | None] = queue.Queue(WAITING_LINES)
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def send(self, lines: Sequence[Line]) -> None:
        """Queue lines. Those that the tracker received in an earlier process are left out."""
        self.call_later(lambda: self._send(lines))

    def show(self, picture: Call) -> None:
        """Queue a call that is not repeated if it fails, or left out if the tracker is not open."""
        self.call_later(lambda: self._show(picture))

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """Queue the end of the run, and of the thread."""
        self.call_later(lambda: self._close(status, summary))
        self.call_later(None)

    def call_later(self, call: Call | None) -> None:
        """Queue a call; None ends the thread."""
        try:
            self.calls.put_nowait(call)
        except queue.Full:
            self._warn(f"is {WAITING_LINES:,} lines behind, so later lines are left out")

    def wait_until_idle(self) -> None:
        """Wait for all queued calls."""
        self.calls.join()

    def _work(self) -> None:
        for call in iter(self.calls.get, None):
            try:
                call()
            except Exception as error:  # noqa: BLE001  libraries, disks and servers of others
                self._warn(f"failed: {type(error).__name__}: {first_line(error)}", error)
            finally:
                self.calls.task_done()

    def _send(self, lines: Sequence[Line]) -> None:
        self.unsent.extend(lines)
        if not self.is_open:
            self._open()
        try:
            while self.unsent:
                self._send_first()
        finally:
            self.delivery_log.save(self.name, self.delivered)

    def _send_first(self) -> None:
        """Send the first unsent line. If the tracker refuses it and accepts the next, drop it."""
        try:
            self._write(self.unsent[0])
        except Exception:
            if len(self.unsent) == 1:
                raise
            self._write(self.unsent[1])
        self.unsent.popleft()

    def _write(self, line: Line) -> None:
        kind = line["kind"]
        step = line["step"]
        if step > self.delivered.last_steps.get(kind, 0):
            self.tracker.write(step, scalars_of(line))
            self.delivered.last_steps[kind] = step

    def _show(self, picture: Call) -> None:
        if self.is_open:
            picture()

    def _close(self, status: str, summary: dict[str, Any]) -> None:
        try:
            self._send([])
        finally:
            if self.is_open:
                self.tracker.close(status, summary)

    def _open(self) -> None:
        run_id = self.tracker.open(self.run, self.delivered.run_id)
        self.is_open = True
        last_steps = {}
        if run_id == self.delivered.run_id:
            stored = self.tracker.last_step()
            for kind, step in self.delivered.last_steps.items():
                last_steps[kind] = min(step, stored)
        self.delivered = Delivered(run_id, last_steps)
        self.delivery_log.save(self.name, self.delivered)

    def _warn(self, problem: str, error: Exception | None = None) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        log.warning("tracker %s %s; training continues", self.name, without_passwords(problem))
        if error:
            traceback = "".join(format_exception(error))
            log.info("tracker %s: %s", self.name, without_passwords(traceback))


def without_passwords(text: str) -> str:
    """Remove `user:password@` from addresses: errors of libraries may quote them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)
