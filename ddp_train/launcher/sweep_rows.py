"""The rows of a sweep's results.jsonl: appended by each trial as it ends, from any process or host, and found again."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path
from typing import Any

from ddp_train.config.metrics import SPLITS, read_objective
from ddp_train.config.schema import Config
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.preemption import SIGNALS, UNSAVED
from ddp_train.text import did_you_mean

RESULTS = "results.jsonl"


def append(sweep_dir: Path, row: dict[str, Any]) -> None:
    """Adds a row in one write. What a process that was killed has left of a line is ended first."""
    with (sweep_dir / RESULTS).open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # trials in other processes, and on other hosts, append to the file too
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        torn = size and file.read(1) != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(row, allow_nan=False).encode() + b"\n")


def size(sweep_dir: Path) -> int:
    """Where the next row begins, in bytes."""
    path = sweep_dir / RESULTS
    return path.stat().st_size if path.exists() else 0


def read(sweep_dir: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The rows from a place on. A line that is cut off is none."""
    path, rows = sweep_dir / RESULTS, []
    if path.exists():
        with path.open("rb") as file:
            file.seek(begin)
            for line in file:
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue
    return rows


def completed_before(sweep_dir: Path, words: list[str]) -> dict[str, Any] | None:
    """The row of a trial with the same words that an earlier start of this sweep has completed."""
    found = [row for row in read(sweep_dir) if row["status"] == "completed" and row.get("words") == sorted(words)]
    return found[-1] if found else None


def death(exit_code: int) -> dict[str, Any]:
    """Of a trial whose launcher left no row."""
    if exit_code >= 0:
        return {"exit_code": exit_code or LaunchError.exit_code, "kind": "died", "reason": "it has ended without a row"}
    name = signal.Signals(-exit_code).name
    if -exit_code in SIGNALS:
        return {"exit_code": UNSAVED, "kind": "stopped", "reason": f"stopped by {name} before it began"}
    return {"exit_code": LaunchError.exit_code, "kind": "died", "reason": f"its launcher was killed by {name}"}


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
        problem = f"objective={config.objective}: the run has no such number; it has {', '.join(known)}"
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
    failure = json.loads(path.read_text()) if path.exists() else {"kind": "stopped", "detail": "stopped"}
    return {"kind": failure["kind"], "reason": failure["detail"]}


def ended(row: dict[str, Any], log: Path) -> str:
    """The end of a trial in a line. log: what it has printed."""
    if row["status"] == "completed":
        value = "" if row.get("objective") is None else f"  {row['objective_name']} {row['objective']:g}"
        return f"completed{value}"
    return f"failed ({row['exit_code']})  {fatal_line(log) or row['reason']}  log: {log}"
