"""The best evaluation of a run, and what ends training before the plan does: no better evaluation
for too long, or the time is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_train.distributed.process_group import from_leader
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.selection import Best
from ddp_train.tasks.score import Score
from ddp_train.text import counted


class TimeLimit:
    """The limit of the minutes for training, by the clock of rank 0.

    It is looked at after the first step, then after half of the steps that seem to fit, and after
    each epoch and each evaluation, which may have taken long: every look waits for the device and
    for the other ranks, and so there are few.
    """

    def __init__(self, minutes: float, metrics_hook: MetricsHook) -> None:
        """metrics_hook: has the clock."""
        self.seconds = 60 * minutes
        self.reason = f"train.max_minutes={minutes:g} are over"
        self.metrics_hook = metrics_hook
        self.last_look: tuple[int, float] | None = None
        """The step, and the seconds of training then."""
        self.next_look = 0

    @property
    def was_over(self) -> bool:
        """True if the time was over before the run resumed."""
        return self.metrics_hook.seconds_before >= self.seconds

    def due(self, job: Job) -> int:
        if self.last_look is None:
            self.last_look = (job.step, self.metrics_hook.seconds)
        return max(self.next_look, job.step + 1)

    def is_over(self, job: Job) -> bool:
        """True if the time is over, on all ranks alike. A collective, if it is time for a look."""
        is_time = job.step >= self.next_look or job.plan.ends_epoch(job.step) or bool(job.scores)
        if self.last_look is None or not is_time:
            return False
        device = job.stepper.device
        if device != "cpu":
            torch.cuda.synchronize()
        last_step, last_seconds = self.last_look
        seconds = self.metrics_hook.seconds
        self.last_look = (job.step, seconds)
        left = self.seconds - seconds
        fitting = left * (job.step - last_step) / max(seconds - last_seconds, 1e-9)
        steps = from_leader(int(fitting) if left > 0 else -1, device)
        self.next_look = job.step + max(1, steps // 2)
        return steps < 0


@dataclass
class EarlyStopping:
    """Ends training if evaluations have been no better for too long."""

    best: Best
    patience: int
    """Number of evaluations that it waits."""

    def reason(self) -> str:
        """Why training ends now; "" if it goes on."""
        best = self.best
        if best.waited < self.patience:
            return ""
        than = "not a finite number once"
        if best.rank:
            than = f"{best.value:g} after step {best.step:,}"
        return f"{best}: no improvement on {than} in {counted(best.waited, 'evaluation')}"


class SelectionHook:
    """After each evaluation: is it the best, and has there been no better one for too long? And is
    the time over?

    Where training stops early, the plan ends there: all that happens at the end of a run happens
    then.
    """

    def __init__(
        self,
        best: Best,
        early_stopping: EarlyStopping | None = None,
        time_limit: TimeLimit | None = None,
    ) -> None:
        """best: the best evaluation of the run. The metrics hook acts before this one."""
        self.best = best
        self.early_stopping = early_stopping
        self.time_limit = time_limit
        self.stopped_early: dict[str, Any] | None = None
        """The step and the reason, for summary.json."""

    def due(self, job: Job) -> int:
        end = job.plan.epoch_end(job.step)
        if self.time_limit:
            return min(end, self.time_limit.due(job))
        return end

    def act(self, job: Job) -> None:
        limit = self.time_limit
        if limit and job.step < job.plan.steps and limit.is_over(job):
            # The metrics hook has acted, and has not evaluated a step that it did not expect to be
            # the last.
            last = job.step if job.scores else job.step + 1
            self._end(job, last, limit.reason)
        if not job.scores:
            return
        self.see(job.step, job.scores)
        self.stop_if_due(job)

    def see(self, step: int, scores: Mapping[str, Score]) -> None:
        """Compare the scores after `step` optimizer steps, by the names of the sets, with the
        best."""
        self.best.see(step, scores[self.best.selection.split].metrics)
        if self.early_stopping:
            best = self.early_stopping.best
            best.see(step, scores[best.selection.split].metrics)

    def stop_if_due(self, job: Job) -> None:
        """End the plan after `job.step` if the best evaluation is too long ago, or if the time was
        over before the run resumed.

        To be called after each evaluation, and where a run resumes.
        """
        limit = self.time_limit
        if limit and job.step < job.plan.steps and limit.was_over:
            self._end(job, job.step, limit.reason)
        if self.early_stopping and job.step < job.plan.steps:
            reason = self.early_stopping.reason()
            if reason:
                self._end(job, job.step, reason)

    def _end(self, job: Job, step: int, reason: str) -> None:
        self.stopped_early = {"step": step, "reason": reason}
        job.plan = replace(job.plan, steps=step)

    def state(self) -> dict[str, Any]:
        stopping = self.early_stopping
        return {
            "best": self.best.state(),
            "early_stopping": stopping.best.state() if stopping else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.best.load_state(state["best"])
        if self.early_stopping and state["early_stopping"]:
            self.early_stopping.best.load_state(state["early_stopping"])
