"""Finds processes that enter different exchanges, where they would wait for each other.

Each tells the others on the launcher's board, in shared memory: no exchange, and no time limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ddp_train.distributed.training_step import ALL_GATHER, BATCH_NORM
from ddp_train.resilience.heartbeat import KEPT_EXCHANGES, RankStatus
from ddp_train.sessions.settings import UsageError

BACKWARD = "backward()"
UNITS = "run.mean(losses, over=...)"
CLOSURE = "optimizer.step(closure)"
OWN_GRADIENTS = "optimizer.step() without run.mean"
SUM = "run.sum"
GATHER = "run.gather"
LOADER = "run.loader"
TEST_LOADER = "run.test_loader"
PASS = "a loop over run.loader"
STREAMED_BATCH = "the next batch of run.loader"
UPDATE_BN = "run.update_bn"
LINE = "the line that is logged"
CHECKPOINT = "a checkpoint"
KEEPING = "the end of a step"
END_OF_EPOCH = "the end of an epoch"
END_OF_SESSION = "the end of the session"
EXCHANGES = (
    *("", BACKWARD, UNITS, CLOSURE, BATCH_NORM, ALL_GATHER, SUM, GATHER, LOADER, TEST_LOADER),
    *(PASS, STREAMED_BATCH, UPDATE_BN, LINE, CHECKPOINT, KEEPING, END_OF_EPOCH, END_OF_SESSION),
    OWN_GRADIENTS,
)
"""The name of each exchange of a session, by its number; 0 is that of none."""
PHRASES = {
    PASS: "at the beginning of a loop over run.loader",
    STREAMED_BATCH: "waiting for the next batch of run.loader",
    LINE: "writing a log line",
    CHECKPOINT: "saving a checkpoint",
    KEEPING: "at the end of a step",
    END_OF_EPOCH: "at the end of an epoch",
    END_OF_SESSION: "at the end of the session",
}
"""Descriptions of the exchanges that are no calls of the user's, for "rank 0 is ..."."""
NUMBERS = {name: number for number, name in enumerate(EXCHANGES)}
SAME_ORDER = (
    "every process must make the same calls in the same order in every step, even where its"
    " batch is empty. Do not call run.sum or run.save inside of `if run.rank == 0`, and do not"
    " leave a step before backward() on one process alone. To skip a step, let all processes"
    " decide by the same sum: if not math.isfinite(run.sum(loss.item())): continue"
)
SAME_NORMS = (
    ". Batch norm over all processes also needs the same number of calls of the model on each"
    " process. If the model is called in a loop over samples, use run.wrap(model,"
    " sync_batch_norm=False)"
)
SAME_MEANS = (
    ". Call run.mean once for the whole batch, not in a loop over parts of it, of which processes"
    " may have unequally many: run.mean(torch.cat(losses))"
)


class ExchangeWatch:
    """Compares the exchanges that this process enters with those of the others, one by one.

    An exchange is written as one number, which a reader sees whole: its place in EXCHANGES in 8
    bits, in 16 how often the slots have been filled before, and above them the step.
    """

    def __init__(self, status: RankStatus, rank: int) -> None:
        self.rank = rank
        self.own = status.exchanges
        self.others: dict[int, ctypes.Array[ctypes.c_int64]] = {}
        """The exchanges of the other ranks; none where no launcher of ours has started them."""
        self.count = 0
        """Exchanges that this process has entered."""

    def watch(self, statuses: Sequence[RankStatus]) -> None:
        """Compare with the others. statuses: of all processes, by rank."""
        self.others = {
            rank: status.exchanges for rank, status in enumerate(statuses) if rank != self.rank
        }

    def enter(self, name: str, step: int = 0) -> None:
        """Called before this process enters an exchange.

        step: that it belongs to; 0 for one that may follow a step which is still open on some.

        Raises UsageError if another process has entered another one instead: both would wait.
        """
        if not self.others:
            return
        turns, slot = divmod(self.count, KEPT_EXCHANGES)
        self.count += 1
        turn = (turns & 0xFFFF) << 8
        mine = (step << 24) | turn | NUMBERS[name]
        # First written, then read: of two processes at least one sees the other.
        self.own[slot] = mine
        for rank, exchanges in self.others.items():
            other = exchanges[slot]
            if other != mine and other and other & 0xFFFF00 == turn:
                raise _error(self.rank, mine, rank, other)


def _error(rank: int, mine: int, other_rank: int, other: int) -> UsageError:
    remedy = SAME_ORDER
    if BATCH_NORM in (_name(mine), _name(other)):
        remedy += SAME_NORMS
    if UNITS in (_name(mine), _name(other)):
        remedy += SAME_MEANS
    return UsageError(
        f"rank {rank} is {_described(mine)}, but rank {other_rank} is {_described(other)}."
        " Each of the two waits for all processes, so the run would hang",
        remedy,
    )


def _name(exchange: int) -> str:
    return EXCHANGES[exchange & 0xFF]


def _described(exchange: int) -> str:
    name = _name(exchange)
    if name in (BACKWARD, UNITS, OWN_GRADIENTS):
        return f"in {name} of step {exchange >> 24}"
    return PHRASES.get(name, f"in {name}")
