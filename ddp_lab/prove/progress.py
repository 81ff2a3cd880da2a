"""The time that a proof takes, and the lines that say where it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from ddp_lab.doctor.findings import SKIPPED, Finding
from ddp_train.errors import LaunchError

LATE = "prove.seconds is over"
MORE_TIME = "raise prove.seconds, or lower prove.samples and prove.steps"


class Progress:
    def __init__(self, began: float, seconds: float) -> None:
        """began: in time.monotonic() seconds. seconds: for the whole proof."""
        self.began = began
        self.seconds = seconds
        self.console = Console(highlight=False)

    @property
    def seconds_passed(self) -> float:
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        return self.seconds - self.seconds_passed

    def print(self, text: str) -> None:
        line = f"{self.seconds_passed:5.1f} s  {text}"
        self.console.print(line, markup=False, soft_wrap=True)


def out_of_time(check: str) -> Finding:
    """A check that was not begun: the proof is incomplete."""
    return Finding(check, SKIPPED, LATE, MORE_TIME, exit_code=LaunchError.exit_code)


class Deadline:
    """Until it is over, checks are made; later they are out of time."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def check(self, name: str, function: Callable[[], Finding]) -> Finding:
        """The finding of the function, which makes the check of this name."""
        if time.monotonic() < self.end:
            return function()
        return out_of_time(name)
