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
        """Whether the step that was done last is kept."""
        return True

    def took(self, seconds: float) -> None:
        """Note how long the host took to gather what is kept beside the tensors."""


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
    copy and of the states of hooks, divided by SHARE. A payload of an exchange, see
    `tasks.mean_loss.ExtraPayload`: all ranks must keep the same steps.
    """

    def __init__(self, copies: TimedCopies) -> None:
        self.copies = copies
        self.every = 1
        """Steps from one that is kept to the next."""
        self.since = 0
        """Steps since one was kept."""
        self.steps = 0
        """Steps since the last exchange."""
        self.seconds_beside = 0.0
        """The seconds beside HOST_SECONDS that the host needed for the last step that was kept."""
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

    def took(self, seconds: float) -> None:
        self.seconds_beside = seconds

    def collect(self) -> Sequence[float]:
        now = time.perf_counter()
        seconds = (now - self.began) / self.steps if self.steps else math.inf
        self.began = now
        self.steps = 0
        self.step_seconds = min(self.step_seconds, seconds)
        return [self.step_seconds, self.copies.seconds() + self.seconds_beside]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        step_seconds = min(of_rank[0] for of_rank in of_ranks)
        cost = HOST_SECONDS + max(of_rank[1] for of_rank in of_ranks)
        self.every = max(1, math.ceil(cost / (SHARE * step_seconds)))


class SessionPace(Pace):
    """Keeps each step of a loop of the user's own, or as often as a share of the time allows.

    All ranks must keep the same steps: whenever `is_due`, they exchange what `collect` returns.
    """

    FIRST_EXCHANGE = 16
    """The first steps take longer: optimizers begin their state, and places are laid out."""
    MOST_STEPS = 512
    """From one exchange to the next one; at first they come after 16, 32, 64 ... steps."""

    def __init__(self, share: float, free_seconds: float = 0.0) -> None:
        """
        share: the part of the time of training that keeping may take.
        free_seconds: what it may take in any step.
        """
        self.share = share
        self.free_seconds = free_seconds
        self.every = 1
        """Steps from one that is kept to the next."""
        self.since = 0
        """Steps since one was kept."""
        self.steps = 0
        self.exchanged_at = 0
        """The step of the last exchange."""
        self.next_exchange = self.FIRST_EXCHANGE
        self.began = time.perf_counter()
        self.step_seconds = math.inf
        """The shortest time of a step."""
        self.cost_seconds = 0.0
        """The shortest time of keeping a step since the last exchange."""
        self.has_cost = False

    def count_step(self) -> None:
        """Count a step, whether its state could be kept or not: all ranks count alike."""
        self.steps += 1
        self.since += 1

    def comes_to_keep(self) -> bool:
        if self.every > 1 and self.since < self.every:
            return False
        self.since = 0
        return True

    def took(self, seconds: float) -> None:
        """Note how long it took to keep a step."""
        if not self.has_cost or seconds < self.cost_seconds:
            self.cost_seconds = seconds
        self.has_cost = True

    @property
    def is_due(self) -> bool:
        """Whether ranks exchange their times after this step."""
        return self.steps == self.next_exchange

    def collect(self) -> list[float]:
        """Seconds of a step, and of keeping one, on this rank."""
        now = time.perf_counter()
        seconds = (now - self.began) / (self.steps - self.exchanged_at)
        self.step_seconds = min(self.step_seconds, seconds)
        self.began = now
        self.exchanged_at = self.steps
        self.next_exchange = self.steps + min(self.steps, self.MOST_STEPS)
        self.has_cost = False
        return [self.step_seconds, self.cost_seconds]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Take what all ranks have collected."""
        self.step_seconds = min(of_rank[0] for of_rank in of_ranks)
        cost = max(of_rank[1] for of_rank in of_ranks)
        self.every = 1
        if cost > self.free_seconds:
            self.every = max(1, math.ceil(cost / (self.share * self.step_seconds)))
