"""Trials of a sweep: their order, their table, and how they ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp_train.telemetry.pages.run_files import COMPLETED, FAILED, RUNNING, STOPPED
from ddp_train.telemetry.pages.seeds import Row
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import PERCENT
from ddp_train.text import counted

MOST_COLUMNS = 10
"""Of a table, beyond which a page shows those of the sweep, and the others on demand."""
OTHER_COLUMNS = {
    "accuracy": "test.accuracy %",
    "loss": "test.loss",
    "seconds": "seconds",
    "samples_per_second": "samples/s",
}
"""Columns beside the objective and the parameters."""


def parameters(rows: Sequence[Row]) -> list[str]:
    """The keys that the sweep varies."""
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(_texts_of(row))
    return list(keys)


def _texts_of(row: Row) -> dict[str, str]:
    """The values of a trial by their keys, as they were typed."""
    return dict(override.split("=", 1) for override in row["overrides"])


def values_of(row: Row) -> dict[str, Any]:
    """The values of a trial by their keys, numbers as such."""
    return {key: _number(text) for key, text in _texts_of(row).items()}


def _number(text: str) -> Any:
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
    metric = objective.rpartition(".")[2]
    others = _other_columns(rows, objective)
    keys = parameters(rows)
    table = []
    for row in rows:
        texts = _texts_of(row)
        shown = [_rounded(texts[key], digits) if key in texts else None for key in keys]
        value = _scaled(metric, row.get("objective"))
        measured = [_scaled(name, row.get(name)) for name in others]
        table.append([row["trial"], value, *shown, _status(row), *measured])
    title = "trials"
    if at_once > 1:
        title += f", {at_once} at a time on one host"
    name = f"{objective} %" if metric in PERCENT else objective
    columns = ["trial", name, *keys, "status", *others.values()]
    first: Sequence[str] = ()
    if len(columns) > MOST_COLUMNS and others:
        first = columns[: -len(others)]
    return Table(title, columns, table, note, first, kept=(name, "status"))


def _other_columns(rows: Sequence[Row], objective: str) -> dict[str, str]:
    """The further columns that have a value, without the objective."""
    split, _, metric = objective.rpartition(".")
    columns = {}
    for name, label in OTHER_COLUMNS.items():
        is_objective = name == metric and split in ("test", "")
        is_known = any(row.get(name) is not None for row in rows)
        if is_known and not is_objective:
            columns[name] = label
    return columns


def _scaled(metric: str, value: float | None) -> float | None:
    if value is not None and metric in PERCENT:
        return 100.0 * value
    return value


def _rounded(text: str, digits: int) -> str:
    """A number with at most so many digits; any other text stays as it is."""
    value = _number(text)
    typed_digits = text.strip("-0.").replace(".", "")
    if isinstance(value, float) and len(typed_digits) > digits:
        return f"{value:.{digits}g}"
    return text


def _status(row: Row) -> str:
    if row["status"] in (COMPLETED, RUNNING):
        return str(row["status"])
    if row["status"] == "pruned":
        return f"pruned after {counted(row['evaluations'], 'evaluation')}"
    if is_stopped(row):
        return f"stopped ({row['exit_code']})"
    return f"failed ({row['exit_code']}): {row.get('kind')}"


def is_stopped(row: Row) -> bool:
    """Whether a trial was stopped by a request, which is no failure."""
    return row.get("kind") == STOPPED


def has_failed(row: Row) -> bool:
    return row["status"] == FAILED and not is_stopped(row)


def state_of(rows: Sequence[Row], total: int) -> str:
    """How a sweep ended.

    total: number of its trials; 0: unknown.
    """
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
