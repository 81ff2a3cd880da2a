"""Notes in metrics.jsonl that another number of processes has taken over, and how long that
took."""

from __future__ import annotations

import sys
import time
from typing import Any

from ddp_train.distributed.process_group import from_leader
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import RESIZE, MetricsHook


def names_of_change(hosts_then: list[str], hosts_now: list[str]) -> str:
    """`host b left`, `hosts b and c joined`; "" if the names do not tell.

    hosts_then: the hosts of the checkpoint, empty if they are not known.
    """
    left = sorted({*hosts_then} - {*hosts_now})
    joined = sorted({*hosts_now} - {*hosts_then})
    if not hosts_then or not hosts_now:
        return ""
    parts = []
    for names, verb in ((left, "left"), (joined, "joined")):
        if names:
            noun = "host" if len(names) == 1 else "hosts"
            parts.append(f"{noun} {' and '.join(names)} {verb}")
    return ", ".join(parts)


def changes_of_hosts(
    metrics_hook: MetricsHook,
    lost: dict[str, Any] | None,
    before: int,
    now: int,
    device: str,
    names: str,
) -> list[dict[str, Any]]:
    """The change between the run's number of processes before this start and `now`, if there is
    one. A collective: what was noted, rank 0 knows alone.

    lost: see `lost_hosts.noted_loss`.
    before: number of processes by the checkpoint.
    names: see `names_of_change`.
    """
    if metrics_hook.resizes:
        before = metrics_hook.resizes[-1]["to"]
    before = from_leader(before, device)
    if before == now:
        return []
    change: dict[str, Any] = {"from": before, "to": now}
    if lost:
        change |= {"why": "a rank was lost", "at": lost["at"], "time": lost["time"]}
    else:
        unnamed = "a host joined" if now > before else "a host left"
        change |= {"why": names or unnamed, "at": None, "time": time.time()}
    return [from_leader(change, device)]


class ResizeHook:
    """Acts once, with the first step that the new number of processes has done.

    It is the first of the hooks: its line is of an earlier step than theirs.
    """

    def __init__(
        self, metrics_hook: MetricsHook, changes: list[dict[str, Any]], first_step: int, device: str
    ) -> None:
        """A collective: rank 0 alone reads what was noted, and all must act at the same steps.

        changes: see `launcher.size.Change`. Each later start gets them too, and finds them noted.
            One that another followed before a step was done took no time that could be measured.
        """
        self.metrics_hook = metrics_hook
        self.first_step = first_step
        noted = {line["time"] for line in metrics_hook.resizes}
        new = [change for change in changes if change["time"] not in noted]
        self.last = changes[-1]["time"]
        self.changes = from_leader(new, device)

    def due(self, job: Job) -> int:
        return self.first_step + 1 if self.changes else sys.maxsize

    def act(self, job: Job) -> None:
        if job.step <= self.first_step:
            return
        for change in self.changes:
            seconds = None
            if change["time"] == self.last and change["at"] is not None:
                seconds = time.monotonic() - change["at"]
            facts = {name: change[name] for name in ("time", "from", "to", "why")}
            line = {"kind": RESIZE, "step": self.first_step, **facts, "seconds": seconds}
            self.metrics_hook.metrics.write(**line)
            self.metrics_hook.resizes.append(line)
        self.changes = []
