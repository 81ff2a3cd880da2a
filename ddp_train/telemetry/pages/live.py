"""The page of a run while it lives: written by the launcher, not by a process that trains.
Torch-free.

A page that cannot be written ends no run: there is one warning, and the next one is tried.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.metrics_log import METRICS
from ddp_train.telemetry.pages.timeline import Timeline
from ddp_train.text import first_line

EVERY_SECONDS = 10.0
"""Between two pages of a living run, and after so long its reader's browser loads it again."""
SHARE = 0.01
"""Of the launcher's time that pages may take: where one takes longer than 0.1 s, they come less
often."""
REPORT = "report.html"


class NoPage:
    """Of a trial of a sweep or a study, which has one page for all, and of a loop of one's own."""

    def look(self, phases: Sequence[str]) -> None: ...

    def attempt_ended(self, saved: bool) -> None: ...

    def write(self, is_running: bool = False) -> None: ...


class LivePage(NoPage):
    """report.html of one run."""

    def __init__(self, run_dir: Path, typed: dict[str, Any]) -> None:
        """typed: the keys that differ from the defaults."""
        self.run_dir = run_dir
        self.typed = typed
        self.timeline = Timeline(run_dir)
        self.due = time.monotonic()
        self.size = self._size()
        self.warned = False

    def look(self, phases: Sequence[str]) -> None:
        """50 times a second: where the ranks are. Writes the page if it is time, and metrics.jsonl
        has grown."""
        self.timeline.look(phases)
        if time.monotonic() >= self.due and (size := self._size()) != self.size:
            self.size = size
            self.write(is_running=True)

    def attempt_ended(self, saved: bool) -> None:
        """All processes of one start have ended. saved: by a stop."""
        try:
            failure = json.loads((self.run_dir / FAILURE).read_text())
        except (
            OSError,
            ValueError,
        ):  # there was none, or it could not be written: the terminal told of it
            failure = None
        if failure:
            who = "" if failure.get("rank") is None else f" (rank {failure['rank']})"
            self.timeline.happened("failure", f"{failure.get('kind')}{who}", failure.get("step"))
        elif saved:
            self.timeline.happened("stop", "stopped and saved", None)

    def write(self, is_running: bool = False) -> None:
        """The page of this moment; the last one if the run does not go on."""
        from ddp_train.telemetry.pages.page import (
            as_page,
        )  # with the first page: a start imports none of it
        from ddp_train.telemetry.pages.run_files import read_run
        from ddp_train.telemetry.pages.run_page import run_page

        began = time.monotonic()
        try:
            self.timeline.write()
            run = dataclasses.replace(read_run(self.run_dir), is_running=is_running)
            write_text(
                self.run_dir / REPORT, as_page(run_page(run, self.typed, int(EVERY_SECONDS)))
            )
        except Exception as error:  # noqa: BLE001  whatever it is, the run is worth more than its page
            if not self.warned:
                self.warned = True
                why = f"{type(error).__name__}: {first_line(error)}"
                after = "; the run goes on" * is_running
                print(
                    f"note: {self.run_dir / REPORT} cannot be written: {why}{after}",
                    file=sys.stderr,
                )
        now = time.monotonic()
        self.due = now + max(EVERY_SECONDS, (now - began) / SHARE)

    def _size(self) -> int:
        path = self.run_dir / METRICS
        return path.stat().st_size if path.is_file() else 0
