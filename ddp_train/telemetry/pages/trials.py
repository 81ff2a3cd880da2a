"""Trials of a sweep: their order, their table, and how they ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp_train.scored_sets import KINDS, TEST, in_order, sets_of
from ddp_train.telemetry.pages.run_files import COMPLETED, FAILED, RUNNING, STOPPED, main_metric
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import column_of, in_column
from ddp_train.text import counted

MOST_COLUMNS = 10
"""Most columns of a table; of more, a page shows those of the sweep, the others on demand."""
OTHER_COLUMNS = {
    "accuracy": "test.accuracy %",
    "loss": "test.loss",
    "seconds": "seconds",
    "samples_per_second": "samples/s",
}
"""Columns beside the objective and the parameters, by the fields of a row."""
Row = dict[str, Any]
"""A line of results.jsonl."""


def overrides_of(row: Row) -> dict[str, str]:
    """The values of a trial by their keys, as they were typed."""
    return dict(override.split("=", 1) for override in row["overrides"])


def parameters(rows: Sequence[Row]) -> list[str]:
    """The keys that the sweep varies."""
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(overrides_of(row))
    return list(keys)


def number_or_text(text: str) -> int | float | str:
    """A finite number; any other text stays as it is."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def ranked(rows: Sequence[Row], better: str | None) -> list[Row]:
    """The best first; those without the objective last."""
    sign = -1 if better == "max" else 1

    def rank(row: Row) -> tuple[bool, float, int]:
        value = row.get("objective")
        return value is None, sign * (value or 0.0), row["trial"]

    return sorted(rows, key=rank)


def trials_table(
    rows: Sequence[Row], objective: str, at_once: int = 1, note: str = "", digits: int = 17
) -> Table:
    """A row for each trial, a column for each parameter.

    The objective comes first: on a phone it is in sight.

    at_once: number of trials that ran at the same time.
    digits: of a value that was drawn.
    """
    others = _other_columns(rows, objective)
    keys = parameters(rows)
    lines = []
    for row in rows:
        texts = overrides_of(row)
        values = [_rounded(texts[key], digits) if key in texts else None for key in keys]
        measured = [in_column(name, _value_of(row, name)) for name in others]
        score = in_column(objective, row.get("objective"))
        lines.append([row["trial"], score, *values, _status(row), *measured])
    title = "trials"
    if at_once > 1:
        title += f", {at_once} at a time on one host"
    name = column_of(objective)
    columns = ["trial", name, *keys, "status"]
    first = columns if len(columns) + len(others) > MOST_COLUMNS else ()
    columns = [*columns, *others.values()]
    return Table(title, columns, lines, note, first, kept=(name, "status"))


def _other_columns(rows: Sequence[Row], objective: str) -> dict[str, str]:
    """The further columns that have a value, those of the user's metrics and of named sets last.

    A set with a name of its own has its metric of most interest there. The objective is not among
    them.
    """
    columns = {}
    for name, label in OTHER_COLUMNS.items():
        is_known = any(row.get(name) is not None for row in rows)
        if is_known and objective not in (name, f"test.{name}"):
            columns[name] = label
    for row in rows:
        for name in row.get("metrics") or {}:
            own_name = f"test.{name}"
            if objective != own_name:
                columns[own_name] = own_name
    names = dict.fromkeys(name for row in rows for name in sets_of(row) if name not in KINDS)
    for split in in_order(names):
        metrics = {metric for row in rows for metric in row.get(split) or {}}
        name = f"{split}.{main_metric(metrics)}"
        if name != objective:
            columns[name] = column_of(name)
    return columns


def _value_of(row: Row, name: str) -> Any:
    """A field of a row, a metric of the user's, `test.distance`, or a metric of a further set:
    `validation/noisy.accuracy`."""
    split, _, metric = name.partition(".")
    if split == TEST:
        return (row.get("metrics") or {}).get(metric)
    if metric:
        return (row.get(split) or {}).get(metric)
    return row.get(name)


def _rounded(text: str, digits: int) -> str:
    """A number with at most so many digits; any other text stays as it is."""
    value = number_or_text(text)
    typed_digits = text.strip("-0.").replace(".", "")
    if isinstance(value, float) and len(typed_digits) > digits:
        return f"{value:.{digits}g}"
    return text


def _status(row: Row) -> str:
    status = row["status"]
    if status == "pruned":
        return f"pruned after {counted(row['evaluations'], 'evaluation')}"
    if is_stopped(row):
        return f"stopped ({row['exit_code']})"
    if status == FAILED:
        return f"failed ({row['exit_code']}): {row.get('kind')}"
    return status


def is_stopped(row: Row) -> bool:
    """Tell whether a trial was stopped by a request, which is not a failure."""
    return row.get("kind") == STOPPED


def has_failed(row: Row) -> bool:
    return row["status"] == FAILED and not is_stopped(row)


def count_running(rows: Sequence[Row]) -> int:
    return sum(row["status"] == RUNNING for row in rows)


def state_of(rows: Sequence[Row], total: int) -> str:
    """The state of a sweep, in words. total: number of its trials; 0: unknown."""
    count = max(total, len(rows))
    missing = count - len(rows)
    failed = sum(map(has_failed, rows))
    if missing or any(map(is_stopped, rows)):
        completed = sum(row["status"] == COMPLETED for row in rows)
        state = f"{STOPPED}: {completed} of {counted(count, 'trial')} completed"
        if failed:
            state += f", {failed} failed"
        if missing:
            state += f", {missing} not begun"
        return state
    if failed:
        return f"{FAILED}: {failed} of {counted(count, 'trial')}"
    return COMPLETED
