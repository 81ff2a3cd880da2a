"""The page of a sweep, while it runs and at its end, and its results in the terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_train.distributed.environment import visible_devices
from ddp_train.hardware import detect_hardware, hardware_description, versions
from ddp_train.sweeps.results import ALONE
from ddp_train.sweeps.sweep_state import SweepState
from ddp_train.telemetry.pages.live import EVERY_SECONDS, SHARE, NoPage
from ddp_train.telemetry.score_lines import shown_metric
from ddp_train.text import first_line


def print_results(
    rows: list[dict[str, Any]], objective: str, better: str | None, at_once: int, note: str = ""
) -> None:
    """Print the table of the trials, the best of them, and the command that evaluates it."""
    # once trials run: a start imports none of it
    from ddp_train.telemetry.pages.run_files import read_run
    from ddp_train.telemetry.pages.run_page import uses
    from ddp_train.telemetry.pages.seeds import ONE_OF_EACH, SeedGroups
    from ddp_train.telemetry.pages.tables import show, tell
    from ddp_train.telemetry.pages.trials import ranked, trials_table

    show(trials_table(rows, objective, at_once, note, digits=4))
    best = ranked(rows, better)[0]
    if best.get("objective") is None:
        return
    value = shown_metric(objective.rpartition(".")[2], best["objective"])
    title = "best trial" if len(rows) > 1 else "trial"
    overrides = f"{' '.join(best['overrides'])}  ".lstrip()
    tell([f"{title} {best['trial']}: {overrides}{objective} {value}"])
    if "run_dir" in best:
        for command in uses(read_run(Path(best["run_dir"])))[:1]:
            print(f"  {command}")
    seeds = SeedGroups(ranked(rows, better), objective, better)
    tell([text for text in seeds.findings() if text != ONE_OF_EACH])


class SweepPageOfTrial(NoPage):
    """The page of a trial in the process of the sweep: keeps that of the sweep up to date."""

    def __init__(self, look_at_sweep: Callable[[], None]) -> None:
        self.look_at_sweep = look_at_sweep

    def look(self, phases: Sequence[str]) -> None:
        self.look_at_sweep()


class SweepPage:
    """report.html, .md, .csv and .json in the directory of a sweep."""

    def __init__(self, state: SweepState) -> None:
        self.state = state
        self.due = 0.0
        self.interval_seconds = EVERY_SECONDS
        """Time between two pages, longer if the last one took long."""
        self.was_warned = False
        self.running: dict[int, dict[str, Any]] = {}
        """The rows of the trials that run, by their numbers."""

    def begin(self, row: dict[str, Any]) -> None:
        """Show a trial that begins, unless it is the run of `sweep.baseline`."""
        if ALONE not in row:
            self.running[row["trial"]] = row

    def look(self) -> None:
        """Write the page if its interval has passed. Called 10 to 50 times a second."""
        if time.monotonic() >= self.due:
            self._write(is_running=True)

    def write_last(self) -> None:
        """Write the page at the end, and print where it is."""
        path = self._write(is_running=False)
        if path:
            print(f"report {path}")

    def print_results(self) -> None:
        """Print the table and the best trial, and how to continue a sweep that was stopped."""
        from ddp_train.telemetry.pages.run_files import STOPPED
        from ddp_train.telemetry.pages.sweep_page import goes_on
        from ddp_train.telemetry.pages.trials import state_of

        state = self.state
        plan = state.plan
        at_once = plan.pool.at_once if plan.pool else 1
        note = state.baseline.text(state.rows)
        print_results(state.rows, state.objective, state.better, at_once, note)
        end = state_of(state.rows, plan.total)
        if end.startswith(STOPPED):
            print(f"{end}; to go on:\n  {goes_on(plan.command, plan.sweep_dir)}")

    def _write(self, is_running: bool) -> Path | None:
        """Write the page. Returns its path; None after a failure.

        A failure is only a note, since the results of the trials stand.
        """
        began = time.monotonic()
        path = None
        try:
            path = self._write_now(is_running)
        # whatever it is
        except Exception as error:  # noqa: BLE001
            if not self.was_warned:
                self.was_warned = True
                text = f"{type(error).__name__}: {first_line(error)}"
                print(f"note: the report of the sweep cannot be written: {text}", file=sys.stderr)
        ended = time.monotonic()
        self.interval_seconds = max(EVERY_SECONDS, (ended - began) / SHARE)
        self.due = ended + self.interval_seconds
        return path

    def _write_now(self, is_running: bool) -> Path:
        from ddp_train.telemetry.pages.page import write
        from ddp_train.telemetry.pages.run_files import RUNNING
        from ddp_train.telemetry.pages.sweep_page import Sweep, sweep_page

        state = self.state
        plan = state.plan
        rows = {row["trial"]: row for row in state.rows}
        if is_running:
            ended = [id(row) for row in state.rows]
            for number, row in self.running.items():
                if id(row) not in ended:
                    rows[number] = row | {"status": RUNNING}
        known = [f"{name} {version}" for name, version in versions().items()]
        facts = {
            "Hardware": hardware_description(detect_hardware(visible_devices())),
            "Versions": ", ".join(known),
        }
        sweep = Sweep(
            plan.sweep_dir,
            [*rows.values()],
            state.objective,
            state.better,
            plan.command,
            total=plan.total,
            note=state.baseline.text(state.rows),
            facts=facts,
        )
        refresh_seconds = math.ceil(self.interval_seconds) if is_running else 0
        return write(sweep_page(sweep, refresh_seconds), plan.sweep_dir)
