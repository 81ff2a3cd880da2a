"""What follows from an evaluation: whether it is the best, and whether training ends for want of a better one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddp_train.text import counted
from ddp_train.training.hooks import MetricsHook
from ddp_train.training.loop import Job
from ddp_train.training.selection import Best


class SelectionHook:
    """After each evaluation: is it the best, and has there been no better one for too long?

    Where training stops early, the plan ends there: all that happens at the end of a run happens then.
    """

    def __init__(self, record: MetricsHook, best: Best, stopping: Best | None = None, patience: int = 0) -> None:
        """record: is asked for the score; to be called after it. best: of the run. stopping: what early stopping
        compares, and patience the number of evaluations that it waits."""
        self.record, self.best, self.stopping, self.patience = record, best, stopping, patience
        self.stopped_early: dict[str, Any] | None = None
        """For summary.json: the step and the reason."""

    def due(self, job: Job) -> int:
        return job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        if self.record.score is None:
            return
        for one in filter(None, (self.best, self.stopping)):
            one.see(job.step, self.record.score.metrics)
        self.stop_if_due(job)

    def stop_if_due(self, job: Job) -> None:
        """Ends the plan after `job.step` if the best is too long ago: at an evaluation, or where a run resumes."""
        best = self.stopping
        if best is None or best.waited < self.patience or job.step >= job.plan.steps:
            return
        than = f"{best.value:g} after step {best.step:,}" if best.rank else "not a finite number once"
        reason = f"{best}: no improvement on {than} in {counted(best.waited, 'evaluation')}"
        self.stopped_early = {"step": job.step, "reason": reason}
        job.plan = replace(job.plan, steps=job.step)

    def state(self) -> dict[str, Any]:
        return {"best": self.best.state(), "early_stopping": self.stopping.state() if self.stopping else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """{}: of a checkpoint of an earlier version."""
        for one, before in ((self.best, state.get("best")), (self.stopping, state.get("early_stopping"))):
            if one and before:
                one.load_state(before)
