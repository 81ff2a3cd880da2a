"""The table of a sweep's trials."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

TABLED = {"test.accuracy": "accuracy", "test.loss": "loss", "seconds": "seconds", "samples_per_second": "samples/s"}
"""Objectives that have a column in any case."""


def table(rows: list[dict[str, Any]], objective: str, at_once: int) -> Table:
    title = "trials" if at_once == 1 else f"trials, {at_once} at a time on one host"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    own = [] if objective in TABLED else [objective]
    for heading in ("trial", "overrides", "status", *own, "accuracy", "loss", "seconds", "samples/s"):
        is_text = heading in ("overrides", "status")
        shown.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        formats = (
            *[("objective", ".4f") for _ in own],
            ("accuracy", ".2%"),
            ("loss", ".4f"),
            ("seconds", ".1f"),
            ("samples_per_second", ",.0f"),
        )
        numbers = [format(row[name], spec) if row.get(name) is not None else "-" for name, spec in formats]
        status = row["status"] if row["status"] == "completed" else f"failed ({row['exit_code']}): {row['kind']}"
        shown.add_row(str(row["trial"]), " ".join(row["overrides"]), status, *numbers)
    return shown
