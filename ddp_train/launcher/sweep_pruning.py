"""Trials that a sweeper may end before their time: what they have scored so far, and the sign that they are ended.

The sweeper is hydra/sweeper=pool_optuna, in hydra_plugins/ddp_train_pool, which knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from ddp_train.config.metrics import AUTO, objective_name
from ddp_train.telemetry.metrics_log import METRICS

FILE = "pruned.json"
"""In the run directory of a trial that is to end: whoever finds it there writes the row."""


def reports(run_dir: Path, objective: str) -> list[float]:
    """The objective at each evaluation so far. A resumed run takes lines back, and writes as many again."""
    found: dict[str, list[float]] = {"validation": [], "test": []}
    try:
        text = (run_dir / METRICS).read_text()
    except OSError:
        return []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the last one, half written
            values = json.loads(line)
            split, _, metric = objective_name(objective, values["kind"] == "validation").partition(".")
            if values["kind"] == split and metric in values:
                found[split].append(math.nan if values[metric] is None else float(values[metric]))
    return found["validation"] or found["test"] if objective == AUTO else found["validation"] + found["test"]


def mark(run_dir: Path, evaluations: int, value: float) -> None:
    """Before a trial is stopped. A disk that is full keeps it from no stop."""
    told = {"evaluations": evaluations, "last_value": value if math.isfinite(value) else None}
    with contextlib.suppress(OSError):
        run_dir.mkdir(exist_ok=True)
        part = run_dir / (FILE + ".part")
        part.write_text(json.dumps(told))
        part.replace(run_dir / FILE)


def marked(run_dir: Path) -> dict[str, Any] | None:
    """What a row says of a trial that is to end; None: it is not."""
    try:
        told = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError):
        return None
    return {"status": "pruned", "exit_code": 0, **told}
