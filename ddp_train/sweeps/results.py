"""results.jsonl of a sweep: a row for each trial, appended as it ends, from any process or host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ddp_train.config.folders import SWEEP_RESULTS as RESULTS
from ddp_train.sweeps.line_file import add_line, locked
from ddp_train.sweeps.overrides import identifying, key_of
from ddp_train.telemetry.json_files import read_objects

ALONE = "alone"
"""In the row of a run of `sweep.baseline`: the trial that it repeats."""


class ResultsWriter:
    """Adds rows. One for which the disk has no room is added with a later one."""

    def __init__(self, sweep_dir: Path) -> None:
        self.sweep_dir = sweep_dir
        self.path = sweep_dir / RESULTS
        self.waiting: list[dict[str, Any]] = []
        self.was_warned = False

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, and those that wait."""
        self.waiting += rows
        try:
            while self.waiting:
                append_row(self.sweep_dir, self.waiting[0])
                del self.waiting[0]
        except OSError as error:
            if not self.was_warned:
                self.was_warned = True
                print(
                    f"note: {self.path} cannot be written: {error}; writing is tried again after"
                    " the next trial",
                    file=sys.stderr,
                )


def append_row(sweep_dir: Path, row: dict[str, Any]) -> None:
    """Add a row. Raises OSError."""
    with locked(sweep_dir / RESULTS) as file:
        add_line(file, row)


def results_size(sweep_dir: Path) -> int:
    """The size of the results file in bytes: the next row begins there."""
    path = sweep_dir / RESULTS
    return path.stat().st_size if path.exists() else 0


def read_rows(sweep_dir: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The rows from a place on, in bytes."""
    lines = read_objects(sweep_dir / RESULTS, begin)
    return [line for line in lines if {"trial", "status"} <= line.keys()]


def by_trial(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each trial, in the order of their numbers."""
    last = {row["trial"]: row for row in rows}
    return [last[number] for number in sorted(last)]


def rows_of_sweep(
    rows: list[dict[str, Any]], swept: frozenset[str], fixed: frozenset[str]
) -> list[dict[str, Any]]:
    """The rows of trials that vary the same keys, and share the same other overrides."""
    own = []
    for row in rows:
        if ALONE in row or {key_of(override) for override in row["overrides"]} != swept:
            continue
        if identifying(row["words"], swept) == fixed:
            own.append(row)
    return by_trial(own)


def ended_row(sweep_dir: Path, overrides: list[str], pruned_counts: bool) -> dict[str, Any] | None:
    """The newest row of a trial with the same overrides that an earlier start has completed.

    pruned_counts: one that was pruned has ended too.
    """
    ends = ("completed", "pruned") if pruned_counts else ("completed",)
    for row in reversed(read_rows(sweep_dir)):
        if row["status"] in ends and ALONE not in row and row.get("words") == sorted(overrides):
            return row
    return None
