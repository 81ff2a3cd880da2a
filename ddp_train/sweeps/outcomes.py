"""The end of a trial: the fields of its row, its value for the sweeper, its terminal line."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

from ddp_train.config.metrics import read_objective
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.options.schema import Config
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.preemption import SIGNALS, UNSAVED
from ddp_train.scored_sets import KINDS, TEST, sets_of
from ddp_train.telemetry.score_lines import shown_metric, users_metrics
from ddp_train.text import did_you_mean, first_line
from hydra_plugins.ddp_train_pool import Pruned

OF_ROWS = (
    "trial",
    "overrides",
    "words",
    "tied_to_seed",
    "at_once",
    "alone",
    "run_dir",
    "exit_code",
    "kind",
    "reason",
    "evaluations",
    "last_value",
    "metrics",
    *KINDS,
)
"""Fields of a row that no metric of the user's replaces; it stands in `metrics` all the same."""


class TrialValue(float):
    """The value that a trial in another process returns, with its row."""

    row: dict[str, Any]


def value_of(row: dict[str, Any]) -> float:
    """The value that a sweeper gets for a trial that has ended."""
    if row["status"] == "pruned":
        last = row.get("last_value")
        return Pruned(math.nan if last is None else last)
    objective = row.get("objective")
    return math.nan if objective is None else objective


def completed_outcome(config: Config) -> dict[str, Any]:
    """The fields of a trial that was completed. Raises ConfigError if it has no such objective."""
    summary = json.loads((Path(str(config.run_dir)) / SUMMARY).read_text())
    try:
        name, value, better = read_objective(config.objective, summary)
    except KeyError:
        known = [f"{name}.{metric}" for name in sets_of(summary) for metric in summary[name]]
        problem = (
            f"objective={config.objective}: the run has no such number; it has {', '.join(known)}"
        )
        raise ConfigError([problem + did_you_mean(config.objective, known)]) from None
    scores = summary.get(TEST) or {}
    fields = {
        **{name: value for name, value in scores.items() if name not in OF_ROWS},
        "status": "completed",
        "objective": value,
        "objective_name": name,
        "better": better,
        "seconds": summary["seconds"],
        "samples_per_second": summary.get("samples_per_second"),
    }
    own = users_metrics(scores)
    if own:
        fields["metrics"] = {name: scores[name] for name in own}
    for name in sets_of(summary):
        if name != TEST:
            fields[name] = summary[name]
    return fields


def failed_outcome(run_dir: Path) -> dict[str, Any]:
    """The fields of a trial that has failed, or was stopped."""
    path = run_dir / FAILURE
    if not path.exists():
        return {"kind": "stopped", "reason": "stopped"}
    failure = json.loads(path.read_text())
    return {"kind": failure["kind"], "reason": failure["detail"]}


def dead_outcome(exit_code: int, value: Any = None) -> dict[str, Any]:
    """The fields of a trial whose launcher left no row.

    exit_code: of the launcher; negative for a signal.
    value: what the trial returned, or raised.
    """
    died = {"exit_code": LaunchError.exit_code, "kind": "died"}
    if isinstance(value, Exception) and exit_code == 1:  # in our own code, or not composed
        return {**died, "reason": f"{type(value).__name__}: {first_line(value)}"}
    if exit_code >= 0:
        code = exit_code or LaunchError.exit_code
        return {**died, "exit_code": code, "reason": "the trial ended without a result"}
    name = signal.Signals(-exit_code).name
    if -exit_code in SIGNALS:
        reason = f"stopped by {name} before the trial began"
        return {"exit_code": UNSAVED, "kind": "stopped", "reason": reason}
    return {**died, "reason": f"the trial's launcher was killed by {name}"}


def end_line(row: dict[str, Any], log: Path) -> str:
    """The end of a trial in a line. log: the file with what it has printed."""
    if row["status"] == "completed":
        value = row.get("objective")
        if value is None:
            return "completed"
        name = row.get("objective_name", "")
        return f"completed  {name} {shown_metric(name.rpartition('.')[2], value)}"
    if row["status"] == "pruned":
        return f"pruned after {row['evaluations']} evaluations, at {row['last_value']}"
    if row.get("kind") == "stopped":
        return f"stopped ({row['exit_code']})  log: {log}"
    return f"failed ({row['exit_code']})  {_fatal_line(log) or row['reason']}  log: {log}"


def _fatal_line(log: Path) -> str:
    """The last line of a log that says why a trial failed; empty without one."""
    if not log.exists():
        return ""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith("FATAL"):
            return line
    return ""
