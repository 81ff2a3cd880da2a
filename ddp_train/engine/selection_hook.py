"""What ends training before the plan does: no better evaluation for too long, or the time is over.
And the best one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ddp_train.distributed.process_group import from_leader
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.selection import Best
from ddp_train.text import counted


class TimeLimit:
    """Whether the minutes for training are over, by the clock of rank 0.

    It is looked at after the first step, then after half of the steps that seem to fit, and after
    each epoch, whose evaluation may have taken long: every look waits for the device and for the
    other ranks, and so there are few.
    """

    def __init__(self, minutes: float, record: MetricsHook) -> None:
        self.minutes = minutes
        self.record = record
        self.last_look: tuple[int, float] | None = None
        """The step, and the seconds of training then."""
        self.next_look = 0

    def due(self, job: Job) -> int:
        if self.last_look is None:
            self.last_look = job.step, self.record.seconds
        return max(self.next_look, job.step + 1)

    def is_over(self, job: Job) -> bool:
        """The same on all ranks. A collective, if it is time for a look."""
        if self.last_look is None or (
            job.step < self.next_look and not job.plan.ends_epoch(job.step)
        ):
            return False
        if job.stepper.device != "cpu":
            torch.cuda.synchronize()
        step, seconds = self.last_look
        self.last_look = job.step, self.record.seconds
        left = 60 * self.minutes - self.record.seconds
        fitting = left * (job.step - step) / max(self.record.seconds - seconds, 1e-9)
        steps = from_leader(int(fitting) if left > 0 else -1, job.stepper.device)
        self.next_look = job.step + max(1, steps // 2)
        return steps < 0


class SelectionHook:
    """After each evaluation: is it the best, and has there been no better one for too long? And is
    the time over?

    Where training stops early, the plan ends there: all that happens at the end of a run happens
    then.
    """

    def __init__(
        self,
        record: MetricsHook,
        best: Best,
        stopping: Best | None = None,
        patience: int = 0,
        max_minutes: float | None = None,
    ) -> None:
        """record: is asked for the score; to be called after it. best: of the run. stopping: what
        early stopping compares, and patience the number of evaluations that it waits. max_minutes:
        of training."""
        self.record = record
        self.best = best
        self.stopping = stopping
        self.patience = patience
        self.limit = TimeLimit(max_minutes, record) if max_minutes else None
        self.stopped_early: dict[str, Any] | None = None
        """For summary.json: the step and the reason."""

    def due(self, job: Job) -> int:
        ends = job.plan.epoch_end(job.step)
        return min(ends, self.limit.due(job)) if self.limit else ends

    def act(self, job: Job) -> None:
        if self.limit and job.step < job.plan.steps and self.limit.is_over(job):
            last = job.step
            if job.score is None:  # the metrics hook has acted, without evaluating this step
                last += 1
            self._end(job, last, f"train.max_minutes={self.limit.minutes:g} are over")
        if job.score is None:
            return
        for one in filter(None, (self.best, self.stopping)):
            one.see(job.step, job.score.metrics)
        self.stop_if_due(job)

    def stop_if_due(self, job: Job) -> None:
        """Ends the plan after `job.step` if the best is too long ago, at an evaluation or where a
        run resumes, and if the time was over before it resumes."""
        if (
            self.limit
            and job.step < job.plan.steps
            and self.record.seconds_before >= 60 * self.limit.minutes
        ):
            self._end(job, job.step, f"train.max_minutes={self.limit.minutes:g} are over")
        best = self.stopping
        if best is None or best.waited < self.patience or job.step >= job.plan.steps:
            return
        if best.rank:
            than = f"{best.value:g} after step {best.step:,}"
        else:
            than = "not a finite number once"
        reason = f"{best}: no improvement on {than} in {counted(best.waited, 'evaluation')}"
        self._end(job, job.step, reason)

    def _end(self, job: Job, step: int, reason: str) -> None:
        self.stopped_early = {"step": step, "reason": reason}
        job.plan = replace(job.plan, steps=step)

    def state(self) -> dict[str, Any]:
        return {
            "best": self.best.state(),
            "early_stopping": self.stopping.state() if self.stopping else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.best.load_state(state["best"])
        if self.stopping and state["early_stopping"]:
            self.stopping.load_state(state["early_stopping"])
