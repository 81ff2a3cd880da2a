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

    def __init__(self, record: MetricsHook, changes: list[dict[str, Any]], first_step: int) -> None:
        """changes: see `launcher.size.Change`. Each later start gets them too, and finds them noted. One that another
        followed before a step was done took no time that could be told."""
        self.record, self.first_step = record, first_step
        noted = {line["time"] for line in record.resizes}
        self.last, self.changes = changes[-1], [change for change in changes if change["time"] not in noted]

    def due(self, job: Job) -> int:
        return self.first_step + 1 if self.changes else sys.maxsize

    def act(self, job: Job) -> None:
        if job.step <= self.first_step:
            return
        for change in self.changes:
            facts = {name: change[name] for name in ("time", "from", "to", "why")}
            seconds = time.monotonic() - change["at"] if change is self.last else None
            line = {"kind": RESIZE, "step": self.first_step, **facts, "seconds": seconds}
            self.record.metrics.write(**line)
            self.record.resizes.append(line)
        self.changes = []
