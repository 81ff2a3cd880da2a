"""The page of a sweep: the best trial first, what each parameter did, and what of it is noise."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.telemetry.metrics_log import METRICS, read_thinned
from ddp_train.telemetry.pages.charts import Axis, Chart, Curve, Point, curves, parallel, scatter
from ddp_train.telemetry.pages.report import Lines, Plot, Report
from ddp_train.telemetry.pages.run_events import clock
from ddp_train.telemetry.pages.run_files import (
    FAILED,
    RUNNING,
    STOPPED,
    TRAIN,
    read_run,
)
from ddp_train.telemetry.pages.run_page import near, uses
from ddp_train.telemetry.pages.seeds import Row, SeedGroups
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.pages.trials import (
    has_failed,
    is_stopped,
    parameters,
    ranked,
    state_of,
    trials_table,
    values_of,
)
from ddp_train.telemetry.score_lines import PERCENT, shown_metric
from ddp_train.text import word

FEWEST_AXES = 3
"""Parameters from which parallel axes show more than a plot for each."""
LOG_RATIO = 10.0
"""Of the largest to the smallest value of a parameter, from which its axis is logarithmic."""
MOST_TICKS = 8
"""Values of a parameter up to which its axis names these and no others."""
POINTS = 30_000
"""Of all curves of a plot together: 0.6 MB."""
MOST_CURVES = 300


def sweep_page(
    sweep_dir: Path,
    rows: Sequence[Row],
    objective: str,
    better: str | None,
    command: str,
    facts: dict[str, str],
    refresh_seconds: int = 0,
    total: int = 0,
    note: str = "",
) -> Report:
    """rows: of results.jsonl, so far, and of the trials that are running. total: of trials, if that
    is known. Reads the run directories of the trials."""
    order = ranked(rows, better)
    scored = [row for row in order if row.get("objective") is not None]
    failed = [row for row in rows if has_failed(row)]
    table = trials_table(order, objective, rows[0].get("at_once", 1) if rows else 1, note)
    table.title = table.title.capitalize()
    table.best = 0 if scored else None
    sections: list[Table | Plot | Lines] = []
    if scored:
        commands = uses(read_run(_run_dir(sweep_dir, scored[0])))
        sections += [Lines(f"The best: trial {scored[0]['trial']}", commands)] if commands else []
    seeds = SeedGroups(order, objective, better)
    sections += [_curves(sweep_dir, order, objective), *_against(scored, objective), table]
    if seeds.repeated:
        sections.append(seeds.table())
    if failed:
        reasons = [
            [row["trial"], " ".join(row["overrides"]), str(row.get("reason", ""))] for row in failed
        ]
        sections.append(Table("Failed", ["trial", "overrides", "reason"], reasons))
    state = state_of(rows, total)
    now = sum(row["status"] == RUNNING for row in rows)
    if refresh_seconds:
        of = f" of {total}" if total else ""
        state = (
            f"{RUNNING}: {now} now, {len(rows) - now}{of} trials ended, as of {clock(time.time())}"
        )
    elif state.startswith(STOPPED):
        sections.append(Lines("To go on", [goes_on(command, sweep_dir)]))
    return Report(
        "Sweep",
        f"Each trial is a run in new processes; the sweep optimizes {objective}"
        + (f", {'higher' if better == 'max' else 'lower'} is better." if better else "."),
        sections,
        facts,
        [command],
        state=state,
        numbers=_numbers(rows, scored, objective),
        findings=seeds.findings(),
        refresh_seconds=refresh_seconds,
    )


def goes_on(command: str, sweep_dir: Path) -> str:
    """The command that goes on with a sweep. command: that of its start, which need not name the
    directory."""
    words = [one for one in shlex.split(command) if not one.startswith("run_dir=")]
    return shlex.join([*words, word("run_dir", near(sweep_dir))])


def _run_dir(sweep_dir: Path, row: Row) -> Path:
    if row.get("run_dir"):
        return Path(row["run_dir"])
    return sweep_dir / str(row["trial"])


def _numbers(rows: Sequence[Row], scored: Sequence[Row], objective: str) -> dict[str, str]:
    found = {}
    if scored:
        metric = objective.rpartition(".")[2]
        found[f"{objective}, the best"] = shown_metric(metric, scored[0]["objective"])
        found |= {"with": " ".join(scored[0]["overrides"])} if scored[0]["overrides"] else {}
    counts = {"trials": len(rows), "running": sum(row["status"] == RUNNING for row in rows)}
    counts["stopped"] = sum(map(is_stopped, rows))
    counts["failed"] = sum(row["status"] == FAILED for row in rows) - counts["stopped"]
    return found | {
        name: str(number)
        for name, number in counts.items()
        if number or name in ("trials", "failed")
    }


def _curves(sweep_dir: Path, order: Sequence[Row], objective: str) -> Plot:
    """The objective of all trials while they train, or their training loss if it is known at the
    end only. The best is drawn on top of the others."""
    split, _, metric = objective.rpartition(".")
    order = order[:MOST_CURVES]
    paths = [_run_dir(sweep_dir, row) / METRICS for row in order]
    most = POINTS // max(1, len(order))
    read = [read_thinned(path, split, most) for path in paths] if split else []
    kind = split if any(len(lines) > 1 for lines in read) else TRAIN
    if kind != split:
        read = [read_thinned(path, TRAIN, most) for path in paths]
    key = metric if kind == split else "loss"
    drawn = []
    for place, (row, lines) in enumerate(zip(order, read, strict=True)):
        name = " ".join(row["overrides"]) or f"trial {row['trial']}"
        is_best = not place and row.get("objective") is not None
        if is_best:
            level = 1
        else:
            level = -1 if len(order) > 6 else 0
        drawn.append(
            Curve(
                name,
                [line["step"] for line in lines],
                [line.get(key) for line in lines],
                level=level,
            )
        )
    values = [value for curve in drawn for value in curve.y if value is not None]
    is_log = key == "loss" and bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    caption = f"{f'{split.capitalize()} {key}' if kind == split else 'Training loss'} of all trials"
    caption += (
        "; the best one is thick."
        if any(row.get("objective") is not None for row in order)
        else "."
    )
    axis = Axis(key, log=is_log, percent=key in PERCENT)
    if all(len({*curve.x}) < 2 for curve in drawn):  # a point says no more than the table
        return Plot("Curves", None)
    return Plot("Curves", curves(drawn, Axis("optimizer step"), axis), caption, full=True)


def _axis(key: str, values: Sequence[Any]) -> Axis:
    numbers = [value for value in values if isinstance(value, int | float)]
    is_log = (
        len(numbers) == len(values) > 0
        and min(numbers) > 0
        and max(numbers) >= LOG_RATIO * min(numbers)
    )
    tried = sorted({*numbers})
    return Axis(key, log=is_log, ticks=tried if len(tried) <= MOST_TICKS else ())


def _against(scored: Sequence[Row], objective: str) -> list[Plot]:
    """The objective against each parameter."""
    keys = [
        key
        for key in parameters(scored)
        if len({str(values_of(row).get(key)) for row in scored}) > 1
    ]
    y = Axis(objective, percent=objective.rpartition(".")[2] in PERCENT)
    names = [" ".join(row["overrides"]) for row in scored]
    if len(keys) < FEWEST_AXES:
        return [Plot(f"{objective} by {key}", _dots(scored, key, names, y)) for key in keys]
    columns = {key: [values_of(row).get(key) for row in scored] for key in keys}
    points = [
        Point(name, [*(columns[key][at] for key in keys), row["objective"]], strong=not at)
        for at, (name, row) in enumerate(zip(names, scored, strict=True))
    ]
    axes = [*(_axis(key, columns[key]) for key in keys), y]
    return [
        Plot(
            "Parameters",
            parallel(points, axes),
            "A line is a trial; the best one is thick.",
            full=True,
        )
    ]


def _dots(scored: Sequence[Row], key: str, names: Sequence[str], y: Axis) -> Chart | None:
    points = [
        Point(name, [values_of(row).get(key), row["objective"]], strong=not at)
        for at, (name, row) in enumerate(zip(names, scored, strict=True))
    ]
    return scatter(points, _axis(key, [point.values[0] for point in points]), y)
