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
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_train.linux import wait_until
from ddp_train.resilience.heartbeat import SAVE, SAVED, STOP, STOPPED, TRAINING, StatusBoard

POLL_SECONDS = 0.002
LATE_SECONDS = 2.0
"""How long a survivor may take to stop once another one has. 20 to 300 ms are usual: its heartbeat
looks five times a second."""


@dataclass(frozen=True)
class Loss:
    """A rank that was lost, by its death, a hang or an error of its own, for the attempt that
    follows."""

    rank: int
    step: int
    """The last step that a survivor had completed; if none survived, the last of all ranks."""
    at: float
    """When, by `time.monotonic`, which all processes of a host share."""
    kind: str = "died"
    """The kind of the failure."""
    before: tuple[Loss, ...] = ()
    """Earlier losses that no checkpoint knows of: the attempt that followed each of them left
    none."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def after(self, earlier: Loss | None) -> Loss:
        """This loss in an attempt that followed an earlier one and has left no checkpoint."""
        if earlier is None:
            return self
        return replace(self, before=(*earlier.before, replace(earlier, before=())))


def save_by_survivor(
    board: StatusBoard,
    is_alive: Callable[[int], bool],
    seconds: float,
    given_up: Callable[[], bool],
    before_saving: Callable[[], None] = lambda: None,
    on_late: Callable[[list[int]], None] = lambda _: None,
) -> int | None:
    """Let the survivors stop, and the one that is furthest save its state.

    Survivors are at most one step apart. One that has completed a step had everybody's contribution
    to it, so the highest one is right; a step that only the dead rank had completed is computed
    again. If the one that saves dies, the next best does it. A rank stuck outside a collective, in
    the user's code or while it waits for a batch, cannot be ahead of the stopped ranks: it is
    waited for at most LATE_SECONDS.

    seconds: how long stopping may take (20 ms, unless a rank computes for long without an
        exchange), and how long saving.
    given_up: ends the waiting.
    before_saving: returns once a survivor may write.
    on_late: called with the ranks that are not waited for.

    Returns the step that is saved; None if none is.
    """
    statuses = board.ranks
    ranks = range(len(statuses))
    for status in statuses:
        status.recovery.order = STOP

    def wait(until: Callable[[], bool]) -> None:
        wait_until(lambda: until() or given_up(), seconds, POLL_SECONDS)

    def living(state: int) -> list[int]:
        in_state = [rank for rank in ranks if statuses[rank].recovery.state == state]
        return [rank for rank in in_state if is_alive(rank)]

    late_at = math.inf

    def have_stopped() -> bool:
        nonlocal late_at
        training = living(TRAINING)
        furthest = max((statuses[rank].step for rank in living(STOPPED)), default=-1)
        if furthest >= 0:
            late_at = min(late_at, time.monotonic() + LATE_SECONDS)
        are_behind = all(statuses[rank].step <= furthest for rank in training)
        return not training or (are_behind and time.monotonic() > late_at)

    wait(have_stopped)
    late = living(TRAINING)
    if late and not given_up():
        on_late(late)
    before_saving()
    stopped = [rank for rank in ranks if statuses[rank].recovery.state == STOPPED]
    for rank in sorted(stopped, key=lambda rank: -statuses[rank].step):
        status = statuses[rank]
        mailbox = status.recovery
        mailbox.order = SAVE
        wait(lambda mailbox=mailbox, rank=rank: mailbox.state != STOPPED or not is_alive(rank))
        if mailbox.state == SAVED:
            return status.step
        if mailbox.state == STOPPED and is_alive(rank):
            return None  # it takes too long: another one would write the same files
    return None
