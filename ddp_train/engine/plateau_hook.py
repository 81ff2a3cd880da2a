"""A schedule that follows the evaluations: ReduceLROnPlateau."""

from __future__ import annotations

from typing import Any

from ddp_train.engine.loop import Job
from ddp_train.optim.schedules.torch_schedules import PlateauSchedule


class PlateauHook:
    """Gives a schedule the metric of each evaluation, which is the same on all processes."""

    def __init__(self, schedule: PlateauSchedule, metric: str, split: str | None = None) -> None:
        """split: the set that has the metric; None: the first that is scored.

        The metrics hook acts before.
        """
        self.schedule = schedule
        self.name = metric
        self.split = split

    @property
    def metric(self) -> str:
        """The metric's name; with a named set the set comes first, as validation/noisy.loss."""
        if self.split and "/" in self.split:
            return f"{self.split}.{self.name}"
        return self.name

    def due(self, job: Job) -> int:
        return job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        if job.scores:
            score = job.scores[self.split or next(iter(job.scores))]
            self.schedule.see(job.step, score.metrics.get(self.name))

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, **self.schedule.state()}

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Continue. By another metric the rates stay what they are, and the comparison begins."""
        self.schedule.load_state(state, is_same_metric=state["metric"] == self.metric)
        if state["metric"] == self.metric:
            return []
        return [
            f"note: the schedule follows {self.metric} now; before the resume it followed"
            f" {state['metric']}"
        ]
