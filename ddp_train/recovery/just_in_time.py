"""What a worker does for the case that another one of its host dies: it stops with the state of a
completed step, and saves it if the launcher asks for that."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.checkpoint_hook import CheckpointHook
from ddp_train.distributed.connections import break_connections
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.errors import LaunchError
from ddp_train.linux import wait_until
from ddp_train.recovery.rank_state import RankState
from ddp_train.recovery.survivor import Survivor
from ddp_train.resilience.failure import is_peer_error
from ddp_train.resilience.heartbeat import (
    NO_ORDER,
    NOT_SAVED,
    SAVE,
    SAVED,
    STARTING,
    STOP,
    STOPPED,
    TRAINING,
    StatusBoard,
)
from ddp_train.resilience.preemption import StopController
from ddp_train.text import first_line

ORDER_SECONDS = 3.0
"""How long a worker with a peer's error waits for the launcher to say that a rank is dead. It sees
that in 20 ms."""
OTHER_SECONDS = 0.2
"""The same with an error that is not known as one: gloo may word it in yet another way."""
END_SECONDS = 600.0
"""The longest wait for the next order, or for the end."""
log = logging.getLogger(__name__)


class RecoveryHook:
    """Notes the cost of a lost rank, with the first step that is done after it."""

    def __init__(
        self,
        metrics_hook: MetricsHook,
        lost: dict[str, Any],
        first_step: int,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.at = lost["at"]
        self.first_step = first_step
        self.forget = forget
        earlier = [self._cost_of(loss) for loss in lost.get("before", ())]
        self.cost = self._cost_of(lost)
        metrics_hook.recoveries += [*earlier, self.cost]

    def _cost_of(self, lost: dict[str, Any]) -> dict[str, Any]:
        """What a loss has cost; its seconds are not known yet."""
        return {
            "rank": lost["rank"],
            "kind": lost.get("kind", "died"),
            "step": self.first_step,
            # 0 too where it was lost before it had resumed.
            "steps_redone": max(0, int(lost["step"]) - self.first_step),
            "seconds": None,
        }

    def due(self, job: Job) -> int:
        return sys.maxsize if self.cost["seconds"] else self.first_step + 1

    def act(self, job: Job) -> None:
        if self.cost["seconds"] is None and job.step > self.first_step:
            self.cost["seconds"] = time.monotonic() - self.at
            self.forget()


class JustInTime:
    """Stops with the state of a completed step if a peer dies, and saves it if the launcher asks
    for that."""

    def __init__(
        self,
        board: StatusBoard,
        rank: int,
        run_dir: Path,
        checkpoint_hook: CheckpointHook,
        rank_state: RankState,
    ) -> None:
        """
        checkpoint_hook: makes the snapshots of this run.
        rank_state: what this rank alone knows.
        """
        self.rank_state = rank_state
        self.status = board.ranks[rank]
        self.survivor = Survivor(
            rank, run_dir, checkpoint_hook, rank_state, self.status, board.ranks
        )

    @contextlib.contextmanager
    def saving_on_loss(self, job: Job, hooks_owed: bool) -> Iterator[None]:
        """A context in which the death of a peer makes this process stop and, if the launcher asks
        for it, save. The error is raised if the launcher knows of no death.

        hooks_owed: those of `job.step` have not acted yet.
        """
        reason = self.rank_state.reason_unavailable(job)
        if reason:
            log.info("if a rank dies, the run restarts from its last checkpoint: %s", reason)
            yield
            return
        self.rank_state.begin(job)
        self.status.recovery.acted = job.step - hooks_owed
        self.survivor.surround_hooks(job)
        # Not the job: the status outlives it, and DDP its process group.
        self.status.on_stop = partial(_wake, job.stop)
        self.status.recovery.state = TRAINING
        try:
            yield
        except RuntimeError as error:
            self._stop(job, error)
            raise
        finally:
            self.status.recovery.state = STARTING

    def _stop(self, job: Job, error: RuntimeError) -> None:
        """Stop with the state of a completed step, and end with the process.

        Returns if the launcher knows of no death, or the state may be that of no step.
        """
        of_peer = is_peer_error(error)
        if of_peer:
            break_connections()  # peers that wait for this rank learn of it
        if not self.rank_state.is_intact(job, self.status.phase, of_peer):
            return
        seconds = ORDER_SECONDS if of_peer else OTHER_SECONDS
        if not wait_until(lambda: self.status.recovery.order != NO_ORDER, seconds, 0.001):
            return
        # torch's handler raises, anywhere, if a loader process dies now.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job.stop.release()  # what a stop request would do now is the launcher's business
        for parameter in job.module.parameters():
            parameter.grad = None  # partial sums
        try:
            self.rank_state.roll_back(job)
        except (RuntimeError, LaunchError) as failure:
            log.warning("a rank is lost, and the state here is of no use: %s", first_line(failure))
            self.status.recovery.state = NOT_SAVED
        else:
            log.info("a rank is lost: stopped after step %d (%s)", job.step, first_line(error))
            self.status.recovery.state = STOPPED
        self._wait(STOP)
        if self.status.recovery.order != SAVE:
            return
        try:
            saved = self.survivor.save(job)
        except Exception as failure:  # noqa: BLE001  whatever it is, another survivor may be able to
            log.warning("step %d could not be saved: %s", job.step, failure)
            saved = False
        self.status.recovery.state = SAVED if saved else NOT_SAVED
        self._wait(SAVE)

    def _wait(self, while_it_is: int) -> None:
        wait_until(lambda: self.status.recovery.order != while_it_is, END_SECONDS, 0.001)


def _wake(stop: StopController) -> None:
    """End what training may wait for."""
    break_connections()
    stop.end_waiting()
