"""Whether a failed run is started again: as often as the user allowed, and as long as it gets anywhere. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ddp_train.resilience.failure_report import FILE

SAME_FAILURES = 3


class RestartPolicy:
    """The budget of one run. A newer checkpoint than at the failure before refills it."""

    def __init__(self, allowed: int, run_dir: Path) -> None:
        self.allowed, self.run_dir = allowed, run_dir
        self.used, self.newest = 0, self._newest_step()
        self.failure: tuple[str, ...] = ()
        self.same = 0
        """How many attempts in a row ended in `failure`."""

    def refusal(self) -> str:
        """Why the run is not started again after the failure that has just been reported; empty if it is.

        Counts: to be asked once per failure.
        """
        newest, failure = self._newest_step(), self._failure()
        if newest > self.newest:
            self.used, self.newest = 0, newest
        self.same = self.same + 1 if failure and failure == self.failure else 1
        self.failure = failure
        if self.allowed and self.same == SAME_FAILURES:
            return f"{SAME_FAILURES} attempts ended in the same failure at the same step: it would only come again"
        self.used += 1
        return f"launch.max_restarts={self.allowed} without a new checkpoint" if self.used > self.allowed else ""

    def _newest_step(self) -> int:
        steps = [int(path.name[5:]) for path in (self.run_dir / "checkpoints").glob("step_????????")]
        return max(steps, default=-1)

    def _failure(self) -> tuple[str, ...]:
        """What happened, to which rank and at which step, but for seconds, sizes and process ids. Empty if nothing was
        reported."""
        try:
            failure = json.loads((self.run_dir / FILE).read_text())
        except FileNotFoundError:
            return ()
        return failure["kind"], str(failure["rank"]), str(failure["step"]), re.sub(r"\d+", "#", failure["detail"])
