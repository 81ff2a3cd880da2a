"""The page of a sweep: the best trial first, what each parameter did, and what of it is noise."""

from __future__ import annotations

import math
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
    COMPLETED,
    FAILED,
    RUNNING,
    STOPPED,
    TRAIN,
    read_run,
)
from ddp_train.telemetry.pages.run_page import near, uses
from ddp_train.telemetry.pages.seeds import Row, SeedGroups
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import PERCENT, shown_metric
from ddp_train.text import counted, word

FEWEST_AXES = 3
"""Parameters from which parallel axes show more than a plot for each."""
LOG_RATIO = 10.0
"""Of the largest to the smallest value of a parameter, from which its axis is logarithmic."""
MOST_TICKS = 8
"""Values of a parameter up to which its axis names these and no others."""
POINTS = 30_000
"""Of all curves of a plot together: 0.6 MB."""
MOST_CURVES = 300
MOST_COLUMNS = 10
"""Of a table, beyond which a page shows what belongs to the sweep, and the others on demand."""


def parameters(rows: Sequence[Row]) -> list[str]:
    """The keys that the sweep varies."""
    return list(dict.fromkeys(word.partition("=")[0] for row in rows for word in row["overrides"]))


def values_of(row: Row) -> dict[str, Any]:
    """The value of each key that is varied, numbers as such."""
    return {
        key: _number(value) for key, _, value in (word.partition("=") for word in row["overrides"])
    }


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text


def ranked(rows: Sequence[Row], better: str | None) -> list[Row]:
    """The best first; those without the objective last."""
    sign = -1 if better == "max" else 1
    return sorted(
        rows,
        key=lambda row: (
            row.get("objective") is None,
            sign * (row.get("objective") or 0.0),
            row["trial"],
        ),
    )


def trials_table(
    rows: Sequence[Row], objective: str, at_once: int = 1, note: str = "", digits: int = 17
) -> Table:
    """A row for each trial, a column for each parameter. The objective stands first: on a phone it
    is in sight. digits: of a value that was drawn."""
    keys = parameters(rows)
    typed = [dict(word.split("=", 1) for word in row["overrides"]) for row in rows]
    typed = [{key: _rounded(value, digits) for key, value in given.items()} for given in typed]
    others = {"accuracy": "test.accuracy %", "loss": "test.loss", "seconds": "seconds"}
    others["samples_per_second"] = "samples/s"
    split, _, metric = objective.rpartition(".")
    if split in ("test", ""):
        others.pop(metric, None)
    percent = 100.0 if metric in PERCENT else 1.0
    others = {
        name: label
        for name, label in others.items()
        if any(row.get(name) is not None for row in rows)
    }
    table = []
    for row, given in zip(rows, typed, strict=True):
        value = row.get("objective")
        scale = {"accuracy": 100.0}
        table.append(
            [
                row["trial"],
                None if value is None else percent * value,
                *(given.get(key) for key in keys),
                _status(row),
                *(
                    None if row.get(name) is None else scale.get(name, 1.0) * row[name]
                    for name in others
                ),
            ]
        )
    title = "trials" if at_once == 1 else f"trials, {at_once} at a time on one host"
    name = objective + (" %" if percent > 1 else "")
    columns = ["trial", name, *keys, "status", *others.values()]
    first = columns[: -len(others)] if len(columns) > MOST_COLUMNS and others else ()
    return Table(title, columns, table, note, first, kept=(name, "status"))


def _rounded(text: str, digits: int) -> str:
    value = _number(text)
    is_long = isinstance(value, float) and len(text.strip("-0.").replace(".", "")) > digits
    return f"{value:.{digits}g}" if is_long else text


def _status(row: Row) -> str:
    if row["status"] in (COMPLETED, RUNNING):
        return str(row["status"])
    if row["status"] == "pruned":
        return f"pruned after {counted(row['evaluations'], 'evaluation')}"
    if _is_stopped(row):
        return f"stopped ({row['exit_code']})"
    return f"failed ({row['exit_code']}): {row.get('kind')}"


def _is_stopped(row: Row) -> bool:
    return row.get("kind") == STOPPED


def state_of(rows: Sequence[Row], total: int) -> str:
    """How a sweep ended. total: of its trials; 0: unknown."""
    count = max(total, len(rows))
    done = sum(row["status"] == COMPLETED for row in rows)
    failed = sum(row["status"] == FAILED and not _is_stopped(row) for row in rows)
    if len(rows) < count or any(map(_is_stopped, rows)):
        others = f", {failed} failed" * bool(failed) + f", {count - len(rows)} not begun" * (
            len(rows) < count
        )
        return f"{STOPPED}: {done} of {counted(count, 'trial')} completed{others}"
    if failed:
        return f"{FAILED}: {failed} of {counted(count, 'trial')}"
    return COMPLETED


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
    failed = [row for row in rows if row["status"] == FAILED and not _is_stopped(row)]
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
    counts["stopped"] = sum(map(_is_stopped, rows))
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
    if kind == split:
        read = read
    else:
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
