"""The page of a sweep, while it runs and at its end. Torch-free."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ddp_train.distributed.environment import visible_devices
from ddp_train.hardware import detect_hardware, hardware_description, versions
from ddp_train.launcher.workload import Workload
from ddp_train.sweeps.baseline import MARK
from ddp_train.telemetry.pages.live import EVERY_SECONDS, SHARE, NoPage
from ddp_train.telemetry.score_lines import shown_metric
from ddp_train.text import first_line


def print_results(
    rows: list[dict[str, Any]], objective: str, better: str | None, at_once: int, note: str = ""
) -> None:
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
    which = "best trial" if len(rows) > 1 else "trial"
    words = f"{' '.join(best['overrides'])}  ".lstrip()
    tell([f"{which} {best['trial']}: {words}{objective} {value}"])
    for command in uses(read_run(Path(best["run_dir"])))[:1] if "run_dir" in best else ():
        print(f"  {command}")
    tell([text for text in noise(rows, objective, better) if text != ONE_OF_EACH])


class Sweep(Protocol):
    """What the page shows."""

    sweep_dir: Path
    rows: list[dict[str, Any]]
    """Of the trials that have ended."""
    objective: str
    better: str | None
    total: int


class _Watched(NoPage):
    """Of a trial that runs in the process of the sweep, where nobody else looks at the page
    meanwhile."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look_at_sweep = look

    def look(self, phases: Sequence[str]) -> None:
        self.look_at_sweep()


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
        self.running: dict[int, dict[str, Any]] = {}
        """The rows of the trials that have begun, by their numbers, until they are among those of
        the sweep."""

    def begins(self, row: dict[str, Any], look: Callable[[], None] | None = None) -> Workload:
        """row: of a trial. look: what the launcher calls while it waits for this one; None: others
        do. Returns what the launcher is given."""
        if MARK not in row:
            self.running[row["trial"]] = row
        return Workload(page=_Watched(look)) if look else Workload()

    def look(self, sweep: Sweep) -> None:
        """Ten times a second, and fifty times while one trial runs: the page, if it is time for
        one."""
        if time.monotonic() >= self.due:
            self._write(sweep, is_running=True)

    def write_last(self, sweep: Sweep) -> None:
        """At the end; the terminal is told where it is."""
        if path := self._write(sweep):
            print(f"report {path}")

    def print_results(self, sweep: Sweep, at_once: int) -> None:
        """The table, the best trial, and of a sweep that was stopped how far it came, and how to go
        on."""
        from ddp_train.telemetry.pages.run_files import STOPPED
        from ddp_train.telemetry.pages.sweep_page import goes_on, state_of

        print_results(sweep.rows, sweep.objective, sweep.better, at_once, self.note)
        if (state := state_of(sweep.rows, sweep.total)).startswith(STOPPED):
            print(f"{state}; to go on:\n  {goes_on(self.command, sweep.sweep_dir)}")

    def _write(self, sweep: Sweep, is_running: bool = False) -> Path | None:
        """Returns the page's path. A failure is only a note, since the trials' results stand: then
        None."""
        from ddp_train.telemetry.pages.page import (
            write,
        )  # once trials run: a start imports none of it
        from ddp_train.telemetry.pages.run_files import RUNNING
        from ddp_train.telemetry.pages.sweep_page import sweep_page

        began = time.monotonic()
        path = None
        try:
            machine = hardware_description(detect_hardware(visible_devices()))
            known = ", ".join(f"{name} {version}" for name, version in versions().items())
            facts = {"Hardware": machine, "Versions": known}
            seconds = math.ceil(self.every) if is_running else 0
            ended = [id(row) for row in sweep.rows]
            now = [
                row | {"status": RUNNING} for row in self.running.values() if id(row) not in ended
            ] * is_running
            rows = [*{row["trial"]: row for row in [*sweep.rows, *now]}.values()]
            page = sweep_page(
                sweep.sweep_dir,
                rows,
                sweep.objective,
                sweep.better,
                self.command,
                facts,
                seconds,
                sweep.total,
                self.note,
            )
            path = write(page, sweep.sweep_dir)
        except Exception as error:  # noqa: BLE001  whatever it is
            if not self.warned:
                self.warned = True
                print(
                    f"note: no report: {type(error).__name__}: {first_line(error)}", file=sys.stderr
                )
        now = time.monotonic()
        self.every = max(EVERY_SECONDS, (now - began) / SHARE)
        self.due = now + self.every
        return path
