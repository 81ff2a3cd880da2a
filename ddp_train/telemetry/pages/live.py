"""The page of a run that is not over, written by its launcher. Torch-free.

A page that cannot be written ends no run: there is one warning, and the next one is tried.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.json_files import read_object
from ddp_train.telemetry.metrics_log import METRICS
from ddp_train.telemetry.pages.timeline import Timeline
from ddp_train.text import first_line

EVERY_SECONDS = 10.0
"""Between two pages of a run. A browser loads the page again after so long."""
SHARE = 0.01
"""Most of the launcher's time that pages may take. One that takes longer than 0.1 s comes less
often."""
REPORT = "report.html"


class NoPage:
    """A run without a page: a trial of a sweep or a study."""

    def look(self, phases: Sequence[str]) -> None: ...

    def attempt_ended(self, saved: bool) -> None: ...

    def write(self, is_running: bool = False) -> None: ...


class LivePage(NoPage):
    """report.html of a run."""

    def __init__(self, run_dir: Path, typed: dict[str, Any]) -> None:
        """typed: the keys that differ from the defaults."""
        self.run_dir = run_dir
        self.typed = typed
        self.timeline = Timeline(run_dir)
        self.due = time.monotonic()
        self.size = self._size()
        self.has_warned = False

    def look(self, phases: Sequence[str]) -> None:
        """Note the phases of all ranks. Write the page if it is due and metrics.jsonl has grown.

        Called 50 times a second.
        """
        self.timeline.look(phases)
        if time.monotonic() < self.due:
            return
        size = self._size()
        if size != self.size:
            self.size = size
            self.write(is_running=True)

    def attempt_ended(self, saved: bool) -> None:
        """Note that all processes have ended.

        saved: after a request to stop.
        """
        try:
            failure = read_object(self.run_dir / FAILURE)
        except OSError:  # the terminal has reported it
            failure = {}
        if failure:
            text = str(failure.get("kind"))
            if failure.get("rank") is not None:
                text += f" (rank {failure['rank']})"
            self.timeline.add_event("failure", text, failure.get("step"))
        elif saved:
            self.timeline.add_event("stop", "stopped and saved", None)

    def write(self, is_running: bool = False) -> None:
        """Write the page of this moment; the last one if the run is over."""
        start = time.monotonic()
        try:
            self._write(is_running)
        except Exception as error:  # noqa: BLE001  whatever it is, the run is worth more
            self._warn(error, is_running)
        now = time.monotonic()
        self.due = now + max(EVERY_SECONDS, (now - start) / SHARE)

    def _write(self, is_running: bool) -> None:
        # With the first page: a start imports none of it.
        from ddp_train.telemetry.pages.page import as_page
        from ddp_train.telemetry.pages.run_files import read_run
        from ddp_train.telemetry.pages.run_page import run_page

        self.timeline.write()
        run = dataclasses.replace(read_run(self.run_dir), is_running=is_running)
        report = run_page(run, self.typed, refresh_seconds=int(EVERY_SECONDS))
        write_text(self.run_dir / REPORT, as_page(report))

    def _warn(self, error: Exception, is_running: bool) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        path = self.run_dir / REPORT
        text = f"{path} cannot be written: {type(error).__name__}: {first_line(error)}"
        if is_running:
            text += "; the run continues"
        print(f"note: {text}", file=sys.stderr)

    def _size(self) -> int:
        path = self.run_dir / METRICS
        return path.stat().st_size if path.is_file() else 0
