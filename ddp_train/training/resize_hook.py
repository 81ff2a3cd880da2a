"""Notes in metrics.jsonl that another number of processes has taken over, and how long that took."""

from __future__ import annotations

import sys
import time
from typing import Any

from ddp_train.training.hooks import RESIZE, MetricsHook
from ddp_train.training.loop import Job


class ResizeHook:
    """Acts once, with the first step that the new number of processes has done. To be the first of the hooks: its line
    is of an earlier step than theirs."""

    def __init__(self, record: MetricsHook, change: dict[str, Any], first_step: int) -> None:
        """change: see `launcher.size.Change`. It is handed to each later start too, which finds it noted."""
        self.record, self.change, self.first_step = record, change, first_step
        self.is_noted = any(line["time"] == change["time"] for line in record.resizes)

    def due(self, job: Job) -> int:
        return sys.maxsize if self.is_noted else self.first_step + 1

    def act(self, job: Job) -> None:
        if self.is_noted or job.step <= self.first_step:
            return
        self.is_noted = True
        facts = {name: self.change[name] for name in ("time", "from", "to", "why")}
        line = {"kind": RESIZE, "step": self.first_step, **facts, "seconds": time.monotonic() - self.change["at"]}
        self.record.metrics.write(**line)
        self.record.resizes.append(line)
