"""Decides whether a failed run is restarted: within the user's budget, and not if the failure
repeats. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ddp_train.checkpoints.layout import places, step_of
from ddp_train.resilience.failure_report import FILE

SAME_FAILURES = 3


class RestartPolicy:
    """The restart budget of one run. A checkpoint that is newer than at the previous failure
    refills it."""

    def __init__(self, allowed: int, run_dir: Path) -> None:
        """allowed: restarts between two checkpoints."""
        self.allowed = allowed
        self.run_dir = run_dir
        self.used = 0
        self.newest_step = self.step_of_newest()
        self.has_progressed = False
        """Whether there was a newer checkpoint at the last failure than at the one before."""
        self.failure: tuple[str, ...] = ()
        self.repeats = 0
        """How many attempts in a row have ended in `failure`."""

    def refusal(self) -> str:
        """Why the run is not restarted after the failure that was just reported; empty if it is
        restarted.

        Call it once per failure: it counts.
        """
        newest_step = self.step_of_newest()
        failure = self._failure()
        self.has_progressed = newest_step > self.newest_step
        if self.has_progressed:
            self.used = 0
            self.newest_step = newest_step
        self.repeats = self.repeats + 1 if failure and failure == self.failure else 1
        self.failure = failure
        if self.allowed and self.repeats == SAME_FAILURES:
            return (
                f"same failure at the same step in {SAME_FAILURES} attempts; restarting again would"
                " not help"
            )
        self.used += 1
        if self.used > self.allowed:
            return f"launch.max_restarts={self.allowed} used up without a new checkpoint"
        return ""

    def begin_anew(self) -> None:
        """With fewer processes: they have not failed yet."""
        self.used = self.repeats = 0

    def step_of_newest(self) -> int:
        """Checkpoint; -1 if there is none."""
        return max(map(step_of, places(self.run_dir)), default=-1)

    def _failure(self) -> tuple[str, ...]:
        """Kind, rank, step and detail of the reported failure, with all numbers in the detail
        replaced by `#`: seconds, sizes and process ids differ between attempts. Empty if nothing
        was reported."""
        try:
            failure = json.loads((self.run_dir / FILE).read_text())
        except FileNotFoundError:
            return ()
        return (
            failure["kind"],
            str(failure["rank"]),
            str(failure["step"]),
            re.sub(r"\d+", "#", failure["detail"]),
        )
