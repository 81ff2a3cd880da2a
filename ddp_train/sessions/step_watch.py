"""Finds the process that leaves out a step which the others exchange, where they would wait.

The processes tell each other on the launcher's board, in shared memory: no exchange, and no time
limit. What is written there names a step of an epoch, so that an old entry says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.settings import UsageError

SAME_STEPS = (
    "every process must take part in every step, with an empty batch too: no continue, break or"
    " return before backward() on one of them; decide for all by a sum,"
    " if math.isfinite(run.sum(loss.item())): ..."
)
FIRST = 2**40
"""The number of the first step: more than an epoch has."""


class StepWatch:
    """Compares what this process does in a step with what the others do in it."""

    def __init__(self, status: RankStatus, rank: int) -> None:
        self.status = status
        self.rank = rank
        self.statuses: Sequence[RankStatus] = ()
        """Those of all processes, by rank; none where no launcher of ours has started them."""

    def see_backward(self, epoch: int, step: int) -> None:
        """Called before this process exchanges gradients.

        Raises UsageError if another one has left out that step: it would wait.
        """
        key = _key(epoch, step)
        # First written, then read: of two processes at least one sees the other.
        self.status.exchanged_step = key
        for rank, other in enumerate(self.statuses):
            if other.left_out_from <= key <= other.left_out_to:
                raise self._error(rank, self.rank, step)

    def see_left_out(self, epoch: int, step: int) -> None:
        """Called when this process has left a step, or its epoch, without a backward pass in it.

        Raises UsageError if another one exchanges the gradients of that step: it would wait.
        """
        key = _key(epoch, step)
        own = self.status
        if own.exchanged_step == key:
            return  # a loss that went backward behind the loop over batches
        if own.left_out_to <= own.exchanged_step:
            own.left_out_from = key
        own.left_out_to = key
        for rank, other in enumerate(self.statuses):
            if own.left_out_from <= other.exchanged_step <= key:
                raise self._error(self.rank, rank, other.exchanged_step % FIRST)

    def _error(self, left_out: int, exchanges: int, step: int) -> UsageError:
        return UsageError(
            f"rank {left_out} made no backward pass in step {step}, and rank {exchanges} makes one,"
            " which is an exchange among all processes",
            SAME_STEPS,
        )


def _key(epoch: int, step: int) -> int:
    """A step of an epoch as one number: a step that an epoch ends before is in the next one too."""
    return (epoch + 1) * FIRST + step
