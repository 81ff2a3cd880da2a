"""A rank has died: the others still hold every step. One of them saves it before all are replaced.
Torch-free.

Under DDP every rank has the same weights and moments, so a death need not cost the steps since the
last checkpoint. The idea is that of just-in-time checkpointing (EuroSys 2024,
doi:10.1145/3627703.3650085). This is the launcher's part; the workers' is recovery/just_in_time.py.
They speak through the status board alone: the store may have died with rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ddp_train.linux import wait_until
from ddp_train.resilience.heartbeat import SAVE, SAVED, STOP, STOPPED, TRAINING, StatusBoard

POLL_SECONDS = 0.002
LATE_SECONDS = 2.0
"""How long a survivor may take to stop once another one has. 20 to 300 ms are usual: its heartbeat
looks five times a second."""


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
    on_late: Callable[[list[int]], None] = lambda _: None,
) -> int | None:
    """Lets the survivors stop, and the one that is furthest save its state. Returns its step, None
    if none was saved.

    Survivors are at most one step apart. Who has completed a step had everybody's contribution to
    it, so the highest one is right; a step that only the dead rank had completed is computed again.
    If the one that saves dies, the next best does it. Who stands still where no broken connection
    is noticed, in code of the user's or while it waits for a batch, has no step that those who have
    stopped lack: it is not waited for beyond LATE_SECONDS.

    seconds: how long stopping may take (20 ms, unless a rank computes for long without an
    exchange), and how long saving. given_up: ends the waiting. before_saving: what must be over
    before a survivor writes. on_late: is told the ranks that are not waited for.
    """
    ranks = range(len(board.ranks))
    for rank in ranks:
        board.ranks[rank].order = STOP

    def wait(until: Callable[[], bool]) -> None:
        wait_until(lambda: until() or given_up(), seconds, POLL_SECONDS)

    def those(state: int) -> list[int]:
        return [rank for rank in ranks if board.ranks[rank].state == state and is_alive(rank)]

    late_at = math.inf

    def have_stopped() -> bool:
        nonlocal late_at
        training = those(TRAINING)
        best = max((board.ranks[rank].step for rank in those(STOPPED)), default=-1)
        if best >= 0:
            late_at = min(late_at, time.monotonic() + LATE_SECONDS)
        is_behind = all(board.ranks[rank].step <= best for rank in training)
        return not training or (is_behind and time.monotonic() > late_at)

    wait(have_stopped)
    if (late := those(TRAINING)) and not given_up():
        on_late(late)
    before_saving()
    stopped = [rank for rank in ranks if board.ranks[rank].state == STOPPED]
    for rank in sorted(stopped, key=lambda rank: -board.ranks[rank].step):
        status = board.ranks[rank]
        status.order = SAVE
        wait(lambda status=status, rank=rank: status.state != STOPPED or not is_alive(rank))
        if status.state == SAVED:
            return status.step
        if status.state == STOPPED and is_alive(
            rank
        ):  # it takes too long: another one would write the same files
            return None
    return None
