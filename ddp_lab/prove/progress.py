"""The time that a proof takes, and the lines that say where it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from ddp_lab.doctor.findings import SKIPPED, Finding
from ddp_train.errors import LaunchError

LATE = "the time limit prove.seconds is over"
MORE_TIME = "raise prove.seconds, or lower prove.samples and prove.steps"


class Deadline:
    """A time after which no check begins."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def check(self, name: str, function: Callable[[], Finding]) -> Finding:
        """The finding of a check; if it is too late, one that makes the proof incomplete."""
        if self.seconds_left > 0:
            return function().named(name)
        return Finding(name, SKIPPED, LATE, MORE_TIME, exit_code=LaunchError.exit_code)


class Progress(Deadline):
    """Prints what is done, with the time since the proof began."""

    def __init__(self, began: float, seconds: float) -> None:
        """began: in time.monotonic() seconds.

        seconds: time limit for the whole proof.
        """
        super().__init__(began + seconds - time.monotonic())
        self.began = began
        self.console = Console(highlight=False)

    @property
    def seconds_passed(self) -> float:
        return time.monotonic() - self.began

    def print(self, text: str) -> None:
        line = f"{self.seconds_passed:5.1f} s  {text}"
        self.console.print(line, markup=False, soft_wrap=True)
