"""The page of a sweep: the best trial first, what each parameter did, and what of it is noise."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_train.telemetry.metrics_log import METRICS, read_thinned
from ddp_train.telemetry.pages.charts import Axis, Curve, Point, curves, parallel, scatter
from ddp_train.telemetry.pages.report import Lines, Plot, Report, Section
from ddp_train.telemetry.pages.run_events import clock
from ddp_train.telemetry.pages.run_files import RUNNING, STOPPED, TRAIN, read_run
from ddp_train.telemetry.pages.run_page import near, uses
from ddp_train.telemetry.pages.seeds import SeedGroups
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.pages.trials import (
    Row,
    count_running,
    has_failed,
    is_stopped,
    number_or_text,
    overrides_of,
    parameters,
    ranked,
    state_of,
    trials_table,
)
from ddp_train.telemetry.score_lines import is_percent, shown_metric
from ddp_train.text import word

FEWEST_AXES = 3
"""Parameters from which parallel axes show more than a plot for each."""
POINTS = 30_000
"""Most points of all curves of a plot together: 0.6 MB."""
MOST_CURVES = 300
MOST_NAMED_CURVES = 6
"""Trials up to which each curve has a colour and a name."""


@dataclass
class Sweep:
    """The content of a page. The run directories of the trials are read too."""

    sweep_dir: Path
    rows: Sequence[Row]
    """The rows of results.jsonl so far, and of the trials that are running."""
    objective: str
    """`test.accuracy`."""
    better: str | None
    """max or min; None if that is not known yet."""
    command: str
    """The command that started it."""
    total: int = 0
    """Number of trials; 0: unknown."""
    note: str = ""
    """Under the table of trials."""
    facts: dict[str, str] = field(default_factory=dict)
    """Hardware and versions."""

    def run_dir(self, row: Row) -> Path:
        return Path(row.get("run_dir") or self.sweep_dir / str(row["trial"]))


def sweep_page(sweep: Sweep, refresh_seconds: int = 0) -> Report:
    """The page of a sweep.

    refresh_seconds: time between two pages; 0: the sweep has ended.
    """
    order = ranked(sweep.rows, sweep.better)
    scored = [row for row in order if row.get("objective") is not None]
    seeds = SeedGroups(order, sweep.objective, sweep.better)
    at_once = sweep.rows[0].get("at_once", 1) if sweep.rows else 1
    table = trials_table(order, sweep.objective, at_once, sweep.note)
    table.title = table.title.capitalize()
    sections: list[Section] = []
    if scored:
        table.best = 0
        sections += _best(sweep, scored[0])
    sections += [_curves(sweep, order), *_against_parameters(scored, sweep.objective), table]
    if seeds.repeated:
        sections.append(seeds.table())
    sections += _failures(sweep.rows)
    state = state_of(sweep.rows, sweep.total)
    if refresh_seconds:
        state = _state_of_running(sweep)
    elif state.startswith(STOPPED):
        sections.append(Lines("To go on", [goes_on(sweep.command, sweep.sweep_dir)]))
    intro = f"Each trial is a run in new processes; the sweep optimizes {sweep.objective}"
    if sweep.better:
        better = "higher" if sweep.better == "max" else "lower"
        intro += f", {better} is better"
    return Report(
        "Sweep",
        f"{intro}.",
        sections,
        sweep.facts,
        [sweep.command],
        state=state,
        numbers=_numbers(sweep, scored),
        findings=seeds.findings(),
        refresh_seconds=refresh_seconds,
    )


def goes_on(command: str, sweep_dir: Path) -> str:
    """The command that continues a sweep.

    command: that of its start, which need not name the directory.
    """
    argv = [
        argument
        for argument in shlex.split(command)
        if not argument.lstrip("+").startswith("run_dir=")
    ]
    return shlex.join([*argv, word("run_dir", near(sweep_dir))])


def _best(sweep: Sweep, row: Row) -> list[Lines]:
    commands = uses(read_run(sweep.run_dir(row)))
    if not commands:
        return []
    return [Lines(f"The best: trial {row['trial']}", commands)]


def _failures(rows: Sequence[Row]) -> list[Table]:
    failures = []
    for row in filter(has_failed, rows):
        failures.append([row["trial"], " ".join(row["overrides"]), str(row.get("reason", ""))])
    if not failures:
        return []
    return [Table("Failed", ["trial", "overrides", "reason"], failures)]


def _state_of_running(sweep: Sweep) -> str:
    running = count_running(sweep.rows)
    ended = str(len(sweep.rows) - running)
    if sweep.total:
        ended += f" of {sweep.total}"
    return f"{RUNNING}: {running} now, {ended} trials ended, as of {clock(time.time())}"


def _numbers(sweep: Sweep, scored: Sequence[Row]) -> dict[str, str]:
    numbers = {}
    if scored:
        best = scored[0]
        metric = sweep.objective.rpartition(".")[2]
        numbers[f"{sweep.objective}, the best"] = shown_metric(metric, best["objective"])
        if best["overrides"]:
            numbers["with"] = " ".join(best["overrides"])
    numbers["trials"] = str(len(sweep.rows))
    running = count_running(sweep.rows)
    if running:
        numbers["running"] = str(running)
    stopped = sum(map(is_stopped, sweep.rows))
    if stopped:
        numbers["stopped"] = str(stopped)
    numbers["failed"] = str(sum(map(has_failed, sweep.rows)))
    return numbers


# --- plots ----------------------------------------------------------------------------------------


def _curves(sweep: Sweep, order: Sequence[Row]) -> Plot:
    """The objective of all trials while they train; the best is drawn on top of the others.

    Their training loss, if the objective is known at the end only.
    """
    split, _, metric = sweep.objective.rpartition(".")
    order = order[:MOST_CURVES]
    paths = [sweep.run_dir(row) / METRICS for row in order]
    most = POINTS // max(1, len(order))
    lines_of_trials = [read_thinned(path, split, most) for path in paths]
    caption = f"{split.capitalize()} {metric} of all trials"
    if not any(len(lines) > 1 for lines in lines_of_trials):
        metric = "loss"
        lines_of_trials = [read_thinned(path, TRAIN, most) for path in paths]
        caption = "Training loss of all trials"
    drawn = []
    for row, lines in zip(order, lines_of_trials, strict=True):
        steps = [line["step"] for line in lines]
        name = " ".join(row["overrides"]) or f"trial {row['trial']}"
        level = -1 if len(order) > MOST_NAMED_CURVES else 0
        if row is order[0] and row.get("objective") is not None:
            level = 1
            caption += "; the best one is thick"
        drawn.append(Curve(name, steps, [line.get(metric) for line in lines], level=level))
    if all(len({*curve.x}) < 2 for curve in drawn):  # a point says no more than the table
        return Plot("Curves", None)
    axis = Axis(metric, log=metric == "loss", percent=is_percent(metric))
    return Plot("Curves", curves(drawn, Axis("optimizer step"), axis), f"{caption}.", full=True)


def _against_parameters(scored: Sequence[Row], objective: str) -> list[Plot]:
    """The objective against the parameters that vary: a plot for each of few, one of many."""
    columns = {}
    for key in parameters(scored):
        texts = [overrides_of(row).get(key) for row in scored]
        if len({*texts}) > 1:
            columns[key] = [text if text is None else number_or_text(text) for text in texts]
    names = [" ".join(row["overrides"]) for row in scored]
    goal = Axis(objective, percent=is_percent(objective))
    goals = [row["objective"] for row in scored]
    plots = []
    if len(columns) < FEWEST_AXES:
        for key, values in columns.items():
            points = _points(names, [values, goals])
            plots.append(Plot(f"{objective} by {key}", scatter(points, Axis(key), goal)))
        return plots
    points = _points(names, [*columns.values(), goals])
    chart = parallel(points, [*map(Axis, columns), goal])
    return [Plot("Parameters", chart, "A line is a trial; the best one is thick.", full=True)]


def _points(names: Sequence[str], columns: Sequence[Sequence[object]]) -> list[Point]:
    """A point for each trial, the first of which is the best."""
    points = []
    for number, (name, *values) in enumerate(zip(names, *columns, strict=True)):
        points.append(Point(name, values, strong=number == 0))
    return points
