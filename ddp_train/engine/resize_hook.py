"""Notes in metrics.jsonl that another number of processes has taken over, and how long that
took."""

from __future__ import annotations

import sys
import time
from typing import Any

from ddp_train.distributed.process_group import from_leader
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import RESIZE, MetricsHook


def changes_of_hosts(
    record: MetricsHook, lost: dict[str, Any] | None, before: int, now: int, device: str
) -> list[dict[str, Any]]:
    """The change, if there is one, from the run's number of processes before this start to `now`.

    A collective: rank 0 alone knows the loss that was noted.

    lost: see `lost_hosts.noted_loss`.
    before: the number of its checkpoint.
    """
    before = from_leader(record.resizes[-1]["to"] if record.resizes else before, device)
    if before == now:
        return []
    if lost:
        why = "a rank was lost"
    else:
        why = "a host joined" if now > before else "a host left"
    change = {
        "from": before,
        "to": now,
        "why": why,
        "at": lost and lost["at"],
        "time": lost["time"] if lost else time.time(),
    }
    return [from_leader(change, device)]


class ResizeHook:
    """Acts once, with the first step that the new number of processes has done. To be the first of
    the hooks: its line is of an earlier step than theirs."""

    def __init__(
        self, record: MetricsHook, changes: list[dict[str, Any]], first_step: int, device: str
    ) -> None:
        """changes: see `launcher.size.Change`. Each later start gets them too, and finds them
        noted. One that another followed before a step was done took no time that could be told. A
        collective: rank 0 alone reads what was noted, and all must act at the same steps."""
        self.record = record
        self.first_step = first_step
        noted = {line["time"] for line in record.resizes}
        left = [change for change in changes if change["time"] not in noted]
        self.last = changes[-1]["time"]
        self.changes = from_leader(left, device)

    def due(self, job: Job) -> int:
        return self.first_step + 1 if self.changes else sys.maxsize

    def act(self, job: Job) -> None:
        if job.step <= self.first_step:
            return
        for change in self.changes:
            facts = {name: change[name] for name in ("time", "from", "to", "why")}
            is_timed = change["time"] == self.last and change["at"] is not None
            seconds = time.monotonic() - change["at"] if is_timed else None
            line = {"kind": RESIZE, "step": self.first_step, **facts, "seconds": seconds}
            self.record.metrics.write(**line)
            self.record.resizes.append(line)
        self.changes = []
