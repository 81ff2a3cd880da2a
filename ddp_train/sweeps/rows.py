"""The rows of a sweep's results.jsonl: appended by each trial as it ends, from any process or host,
and found again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ddp_train.config.metrics import SPLITS, read_objective
from ddp_train.config.prepare import SWEEP_RESULTS as RESULTS
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.options.schema import Config
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.preemption import SIGNALS, UNSAVED
from ddp_train.sweeps import sweep_overrides as sweep_words
from ddp_train.telemetry.score_lines import shown_metric
from ddp_train.text import did_you_mean, first_line
from hydra_plugins.ddp_train_pool._jobs import Pruned


@contextlib.contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """A file of lines, for this process alone. Raises OSError."""
    with path.open("ab+", buffering=0) as file:
        fcntl.flock(
            file, fcntl.LOCK_EX
        )  # trials in other processes, and on other hosts, append to the file too
        yield file


def add_line(file: BinaryIO, values: dict[str, Any]) -> None:
    """Adds a line. What a process that was killed has left of one is ended first. Raises OSError;
    then nothing is added."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    torn = size and file.read(1) != b"\n"
    line = b"\n" * bool(torn) + json.dumps(values, allow_nan=False).encode() + b"\n"
    try:
        while (
            line
        ):  # a disk that becomes full within the line takes a part of it, and says why at the next
            line = line[file.write(line) :]
    except OSError:
        file.truncate(size)
        raise


def lines_of(file: BinaryIO, begin: int = 0) -> list[dict[str, Any]]:
    """The lines from a place on. One that is cut off is none."""
    file.seek(begin)
    found = []
    for line in file.read().splitlines():
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            found += [values] if isinstance(values, dict) else []
    return found


def read_lines(path: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The same of a file that need not be there, or is a device, which has no end."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return lines_of(file, begin)


def append(sweep_dir: Path, row: dict[str, Any]) -> None:
    """Adds a row. Raises OSError."""
    with locked(sweep_dir / RESULTS) as file:
        add_line(file, row)


class Writer:
    """Adds rows. One that the disk has no room for is added with a later one: that ends no
    sweep."""

    def __init__(self, sweep_dir: Path) -> None:
        self.sweep_dir = sweep_dir
        self.path = sweep_dir / RESULTS
        self.waiting: list[dict[str, Any]] = []
        self.told = False

    def add(self, *rows: dict[str, Any]) -> bool:
        """Whether all are in the file."""
        self.waiting += rows
        try:
            while self.waiting:
                append(self.sweep_dir, self.waiting[0])
                del self.waiting[0]
        except OSError as error:
            if not self.told:
                self.told = True
                print(
                    f"note: {self.path} cannot be written: {error}; it is tried again after each"
                    " trial",
                    file=sys.stderr,
                )
        return not self.waiting


class Scored(float):
    """What a trial returns, with its row: the results file may have had no room for it."""

    row: dict[str, Any]
    is_written: bool


def value_of(row: dict[str, Any]) -> float:
    """What a sweeper gets for a trial that has ended."""
    if row["status"] == "pruned":
        return Pruned(math.nan if row.get("last_value") is None else row["last_value"])
    if row.get("objective") is None:
        return math.nan
    return row["objective"]


def size(sweep_dir: Path) -> int:
    """Where the next row begins, in bytes."""
    path = sweep_dir / RESULTS
    return path.stat().st_size if path.exists() else 0


def read(sweep_dir: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The rows from a place on."""
    return [
        row for row in read_lines(sweep_dir / RESULTS, begin) if {"trial", "status"} <= row.keys()
    ]


def by_trial(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of their numbers; the last one of those with the same number."""
    return [row for _, row in sorted({row["trial"]: row for row in rows}.items())]


def of_sweep(swept: set[str], fixed: set[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that vary the same keys, and have the same other words; a run of `sweep.baseline`
    varies none."""
    return by_trial(
        [
            row
            for row in rows
            if "alone" not in row
            and set(map(sweep_words.key, row["overrides"])) == swept
            and sweep_words.compared(row["words"], swept) == fixed
        ]
    )


def ended_before(sweep_dir: Path, words: list[str], pruned: bool) -> dict[str, Any] | None:
    """The row of a trial with the same words that an earlier start of this sweep has completed.
    pruned: or pruned."""
    ends = ("completed", "pruned") if pruned else ("completed",)
    done = [row for row in read(sweep_dir) if row["status"] in ends and "alone" not in row]
    found = [row for row in done if row.get("words") == sorted(words)]
    return found[-1] if found else None


def death(exit_code: int, value: Any = None) -> dict[str, Any]:
    """Of a trial whose launcher left no row. value: what it has returned, or raised."""
    if (
        isinstance(value, Exception) and exit_code == 1
    ):  # it could not be composed, or has failed in our own code
        reason = f"{type(value).__name__}: {first_line(value)}"
        return {"exit_code": LaunchError.exit_code, "kind": "died", "reason": reason}
    if exit_code >= 0:
        return {
            "exit_code": exit_code or LaunchError.exit_code,
            "kind": "died",
            "reason": "it has ended without a row",
        }
    name = signal.Signals(-exit_code).name
    if -exit_code in SIGNALS:
        return {
            "exit_code": UNSAVED,
            "kind": "stopped",
            "reason": f"stopped by {name} before it began",
        }
    return {
        "exit_code": LaunchError.exit_code,
        "kind": "died",
        "reason": f"its launcher was killed by {name}",
    }


def fatal_line(log: Path) -> str:
    """The first line of a trial's output that says why it failed."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.startswith("FATAL")), "")


def outcome(config: Config) -> dict[str, Any]:
    """Of a trial that was completed. Raises ConfigError if it has no such objective."""
    summary = json.loads((Path(str(config.run_dir)) / SUMMARY).read_text())
    try:
        name, value, better = read_objective(config.objective, summary)
    except KeyError:
        known = [f"{split}.{metric}" for split in SPLITS for metric in summary.get(split) or {}]
        problem = (
            f"objective={config.objective}: the run has no such number; it has {', '.join(known)}"
        )
        raise ConfigError([problem + did_you_mean(config.objective, known)]) from None
    validation = summary.get("validation")
    return {
        "status": "completed",
        "objective": value,
        "objective_name": name,
        "better": better,
        **({"validation": validation} if validation else {}),
        **summary["test"],
        "seconds": summary["seconds"],
        "samples_per_second": summary.get("samples_per_second"),
    }


def failure(run_dir: str) -> dict[str, Any]:
    path = Path(run_dir) / FAILURE
    if path.exists():
        failure = json.loads(path.read_text())
    else:
        failure = {"kind": "stopped", "detail": "stopped"}
    return {"kind": failure["kind"], "reason": failure["detail"]}


def ended(row: dict[str, Any], log: Path) -> str:
    """The end of a trial in a line. log: what it has printed."""
    if row["status"] == "completed":
        name = row.get("objective_name", "")
        value = row.get("objective")
        if value is None:
            return "completed"
        return f"completed  {name} {shown_metric(name.rpartition('.')[2], value)}"
    if row["status"] == "pruned":
        return f"pruned after {row['evaluations']} evaluations, at {row['last_value']}"
    if row.get("kind") == "stopped":
        return f"stopped ({row['exit_code']})  log: {log}"
    return f"failed ({row['exit_code']})  {fatal_line(log) or row['reason']}  log: {log}"
