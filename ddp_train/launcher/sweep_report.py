"""The page of a sweep, while it runs and at its end. Torch-free."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

from ddp_train.config.hardware import detect_hardware, hardware_description, versions
from ddp_train.distributed.environment import visible_devices
from ddp_train.telemetry.pages.live import EVERY_SECONDS, SHARE
from ddp_train.telemetry.score_lines import shown_metric
from ddp_train.text import first_line


def print_results(rows: list[dict[str, Any]], objective: str, better: str | None, at_once: int, note: str = "") -> None:
    """The table of the trials, the best of them, and the command that evaluates it."""
    from ddp_train.telemetry.pages.run_files import read_run
    from ddp_train.telemetry.pages.run_page import uses
    from ddp_train.telemetry.pages.sweep_page import ONE_OF_EACH, noise, ranked, trials_table
    from ddp_train.telemetry.pages.tables import show, tell

    show(trials_table(rows, objective, at_once, note, digits=4))
    best = ranked(rows, better)[0]
    if best.get("objective") is None:
        return
    value = shown_metric(objective.rpartition(".")[2], best["objective"])
    tell([f"best trial {best['trial']}: {' '.join(best['overrides'])}  {objective} {value}"])
    for command in uses(read_run(Path(best["run_dir"])))[:1] if "run_dir" in best else ():
        print(f"  {command}")
    tell([text for text in noise(rows, objective, better) if text != ONE_OF_EACH])


class SweepPage:
    """report.html, .md, .csv and .json in the sweep's directory."""

    def __init__(self, command: str) -> None:
        """command: that of the sweep."""
        self.command = command
        self.due = 0.0
        self.every = EVERY_SECONDS
        """Seconds between two pages, by what the last one took."""
        self.note = ""
        """Below the table."""
        self.warned = False

    @property
    def is_due(self) -> bool:
        """Asked ten times a second, and by a trial alone fifty times."""
        return time.monotonic() >= self.due

    def tell_end(self, sweep_dir: Path, rows: list[dict[str, Any]], total: int) -> None:
        """Says of a sweep that was stopped how far it came, and how to go on."""
        from ddp_train.telemetry.pages.run_files import STOPPED
        from ddp_train.telemetry.pages.sweep_page import goes_on, state_of

        if (state := state_of(rows, total)).startswith(STOPPED):
            print(f"{state}; to go on:\n  {goes_on(self.command, sweep_dir)}")

    def write(
        self, sweep_dir: Path, rows: list[dict[str, Any]], objective: str, better: str | None, total: int = 0,
        is_running: bool = False,
    ) -> Path | None:  # fmt: skip
        """Returns the page's path. A failure is only a note, since the trials' results stand: then None."""
        from ddp_train.telemetry.pages.page import write  # once trials run: a start imports none of it
        from ddp_train.telemetry.pages.sweep_page import sweep_page

        began, path = time.monotonic(), None
        try:
            machine = hardware_description(detect_hardware(visible_devices()))
            known = ", ".join(f"{name} {version}" for name, version in versions().items())
            facts = {"Hardware": machine, "Versions": known}
            seconds = math.ceil(self.every) if is_running else 0
            page = sweep_page(sweep_dir, rows, objective, better, self.command, facts, seconds, total, self.note)
            path = write(page, sweep_dir)
        except Exception as error:  # noqa: BLE001  whatever it is
            if not self.warned:
                self.warned = True
                print(f"note: no report: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        now = time.monotonic()
        self.every = max(EVERY_SECONDS, (now - began) / SHARE)
        self.due = now + self.every
        return path
