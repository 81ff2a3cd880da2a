"""A rank has died: the others still hold every step. One of them saves it before all are replaced. Torch-free.

Under DDP every rank has the same weights and moments, so a death need not cost the steps since the last checkpoint. The
idea is that of just-in-time checkpointing (EuroSys 2024, doi:10.1145/3627703.3650085). This is the launcher's part; the
workers' is training/just_in_time.py. They speak through the status board alone: the store may have died with rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ddp_train.resilience.heartbeat import SAVE, SAVED, STOP, STOPPED, TRAINING, StatusBoard

POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Loss:
    """A rank that was lost, for the attempt that follows."""

    rank: int
    step: int
    """The last one that a survivor had completed; that of the dead rank if none survived."""
    at: float
    """When, by `time.monotonic`, which all processes of a host share."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def save_by_survivor(
    board: StatusBoard,
    is_alive: Callable[[int], bool],
    seconds: float,
    given_up: Callable[[], bool],
    before_saving: Callable[[], None] = lambda: None,
) -> int | None:
    """Lets the survivors stop, and the one that is furthest save its state. Returns its step, None if none was saved.

    Survivors are at most one step apart. Who has completed a step had everybody's contribution to it, so the highest
    one is right; a step that only the dead rank had completed is computed again. If the one that saves dies, the next
    best does it. seconds: how long stopping may take (20 ms, unless a rank computes for long without an exchange), and
    how long saving. given_up: ends the waiting. before_saving: what must be over before a survivor writes.
    """
    ranks = range(len(board.ranks))
    for rank in ranks:
        board.ranks[rank].order = STOP

    def wait(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline and not given_up():
            time.sleep(POLL_SECONDS)

    wait(lambda: not any(board.ranks[rank].state == TRAINING and is_alive(rank) for rank in ranks))
    before_saving()
    stopped = [rank for rank in ranks if board.ranks[rank].state == STOPPED]
    for rank in sorted(stopped, key=lambda rank: -board.ranks[rank].step):
        status = board.ranks[rank]
        status.order = SAVE
        wait(lambda status=status, rank=rank: status.state != STOPPED or not is_alive(rank))
        if status.state == SAVED:
            return status.step
        if status.state == STOPPED and is_alive(rank):  # it takes too long: another one would write the same files
            return None
    return None


def saved_step(step: int, goes_on: bool) -> str:
    """In words."""
    if goes_on:
        return f"step {step} is saved: a surviving rank had it"
    return f"saved step {step} from a surviving rank; the same command resumes there"
