"""Schedulers of torch's, which write into an optimizer, as schedules.

Each writes into a stand-in for the optimizer, in plain numbers of Python. So its recursions see
neither the warm-up, which multiplies what it wrote, nor the rounding of a rate that lies on a GPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_train.optim.schedules.schedule import GroupValues, Pace

MakeScheduler = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler for an optimizer."""
NOT_WRITTEN = ("params", "initial_lr")
"""Entries of a group that no scheduler changes for the optimizer."""


class StandIn(Optimizer):
    """An optimizer that updates nothing: it has the groups of another, for schedulers to write."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.before = groups
        """The groups as they were, which are copied."""
        self.written: dict[str, None] = {"lr": None}
        """Names of the arguments that a scheduler has changed."""
        super().__init__([dict(group) for group in groups], defaults)

    @classmethod
    def of(cls, optimizer: Optimizer) -> StandIn:
        return cls([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing: schedulers warn if an optimizer has made no step before them."""

    def note_written(self) -> None:
        """Find out which arguments a scheduler has changed beside the learning rate."""
        for before, group in zip(self.before, self.param_groups, strict=True):
            for name, value in before.items():
                if name not in NOT_WRITTEN and group[name] != value:
                    self.written[name] = None

    def values(self, warmup: float) -> list[GroupValues]:
        """The values that were written into each group. warmup: factor of the learning rates."""
        groups = [{name: group[name] for name in self.written} for group in self.param_groups]
        for group in groups:
            group["lr"] = float(group["lr"]) * warmup
        return groups


class SchedulerOnStandIn:
    """A scheduler of torch's with the stand-in that it writes into."""

    def __init__(self, make: MakeScheduler, optimizer: Optimizer, pace: Pace) -> None:
        self.make = make
        self.pace = pace
        self.first_stand_in = StandIn.of(optimizer)
        """Never written: the rates of the optimizer itself change."""
        self.begin()

    def begin(self) -> None:
        """Begin with a new scheduler."""
        self.stand_in = StandIn.of(self.first_stand_in)
        self.scheduler: Any = self.make(self.stand_in)
        self.stand_in.step()
        self.stand_in.note_written()

    @property
    def base_lrs(self) -> list[float]:
        """Learning rate of each group without a schedule."""
        return [group["lr"] for group in self.first_stand_in.param_groups]

    @property
    def written(self) -> list[str]:
        """Names of the arguments of a group that the scheduler has changed so far."""
        return list(self.stand_in.written)


class SteppedSchedule(SchedulerOnStandIn):
    """A scheduler that makes a step after each optimizer step, or after each epoch.

    It is a function of the step all the same, and no state is saved: where a run resumes, the
    scheduler makes its steps again, which takes 1 or 2 s for 100,000 of them.
    """

    def begin(self) -> None:
        super().begin()
        self.steps_made = 0

    def values(self, step: int) -> list[GroupValues]:
        place = self.pace.place(step)
        if place < self.steps_made:  # a rehearsal has gone ahead
            self.begin()
        while self.steps_made < place:
            self.scheduler.step()
            self.stand_in.note_written()
            self.steps_made += 1
        return self.stand_in.values(self.pace.warmup(step))


class PlateauSchedule(SchedulerOnStandIn):
    """A scheduler that makes a step after each evaluation, by a metric: ReduceLROnPlateau.

    Evaluations in the warm-up do not count. It has a state, which follows from all evaluations.
    """

    def begin(self) -> None:
        super().begin()
        self.begun_with = self.state_of_scheduler()

    def values(self, step: int) -> list[GroupValues]:
        return self.stand_in.values(self.pace.warmup(step))

    def see(self, step: int, value: float | None) -> None:
        """Take the metric of an evaluation after `step` optimizer steps; None: it has no value."""
        if step < self.pace.warmup_steps:
            return
        self.scheduler.step(math.nan if value is None else value)
        self.stand_in.note_written()

    def state_of_scheduler(self) -> dict[str, Any]:
        return copy.deepcopy(self.scheduler.state_dict())

    def state(self) -> dict[str, Any]:
        """The state that a resumed run continues with. Plain data, if that of the scheduler is."""
        return {
            "scheduler": self.state_of_scheduler(),
            "begun_with": self.begun_with,
            "groups": self.stand_in.values(warmup=1.0),
            "base_lrs": self.base_lrs,
        }

    def load_state(self, state: dict[str, Any], is_same_metric: bool) -> None:
        """Continue from a state.

        Arguments and base learning rates that the config has changed since are those of this run.

        is_same_metric: False takes the learning rates alone.
        """
        if is_same_metric:
            kept = dict(state["scheduler"])
            for name, value in self.begun_with.items():
                if repr(state["begun_with"].get(name)) != repr(value):
                    kept[name] = value
            self.scheduler.load_state_dict(kept)
        groups = self.stand_in.param_groups
        for place, (group, written) in enumerate(zip(groups, state["groups"], strict=True)):
            group.update(written)
            base_lr = self.base_lrs[place]
            base_lr_then = state["base_lrs"][place]
            if base_lr != base_lr_then:
                group["lr"] = written["lr"] / base_lr_then * base_lr
        self.stand_in.note_written()
