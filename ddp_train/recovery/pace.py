"""How often a state is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

SHARE = 0.002
"""The part of the time of training that keeping may take on a GPU."""
HOST_SECONDS = 1e-4
"""What the host needs to have a state copied."""


class Pace:
    """Keeps each step: on the CPU that is a copy of a share of the weights."""

    def comes_to_keep(self) -> bool:
        """Count a step. Returns whether it is kept."""
        return True


class NoPace(Pace):
    """Keeps no step: there is no room for it."""

    def comes_to_keep(self) -> bool:
        return False


class TimedCopies(Protocol):
    """Copies on a GPU."""

    def seconds(self) -> float:
        """How long the last one took."""
        ...


class DevicePace(Pace):
    """Keeps a step as often as SHARE of the time allows, and each step at first.

    What is not kept is computed again after a failure: at most HOST_SECONDS and the seconds of a
    copy, divided by SHARE. A payload of an exchange, see `tasks.mean_loss.ExtraPayload`: all ranks
    must keep the same steps.
    """

    def __init__(self, copies: TimedCopies) -> None:
        self.copies = copies
        self.every = 1
        """Steps from one that is kept to the next."""
        self.since = 0
        """Steps since one was kept."""
        self.steps = 0
        """Steps since the last exchange."""
        self.began = time.perf_counter()
        self.step_seconds = math.inf
        """The shortest time of a step: an interval may include an evaluation, or a compiler."""

    def comes_to_keep(self) -> bool:
        self.steps += 1
        self.since += 1
        if self.since < self.every:
            return False
        self.since = 0
        return True

    def collect(self) -> Sequence[float]:
        now = time.perf_counter()
        seconds = (now - self.began) / self.steps if self.steps else math.inf
        self.began = now
        self.steps = 0
        self.step_seconds = min(self.step_seconds, seconds)
        return [self.step_seconds, self.copies.seconds()]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        step_seconds = min(of_rank[0] for of_rank in of_ranks)
        cost = HOST_SECONDS + max(of_rank[1] for of_rank in of_ranks)
        self.every = max(1, math.ceil(cost / (SHARE * step_seconds)))
