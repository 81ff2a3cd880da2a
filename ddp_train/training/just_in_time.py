"""What a worker does for the case that another one dies: it stops with the state of a completed step, and saves it.

The one that saves takes weights and moments from its own memory, where they are those of all, and what each rank alone
knows from `own_state`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_train.distributed.connections import break_connections
from ddp_train.distributed.process_group import set_buffers
from ddp_train.errors import DataError, LaunchError
from ddp_train.resilience import run_lock
from ddp_train.resilience.checkpoint_files import place_of, places, read_manifest
from ddp_train.resilience.failure_report import is_peer_error
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
from ddp_train.tasks.mean_loss import Mean
from ddp_train.text import first_line
from ddp_train.training import averaging, checkpoint, saved
from ddp_train.training.checkpoint import Snapshot
from ddp_train.training.checkpoint_hook import CheckpointHook, with_unreported
from ddp_train.training.hooks import MetricsHook
from ddp_train.training.loop import Job
from ddp_train.training.own_state import OwnState

ORDER_SECONDS = 3.0
"""How long a worker with a peer's error waits for the launcher to say that a rank is dead. It sees that in 20 ms."""
OTHER_SECONDS = 0.2
"""The same with an error that is not known as one: gloo may word it in yet another way."""
END_SECONDS = 600.0
"""The longest wait for the next order, or for the end."""
MARK = "just_in_time"
"""The entry of the manifest that tells these checkpoints from others."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EveryHook:
    """Acts whenever another hook is due."""

    call: Callable[[Job], None]

    def due(self, job: Job) -> int:
        return sys.maxsize

    def act(self, job: Job) -> None:
        self.call(job)


class RecoveryHook:
    """Notes, with the first step that is done after a rank was lost, what that has cost."""

    def __init__(self, record: MetricsHook, lost: dict[str, float], first_step: int) -> None:
        self.at, self.first_step = lost["at"], first_step
        redone = max(0, int(lost["step"]) - first_step)  # 0 too where it was lost before it had resumed
        facts = {"rank": int(lost["rank"]), "step": first_step, "steps_redone": redone}
        self.cost: dict[str, Any] = {**facts, "seconds": None}
        record.recoveries.append(self.cost)

    def due(self, job: Job) -> int:
        return sys.maxsize if self.cost["seconds"] else self.first_step + 1

    def act(self, job: Job) -> None:
        if self.cost["seconds"] is None and job.step > self.first_step:
            self.cost["seconds"] = time.monotonic() - self.at


class JustInTime:
    """Stops with the state of a completed step if a peer dies, and saves it if the launcher asks for that."""

    def __init__(
        self, board: StatusBoard, rank: int, run_dir: Path, checkpoints: CheckpointHook, own: OwnState
    ) -> None:
        """checkpoints: makes the snapshots of this run. own: what this rank alone knows."""
        self.board, self.rank, self.run_dir, self.checkpoints, self.own = board, rank, run_dir, checkpoints, own
        self.status = board.ranks[rank]
        self.owner = run_lock.owner(run_dir / run_lock.FILE)
        self.before_hooks: tuple[int, dict[str, Any]] = -1, {}
        """The last step after which hooks acted, and their state before they did."""
        self.reported = -1
        """The last step whose losses hooks have taken, and those of the steps before it."""

    def _around_hooks(self, job: Job) -> None:
        """Notes where the hooks are: those of users too, which have been added by now."""

        def before(job: Job) -> None:
            self.before_hooks = job.step, self.checkpoints.state()
            self.own.note_losses(job)

        def after(job: Job) -> None:
            if not job.stepper.losses.seen:
                self.reported = job.step
            self.status.acted = job.step

        job.hooks = [EveryHook(before), *job.hooks, EveryHook(after)]

    @contextlib.contextmanager
    def offered(self, job: Job, hooks_owed: bool) -> Iterator[None]:
        """Inside, the death of a peer makes this process stop and, if the launcher asks for it, save. The error goes on
        its way if the launcher knows of no death. hooks_owed: those of `job.step` have not acted yet."""
        if reason := self.own.why_not(job):
            log.info("if a rank dies, the run restarts from its last checkpoint: %s", reason)
            yield
            return
        self.own.begin(job)
        self.status.acted = job.step - hooks_owed
        self._around_hooks(job)
        self.status.on_stop = break_connections
        self.status.state = TRAINING
        try:
            yield
        except RuntimeError as error:
            self._stop(job, error)
            raise
        finally:
            self.status.state = STARTING

    def _stop(self, job: Job, error: RuntimeError) -> None:
        """Returns if the launcher knows of no death, or the state may be that of no step; else it ends with the
        process."""
        of_peer = is_peer_error(error)
        if of_peer:
            break_connections()  # peers that wait for this rank learn of it
        if not self.own.is_intact(job, self.status.phase, of_peer):
            return
        deadline = time.monotonic() + (ORDER_SECONDS if of_peer else OTHER_SECONDS)
        while self.status.order == NO_ORDER and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.status.order == NO_ORDER:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises, anywhere, if a loader process dies now
        job.stop.is_over.set()  # what a stop request would do now is the launcher's business
        for parameter in job.module.parameters():
            parameter.grad = None  # partial sums
        try:
            self.own.settle(job)
        except (RuntimeError, LaunchError) as failure:
            log.warning("a rank is lost, and the state here is of no use: %s", first_line(failure))
            self.status.state = NOT_SAVED
        else:
            log.info("a rank is lost: stopped after step %d (%s)", job.step, first_line(error))
            self.status.state = STOPPED
        self._wait(STOP)
        if self.status.order != SAVE:
            return
        try:
            saved = self._save(job)
        except Exception as failure:  # noqa: BLE001  whatever it is, another survivor may be able to
            log.warning("step %d could not be saved: %s", job.step, failure)
            saved = False
        self.status.state = SAVED if saved else NOT_SAVED
        self._wait(SAVE)

    def _wait(self, while_it_is: int) -> None:
        deadline = time.monotonic() + END_SECONDS
        while self.status.order == while_it_is and time.monotonic() < deadline:
            time.sleep(0.001)

    def _save(self, job: Job) -> bool:
        """Whether the step is saved now. Raises NonFiniteLossError if a weight is not finite: nobody saves such."""
        snapshot = self.snapshot(job)
        if snapshot is None:
            return False
        if not snapshot.manifest["hooks_owed"] and self._is_saved(job.step):
            return True
        job.stepper.check_finite.check_weights(job.step)
        new = checkpoint.write(self.run_dir, snapshot, self.owner)
        for place in places(self.run_dir):  # of the deaths before, which no hook has removed yet
            with contextlib.suppress(OSError, ValueError):  # what cannot be read was not written here
                if place < new and read_manifest(place).get(MARK):
                    place.rename(place.with_name(f"{place.name}.part-old"))  # the next writer removes it
        return True

    def _is_saved(self, step: int) -> bool:
        """Whether the ordinary checkpoint of this step is there, which knows its score."""
        place = place_of(self.run_dir, step)
        with contextlib.suppress(DataError, OSError, ValueError):
            return place.is_dir() and not read_manifest(place).get(MARK) and bool(saved.find(str(place), place))
        return False

    def snapshot(self, job: Job) -> Snapshot | None:
        """The state after `job.step`, of all ranks; None if that of one is missing."""
        ranks = self.own.of_ranks(job.step)
        known = [one for one in ranks if one]
        if len(known) < len(ranks):
            missing = [str(rank) for rank, one in enumerate(ranks) if one is None]
            log.warning("step %d cannot be saved: rank %s had not begun to train", job.step, ", ".join(missing))
            return None
        begun, state_before = self.before_hooks
        # Who died among the hooks, or before it wrote the checkpoint that they asked for, did not end them. Where they
        # only make up for an evaluation, the state says so, and the lines of this step stay.
        owed = begun == job.step and any(status.acted < job.step or status.saving for status in self.board.ranks)
        # On a GPU hooks may have begun after a step that turned out to be none.
        state = state_before if owed or begun > job.step else self.checkpoints.state()
        if owed or self.reported != job.step:
            losses = [one.loss for one in known]
            unreported = Mean(math.fsum(loss.sum for loss in losses), math.fsum(loss.units for loss in losses))
            state = with_unreported(state, unreported)
        gathered = torch.empty(len(ranks) if job.strategy.buffers_differ else 1, 0)
        if buffers := known[self.rank].buffers:
            with torch.no_grad():
                for buffer, own in zip(job.module.buffers(), buffers, strict=True):
                    buffer.copy_(own)
        floating = [number for number, buffer in enumerate(buffers) if buffer.is_floating_point()]
        if floating:
            gathered = torch.stack(
                [torch.cat([one.buffers[number].double().flatten() for number in floating]) for one in known]
            )
            set_buffers(job.module, gathered.mean(0))
        average = job.stepper.average  # buffers are the same on all ranks then: no collective is needed
        taken = average and averaging.taken(average, job.strategy, job.module, copies=True)
        again = owed and not state["record"]["owes_score"]
        return self.checkpoints.snapshot(job, gathered, taken, state, {MARK: True, "hooks_owed": again, "test": None})
