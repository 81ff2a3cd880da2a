"""The cost of a lost rank, for summary.json."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook


class RecoveryHook:
    """Notes the cost of a lost rank, with the first step that is done after it."""

    def __init__(
        self,
        metrics_hook: MetricsHook,
        lost: dict[str, Any],
        first_step: int,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.at = lost["at"]
        self.first_step = first_step
        self.forget = forget
        earlier = [self._cost_of(loss) for loss in lost.get("before", ())]
        self.cost = self._cost_of(lost)
        metrics_hook.recoveries += [*earlier, self.cost]

    def _cost_of(self, lost: dict[str, Any]) -> dict[str, Any]:
        """What a loss has cost; its seconds are not known yet."""
        return {
            "rank": lost["rank"],
            "kind": lost.get("kind", "died"),
            "step": self.first_step,
            # 0 too where it was lost before it had resumed.
            "steps_redone": max(0, int(lost["step"]) - self.first_step),
            "seconds": None,
        }

    def due(self, job: Job) -> int:
        return sys.maxsize if self.cost["seconds"] else self.first_step + 1

    def act(self, job: Job) -> None:
        if self.cost["seconds"] is None and job.step > self.first_step:
            self.cost["seconds"] = time.monotonic() - self.at
            self.forget()
