"""What a run tells to trackers: every line of metrics.jsonl, its config, its summary. On rank 0
alone.

Each tracker has a thread, and a queue to it: training waits for none. One that fails is named once;
with the next line it is tried again, and told what it missed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import format_exception
from typing import Any

from ddp_train.distributed.environment import disable_tracker_telemetry
from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.hardware_monitor import RULES, combined
from ddp_train.telemetry.trackers import KINDS, Run, Scalars, Tracker
from ddp_train.text import first_line, shown

FILE = "trackers.json"
"""In the run directory: for each tracker the id of the run there, and the last step that it was
told of, by kind."""
FINISH_SECONDS = 30.0
"""The longest a run that is done waits for its trackers; one that was stopped has a quarter of its
grace."""
FAILED_SECONDS = 2.0
"""The same of a run that failed: it has not reported that yet."""
WAITING_LINES = 10_000
"""More than that a tracker may not be behind: a server that does not answer must not fill the
memory."""
log = logging.getLogger(__name__)


class DeliveryLog:
    """trackers.json: what each tracker knows already."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self.lock = threading.Lock()
        self.entries: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            try:
                self.entries = {
                    name: dict(entry) for name, entry in json.loads(self.path.read_text()).items()
                }
            except (ValueError, TypeError, AttributeError) as error:
                log.warning(
                    "%s is damaged (%s): each tracker begins a new run",
                    self.path,
                    first_line(error),
                )

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        with self.lock:
            self.entries[name] = dict(entry)
            write_json(self.path, self.entries)


class TrackerThread:
    """A tracker with a thread that calls it. Lines that it does not take are told again with the
    next one."""

    def __init__(self, tracker: Tracker, run: Run, delivered: DeliveryLog) -> None:
        self.tracker = tracker
        self.run = run
        self.delivered = delivered
        self.entry: dict[str, Any] = dict(delivered.entries.get(tracker.name, {}))
        self.is_open = self.warned = False
        self.unsent: deque[dict[str, Any]] = deque(maxlen=WAITING_LINES)
        """Lines that failed: they go before the next one."""
        self.waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING_LINES)
        self.thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self.thread.start()

    def do(self, call: Callable[[], None] | None) -> None:
        """After all that is waiting; None ends the thread."""
        try:
            self.waiting.put_nowait(call)
        except queue.Full:
            self._warn(f"is {WAITING_LINES:,} lines behind: later ones are left out")

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """In the thread: lines of metrics.jsonl, without those that the tracker was told of in an
        earlier process."""
        self.unsent.extend(lines)
        if not self.is_open:
            self._open()
        try:
            while self.unsent:
                self._send_first()
                self.unsent.popleft()
        finally:
            self.delivered.keep(self.tracker.name, self.entry)

    def _send_first(self) -> None:
        """Of those untold the first, or, if it fails and the next one does not, that: then the
        first was to blame."""
        try:
            self._send(self.unsent[0])
        except Exception:
            if len(self.unsent) == 1:
                raise
            self._send(self.unsent[1])

    def _send(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        step = line["step"]
        if step > self.entry.get(kind, 0):
            self.tracker.write(step, scalars_of(line))
            self.entry[kind] = step

    def show(self, picture: Callable[[], None]) -> None:
        """In the thread: something that is not told again if it fails."""
        if self.is_open:
            picture()

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """In the thread: at the end."""
        try:
            self.send([])
        finally:
            if self.is_open:
                self.tracker.close(status, summary)

    def _work(self) -> None:
        for call in iter(self.waiting.get, None):
            try:
                call()
            except Exception as error:  # noqa: BLE001  of other people's libraries, disks and servers
                self._warn(f"failed: {type(error).__name__}: {first_line(error)}", error)
            finally:
                self.waiting.task_done()

    def _open(self) -> None:
        known = self.entry.get("id")
        run_id = self.tracker.open(self.run, known)
        self.is_open = True
        last = self.tracker.keeps_up_to
        told = {
            kind: min(step, last)
            for kind, step in self.entry.items()
            if kind != "id" and run_id == known
        }
        self.entry = {"id": run_id, **told}
        self.delivered.keep(self.tracker.name, self.entry)

    def _warn(self, what: str, error: Exception | None = None) -> None:
        if not self.warned:
            self.warned = True
            log.warning(
                "tracker %s %s; training continues", self.tracker.name, without_passwords(what)
            )
            if error:
                log.info(
                    "tracker %s: %s",
                    self.tracker.name,
                    without_passwords("".join(format_exception(error))),
                )


class Tracking:
    """The trackers of a run. Without any, nothing happens."""

    def __init__(
        self, trackers: Sequence[Tracker], grace_seconds: float, timeout_seconds: float
    ) -> None:
        """grace_seconds: of which a run that was stopped may spend a quarter on them.
        timeout_seconds: the longest that a rank may stay in one phase."""
        self.trackers = trackers
        self.grace_seconds = grace_seconds
        self.timeout_seconds = timeout_seconds
        self.threads: list[TrackerThread] = []

    def start(self, run: Run, lines: Sequence[dict[str, Any]]) -> None:
        """Opens them, in their threads. lines: of metrics.jsonl up to `run.first_step`; a tracker
        receives those that it has not yet (after a killed process, or because it is newly
        enabled)."""
        if self.trackers:
            delivered = DeliveryLog(run.run_dir)
            self.threads = [TrackerThread(tracker, run, delivered) for tracker in self.trackers]
        for thread in self.threads:
            thread.do(functools.partial(thread.send, lines))

    def write(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        for thread in self.threads:
            thread.do(functools.partial(thread.send, [line]))

    def finish(self, summary: dict[str, Any]) -> None:
        """Sends the summary. Waits for the trackers, but not for long."""
        completed = summary["status"] == "completed"
        patience = FINISH_SECONDS if completed else self.grace_seconds / 4
        known = {
            name: v for name, v in flat(summary).items() if not isinstance(v, str) or v != "null"
        }
        self.close(summary["status"], known, min(patience, self.timeout_seconds / 2))

    def close(self, status: str, summary: dict[str, Any], seconds: float) -> None:
        """Ends all threads; those that take longer than so many seconds are left behind. Nothing if
        they are ended."""
        threads = self.threads
        self.threads = []
        for thread in threads:
            thread.do(functools.partial(thread.close, status, summary))
            thread.do(None)
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))
            if thread.thread.is_alive():
                log.warning(
                    "tracker %s did not finish within %g s: its last lines may be missing",
                    thread.tracker.name,
                    seconds,
                )


@contextlib.contextmanager
def open_trackers(
    names: Sequence[str], grace_seconds: float, timeout_seconds: float
) -> Iterator[Tracking]:
    """The trackers of these names; if what is inside fails, they receive that status."""
    trackers = [tracker() for tracker in KINDS if tracker.name in names]
    if trackers:
        disable_tracker_telemetry()
    tracking = Tracking(trackers, grace_seconds, timeout_seconds)
    try:
        yield tracking
    finally:
        tracking.close("failed", {}, FAILED_SECONDS)  # unless it has finished


def without_passwords(text: str) -> str:
    """Of a server's address, as `https://user:password@host`: an error of a library may quote
    it."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def scalars_of(line: dict[str, Any]) -> Scalars:
    """`train/loss`, `test/accuracy`, `figures/gpu_utilisation`: the numbers of a line, one for each
    figure."""
    kind = line["kind"]
    figures = line.get("figures", {})
    found = {
        f"{kind}/{name}": value
        for name, value in line.items()
        if name not in ("kind", "step", "time")
    }
    found |= {f"figures/{name}": combined(RULES[name], values) for name, values in figures.items()}
    numbers = {
        name: float(v)
        for name, v in found.items()
        if isinstance(v, int | float) and not isinstance(v, bool)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def flat(values: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """Nested values by dotted names; what is neither a number nor a word, as one would type it.
    Lists are words."""
    whole = {
        name: shown(value) if isinstance(value, list) else value for name, value in values.items()
    }
    found = {}
    for name, value in whole.items():
        inner = flat(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): item for key, item in inner.items()}
    return {
        name: v if isinstance(v, bool | int | float | str) else shown(v)
        for name, v in found.items()
    }
