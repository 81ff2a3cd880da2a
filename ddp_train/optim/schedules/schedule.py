"""The protocol of a schedule: the values of each group of an optimizer, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from ddp_train.optim.schedules.factors import Factor, linear_warmup

GroupValues = dict[str, Any]
"""Arguments of one group of parameters: `lr`, and what else a schedule changes."""


class Schedule(Protocol):
    """The learning rates of the groups of an optimizer, as a function of the step."""

    def values(self, step: int) -> list[GroupValues]:
        """The arguments of each group in optimizer step 0, 1, ..., the same on all processes."""
        ...


class FactorSchedule:
    """The base learning rate of each group times a factor, so that groups keep their ratio."""

    def __init__(self, factor: Factor, optimizer: Optimizer) -> None:
        self.factor = factor
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]

    def values(self, step: int) -> list[GroupValues]:
        factor = self.factor(step)
        return [{"lr": base_lr * factor} for base_lr in self.base_lrs]


@dataclass(frozen=True)
class Pace:
    """The pace of a schedule in a run: a step after each optimizer step, or each epoch."""

    steps: int
    """Optimizer steps of the run."""
    warmup_steps: int = 0
    period: int = 1
    """Optimizer steps between two steps of the schedule."""

    @property
    def length(self) -> int:
        """Number of places in the schedule: its steps in the whole run without those of the
        warm-up, at least 1."""
        places = -(-self.steps // self.period)
        return max(1, places - self.warmup_steps // self.period)

    def place(self, step: int) -> int:
        """The place of an optimizer step in the schedule, from 0 to `length` - 1.

        It is 0 in the warm-up, and the last place behind the end of the run, where a rehearsal may
        lead.

        step: number of optimizer steps that are done.
        """
        steps_made = step // self.period - self.warmup_steps // self.period
        return min(max(steps_made, 0), self.length - 1)

    def warmup(self, step: int) -> float:
        """The factor of the linear warm-up; 1 after it."""
        return linear_warmup(step, self.warmup_steps)
