"""A schedule that follows the evaluations: ReduceLROnPlateau."""

from __future__ import annotations

from typing import Any

from ddp_train.engine.loop import Job
from ddp_train.optim.schedules.torch_schedules import PlateauSchedule


class PlateauHook:
    """Gives a schedule the metric of each evaluation, which is the same on all processes."""

    def __init__(self, schedule: PlateauSchedule, metric: str) -> None:
        """To be called after the metrics hook. metric: of the set that is scored."""
        self.schedule = schedule
        self.metric = metric

    def due(self, job: Job) -> int:
        return job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        if job.score is not None:
            self.schedule.see(job.step, job.score.metrics.get(self.metric))

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, **self.schedule.state()}

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Continue. By another metric the rates stay what they are, and the comparison begins."""
        self.schedule.load_state(state, is_same_metric=state["metric"] == self.metric)
        if state["metric"] == self.metric:
            return []
        return [f"note: the schedule looks at {self.metric} now, and looked at {state['metric']}"]
