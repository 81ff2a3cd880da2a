"""Trials that a sweeper may end before their time: their values so far, and the mark of their end.

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

from ddp_train.config.metrics import objective_name
from ddp_train.resilience.whole_files import write_text
from ddp_train.scored_sets import is_set
from ddp_train.telemetry.json_files import parse_objects, read_object
from ddp_train.telemetry.metrics_log import METRICS

FILE = "pruned.json"
"""In the run directory of a trial that is to end: whoever finds it there writes the row."""


class ObjectiveValues:
    """The objective at each evaluation of a run so far.

    It is read ten times a second: only what is new is parsed.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS
        self.inode = 0
        self.offset = 0
        self.evaluations: list[dict[str, Any]] = []

    def read(self, objective: str) -> list[float]:
        """The values, in their order."""
        self._read_lines()
        sets = dict.fromkeys(line["kind"] for line in self.evaluations)
        split, _, metric = objective_name(objective, sets).partition(".")
        lines = [line for line in self.evaluations if line["kind"] == split and metric in line]
        values = [line[metric] for line in lines]
        return [math.nan if value is None else float(value) for value in values]

    def _read_lines(self) -> None:
        """Read new lines.

        A resumed run replaces the file by one without the steps that it computes again.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.inode = status.st_ino
                    self.offset = 0
                    self.evaluations = []
                file.seek(self.offset)
                content = file.read()
        except OSError:
            self.evaluations = []
            self.inode = 0
            return
        whole = content[: content.rfind(b"\n") + 1]  # the last line may be half written
        self.offset += len(whole)
        for line in parse_objects(whole):
            if is_set(str(line.get("kind"))):
                self.evaluations.append(line)


def mark_pruned(run_dir: Path, evaluations: int, value: float) -> None:
    """Mark a trial that is to be stopped. A full disk does not prevent that."""
    mark = {"evaluations": evaluations, "last_value": value if math.isfinite(value) else None}
    with contextlib.suppress(OSError):
        run_dir.mkdir(exist_ok=True)
        write_text(run_dir / FILE, json.dumps(mark))


def remove_mark(run_dir: Path) -> None:
    """Remove the mark of a trial that is to run again, whose end it would explain."""
    with contextlib.suppress(OSError):
        (run_dir / FILE).unlink()


def pruned_outcome(run_dir: Path) -> dict[str, Any] | None:
    """The fields of a pruned trial's row; None: the trial was not pruned."""
    try:
        mark = read_object(run_dir / FILE)
    except OSError:
        return None
    if not mark:
        return None
    return {"status": "pruned", "exit_code": 0, **mark}
