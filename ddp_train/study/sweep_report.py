"""The report of a Hydra sweep (`-m`), in the formats of a study's report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ddp_train.study import results
from ddp_train.study.provenance import provenance
from ddp_train.study.trials import Outcome, read_outcome
from ddp_train.telemetry.pages.charts import Axis, Bar, bars
from ddp_train.telemetry.pages.page import write
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table
from ddp_train.text import first_line


def gather(sweep_dir: Path, rows: list[dict[str, Any]], objective: str, command: str) -> Path:
    """Writes the report of a sweep into its directory. Returns the page's path.

    rows: of results.jsonl. objective: the metric that the sweep optimizes. command: that of the sweep.
    """
    found = {row["trial"]: read_outcome(sweep_dir / str(row["trial"]), row["exit_code"], 0.0) for row in rows}
    columns = ["trial", "overrides", "result", objective, "test accuracy %", "test loss", "s/epoch", "samples/s", "s"]
    table = Table("Trials", columns, [_row(row, found[row["trial"]]) for row in rows], _NOTE)
    shown = [Bar(" ".join(row["overrides"]), row.get("objective"), text=_failed(row)) for row in rows]
    plot = Plot(objective, bars(shown, Axis(objective)))
    intro = f"One run for each combination, each in new processes; the sweep optimizes {objective}."
    return write(Report("Sweep", intro, [table, plot], provenance(), [command]), sweep_dir)


def print_report(sweep_dir: Path, rows: list[dict[str, Any]], objective: str, command: str) -> None:
    """Writes the page and says where it is; a failure is only a note, since the trials' results stand."""
    try:
        print(f"report {gather(sweep_dir, rows, objective, command)}")
    except Exception as error:  # noqa: BLE001  whatever it is
        print(f"note: no report: {type(error).__name__}: {first_line(error)}", file=sys.stderr)


_NOTE = "One run each, so noise is unknown. s/epoch: the median, without the first epoch if there are several."


def _row(row: dict[str, Any], found: Outcome) -> list[Any]:
    result = "completed" if row["status"] == "completed" else row.get("reason", row["status"])
    epoch = (results.epoch_seconds(found), results.samples_per_second(found)) if found.completed else (None, None)
    accuracy = row.get("accuracy")
    percent = None if accuracy is None else 100 * accuracy
    values = row.get("objective"), percent, row.get("loss"), *epoch, row.get("seconds")
    return [row["trial"], " ".join(row["overrides"]), result, *values]


def _failed(row: dict[str, Any]) -> str:
    return "" if row["status"] == "completed" else str(row.get("kind", row["status"]))
