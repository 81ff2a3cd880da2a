"""Says once, after the first step, if a step draws random numbers that depend on the process."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ddp_train.data.rng import global_states
from ddp_train.engine.loop import Job
from ddp_train.telemetry.console import Display

DRAWS_BY_RANK = (
    "note: each process draws its own random numbers (dropout, noise, masks), so the result"
    " depends on the number of processes. ddp_train.noise_like, rand_like, randint_like and"
    " dropout draw the same on any number of processes; for one number per batch use"
    " rand_like(torch.zeros(1), rows='shared')"
)
BY_RANK = f"{DRAWS_BY_RANK}. strategy=ordered draws the same on 1, 2, 4 and 8 processes"
NOT_SEEDED = (
    "note: the model or the loss draws from {} generator, which is not seeded in each step. Its"
    " numbers differ between processes, and after a resume. Draw with torch instead"
)
OTHERS = ("numpy's", "Python's")


class NoiseHook:
    """Looks whether the generators have moved in the first step of this process.

    It knows what the code does, and not what it is made of: a mask that the loss draws counts as
    dropout does.
    """

    def __init__(self, display: Display, drew_by_rank: Callable[[int], bool]) -> None:
        """drew_by_rank: tells whether something drew from the generators that depend on the rank,
        since the step of this number was seeded."""
        self.display = display
        self.drew_by_rank = drew_by_rank
        self.others_before: tuple[bytes, ...] | None = None
        self.is_done = False

    def due(self, job: Job) -> int:
        if self.is_done:
            return sys.maxsize
        if self.others_before is None:
            self.others_before = other_generators()
        return job.step + 1

    def act(self, job: Job) -> None:
        if self.is_done or self.others_before is None:
            return
        self.is_done = True
        if self.drew_by_rank(job.step - 1):
            self.display.line(BY_RANK)
        others = zip(OTHERS, self.others_before, other_generators(), strict=True)
        for whose, before, after in others:
            if before != after:
                self.display.line(NOT_SEEDED.format(whose))
        self.others_before = None


def other_generators() -> tuple[bytes, ...]:
    """The states of numpy's and Python's generators."""
    return global_states()[1:]
