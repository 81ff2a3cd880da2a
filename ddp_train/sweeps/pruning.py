"""Trials that a sweeper may end before their time: what they have scored so far, and the sign that
they are ended.

The sweeper is hydra/sweeper=pool_optuna, in hydra_plugins/ddp_train_pool, which knows nothing of
runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from ddp_train.config.metrics import SPLITS, objective_name
from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.metrics_log import METRICS

FILE = "pruned.json"
"""In the run directory of a trial that is to end: whoever finds it there writes the row."""


class Reports:
    """The objective at each evaluation of a run so far. Asked ten times a second: it reads what is
    new."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS
        self.file = 0
        self.place = 0
        """Which file it was, and how far it was read."""
        self.lines: list[dict[str, Any]] = []

    def read(self, objective: str) -> list[float]:
        """A resumed run puts a new file in the place of the old one, without the steps that it
        computes again."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self.file or facts.st_size < self.place:
                    self.file = facts.st_ino
                    self.place = 0
                    self.lines = []
                file.seek(self.place)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self.place += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                self.lines += [values] if values.get("kind") in SPLITS else []
        name = objective_name(objective, any(line["kind"] == "validation" for line in self.lines))
        split, _, metric = name.partition(".")
        values = [line[metric] for line in self.lines if line["kind"] == split and metric in line]
        return [math.nan if value is None else float(value) for value in values]


def mark(run_dir: Path, evaluations: int, value: float) -> None:
    """Before a trial is stopped. A disk that is full keeps it from no stop."""
    told = {"evaluations": evaluations, "last_value": value if math.isfinite(value) else None}
    with contextlib.suppress(OSError):
        run_dir.mkdir(exist_ok=True)
        write_text(run_dir / FILE, json.dumps(told))


def unmark(run_dir: Path) -> None:
    """Before it goes on, or its end would be that of a pruned trial again."""
    with contextlib.suppress(OSError):
        (run_dir / FILE).unlink()


def marked(run_dir: Path) -> dict[str, Any] | None:
    """What a row says of a trial that is to end; None: it is not."""
    try:
        told = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError):
        return None
    return {"status": "pruned", "exit_code": 0, **told}
