"""A hook that unfreezes the frozen part of a model at a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from ddp_train.engine.loop import Forward, Job
from ddp_train.models.freezing import Frozen


@dataclass(frozen=True)
class UnfreezeHook:
    """Lets the frozen parameters train too, from a step on.

    The optimizer has had them all along, and has left them alone for want of gradients. DDP has
    not: its buckets are made once, of what requires gradients then, so the model is wrapped again.
    """

    step: int
    """Optimizer steps that are done by then."""
    frozen: Frozen
    wrap: Callable[[], Forward]

    def due(self, job: Job) -> int:
        return self.step if job.step < self.step else sys.maxsize

    def act(self, job: Job) -> None:
        if self.step <= job.step < job.plan.steps and self.frozen.lasts:
            self.frozen.unfreeze()
            job.module.train()
            job.wrapped = self.wrap()
