"""What a survivor saves: the state after a completed step, of all ranks.

It takes weights and moments from its own memory, where they are those of all, and what each rank
alone knows from `own_state`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.checkpoint_hook import CheckpointHook, HookStates, add_unreported_loss
from ddp_train.checkpoints.layout import place_of, places, read_manifest
from ddp_train.checkpoints.training_state import METRICS, collect_average
from ddp_train.checkpoints.writer import SUPERSEDED, Snapshot, write_checkpoint
from ddp_train.distributed.process_group import set_buffers
from ddp_train.engine.loop import Job
from ddp_train.errors import DataError
from ddp_train.recovery.own_state import OwnState
from ddp_train.resilience import run_lock
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tasks.mean_loss import Mean

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


class Survivor:
    """Knows where the hooks are, and saves the state of a step if this process survives another
    one."""

    def __init__(
        self,
        rank: int,
        run_dir: Path,
        checkpoints: CheckpointHook,
        own: OwnState,
        status: RankStatus,
        statuses: Sequence[RankStatus] = (),
    ) -> None:
        """checkpoints: makes the snapshots of this run. own: what this rank alone knows. status: of
        this rank. statuses: of all ranks; none if they cannot be seen from here."""
        self.rank = rank
        self.run_dir = run_dir
        self.checkpoints = checkpoints
        self.own = own
        self.status = status
        self.statuses = statuses
        self.all_are_known = bool(statuses)
        self.owner = run_lock.owner(run_dir / run_lock.FILE)
        self.before_hooks: tuple[int, HookStates] = -1, {}
        """The last step after which hooks acted, and their state before they did."""
        self.reported = -1
        """The last step whose losses hooks have taken, and those of the steps before it."""

    def around_hooks(self, job: Job) -> None:
        """Notes where the hooks are: those of users too, which have been added by now."""

        def before(job: Job) -> None:
            self.before_hooks = job.step, self.checkpoints.hook_states()
            self.own.note_losses(job)

        def after(job: Job) -> None:
            if not job.stepper.losses.passes:
                self.reported = job.step
            self.status.recovery.acted = job.step

        job.hooks = [EveryHook(before), *job.hooks, EveryHook(after)]

    def save(self, job: Job) -> bool:
        """Whether the step is saved now. Raises NonFiniteLossError if a weight is not finite:
        nobody saves such."""
        snapshot = self.snapshot(job)
        if snapshot is None:
            return False
        if not snapshot.manifest["hooks_owed"] and self._is_saved(job.step):
            return True
        job.stepper.check_finite.check_weights(job.step)
        new = write_checkpoint(self.run_dir, snapshot, self.owner)
        for place in places(self.run_dir):  # of the deaths before, which no hook has removed yet
            with contextlib.suppress(
                OSError, ValueError
            ):  # what cannot be read was not written here
                if place < new and read_manifest(place).get(MARK):
                    # The next writer removes it.
                    place.rename(place.with_name(place.name + SUPERSEDED))
        return True

    def _is_saved(self, step: int) -> bool:
        """Whether the ordinary checkpoint of this step is there, which knows its score."""
        place = place_of(self.run_dir, step)
        with contextlib.suppress(DataError, OSError, ValueError):
            return (
                place.is_dir()
                and not read_manifest(place).get(MARK)
                and bool(reader.find(str(place), place))
            )
        return False

    def snapshot(self, job: Job) -> Snapshot | None:
        """The state after `job.step`, of all ranks; None if that of one is missing."""
        ranks = self.own.of_ranks(job.step)
        known = [one for one in ranks if one]
        if len(known) < len(ranks):
            missing = [str(rank) for rank, one in enumerate(ranks) if one is None]
            log.warning(
                "step %d cannot be saved: rank %s had not begun to train",
                job.step,
                ", ".join(missing),
            )
            return None
        begun, state_before = self.before_hooks
        # Who died among the hooks, or before it wrote the checkpoint that they asked for, did not
        # end them. Where they only make up for an evaluation, the state says so, and the lines of
        # this step stay.
        known_done = self.all_are_known and not any(
            one.recovery.acted < job.step or one.saving for one in self.statuses
        )
        owed = begun == job.step and not known_done
        # On a GPU hooks may have begun after a step that turned out to be none.
        state = state_before if owed or begun > job.step else self.checkpoints.hook_states()
        if owed or self.reported != job.step:
            losses = [one.loss for one in known]
            unreported = Mean(
                math.fsum(loss.sum for loss in losses), math.fsum(loss.units for loss in losses)
            )
            state = add_unreported_loss(state, unreported)
        gathered = torch.empty(len(ranks) if job.strategy.buffers_differ else 1, 0)
        if buffers := known[self.rank].buffers:
            with torch.no_grad():
                for buffer, own in zip(job.module.buffers(), buffers, strict=True):
                    buffer.copy_(own)
        floating = [number for number, buffer in enumerate(buffers) if buffer.is_floating_point()]
        if floating:
            gathered = torch.stack(
                [
                    torch.cat([one.buffers[number].double().flatten() for number in floating])
                    for one in known
                ]
            )
            set_buffers(job.module, gathered.mean(0))
        average = None
        if job.stepper.average:
            # Buffers are the same on all ranks then: no collective is needed.
            average = collect_average(job.stepper.average, job.strategy, job.module, copies=True)
        again = owed and not state[METRICS]["owes_score"]
        return self.checkpoints.snapshot(
            job, gathered, average, state, {MARK: True, "hooks_owed": again, "test": None}
        )
