"""What a survivor saves: the state after a completed step, of all ranks.

It takes weights and moments from its own memory, where they are those of all, and what each rank
alone knows from `rank_state`.
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
from torch import Tensor

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.checkpoint_hook import CheckpointHook, HookStates, add_unreported_loss
from ddp_train.checkpoints.layout import place_of, places, read_manifest
from ddp_train.checkpoints.training_state import METRICS, collect_average
from ddp_train.checkpoints.writer import SUPERSEDED, Snapshot, write_checkpoint
from ddp_train.distributed.process_group import set_buffers
from ddp_train.engine.loop import Job
from ddp_train.errors import DataError
from ddp_train.recovery.rank_state import KnownState, RankState
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
        checkpoint_hook: CheckpointHook,
        rank_state: RankState,
        status: RankStatus,
        statuses: Sequence[RankStatus] = (),
    ) -> None:
        """
        checkpoint_hook: makes the snapshots of this run.
        rank_state: what this rank alone knows.
        status: of this rank.
        statuses: of all ranks; none if they cannot be seen from here.
        """
        self.rank = rank
        self.run_dir = run_dir
        self.checkpoint_hook = checkpoint_hook
        self.rank_state = rank_state
        self.status = status
        self.statuses = statuses
        self.owner = run_lock.owner(run_dir / run_lock.FILE)
        self.before_hooks: tuple[int, HookStates] = -1, {}
        """The last step after which hooks acted, and their state before they did."""
        self.reported = -1
        """The last step whose losses hooks have taken, and those of the steps before it."""

    def surround_hooks(self, job: Job) -> None:
        """Note where the hooks are: those of users too, which have been added by now."""

        def before(job: Job) -> None:
            self.before_hooks = job.step, self.checkpoint_hook.hook_states()
            self.rank_state.keep_losses(job)

        def after(job: Job) -> None:
            if not job.stepper.losses.passes:
                self.reported = job.step
            self.status.recovery.acted = job.step

        job.hooks = [EveryHook(before), *job.hooks, EveryHook(after)]

    def save(self, job: Job) -> bool:
        """Save the step. Returns whether it is saved now.

        Raises NonFiniteLossError if a weight is not finite: nobody saves such.
        """
        snapshot = self.snapshot(job)
        if snapshot is None:
            return False
        if not snapshot.manifest["hooks_owed"] and self._is_saved(job.step):
            return True
        job.stepper.check_finite.check_weights(job.step)
        new = write_checkpoint(self.run_dir, snapshot, self.owner)
        for place in places(self.run_dir):  # of the deaths before, which no hook has removed yet
            # What cannot be read was not written here.
            with contextlib.suppress(OSError, ValueError):
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
        ranks = self.rank_state.states_of_ranks(job.step)
        known = [state for state in ranks if state]
        if len(known) < len(ranks):
            missing = [str(rank) for rank, state in enumerate(ranks) if state is None]
            log.warning(
                "step %d cannot be saved: rank %s had not begun to train",
                job.step,
                ", ".join(missing),
            )
            return None
        hooks_owed = self._hooks_are_owed(job.step)
        states = self._hook_states(job.step, hooks_owed, [state.loss for state in known])
        buffers = self._set_buffers(job, known)
        average = None
        if job.stepper.average:
            # Buffers are the same on all ranks then: no collective is needed.
            average = collect_average(job.stepper.average, job.strategy, job.module, copies=True)
        # Where hooks only make up for an evaluation, their state says so, and the lines of this
        # step stay.
        hooks_owed = hooks_owed and not states[METRICS]["owes_score"]
        manifest = {MARK: True, "hooks_owed": hooks_owed, "test": None}
        weights = job.strategy.full_weights(job.module.model)
        return self.checkpoint_hook.snapshot(job, weights, buffers, average, states, manifest)

    def _hooks_are_owed(self, step: int) -> bool:
        """Whether hooks must act again after this step: a rank that died among them, or before it
        wrote the checkpoint that they asked for, did not end them."""
        begun, _ = self.before_hooks
        if begun != step:
            return False
        have_acted = [
            status.recovery.acted >= step and not status.saving for status in self.statuses
        ]
        return not (have_acted and all(have_acted))

    def _hook_states(self, step: int, hooks_owed: bool, losses: Sequence[Mean]) -> HookStates:
        """States of the hooks, which have the losses of all steps.

        losses: of each rank, not yet taken by hooks.
        """
        begun, states_before = self.before_hooks
        if hooks_owed or begun > step:  # on a GPU after a step that turned out to be none
            states = states_before
        else:
            states = self.checkpoint_hook.hook_states()
        if hooks_owed or self.reported != step:
            total = math.fsum(loss.sum for loss in losses)
            units = math.fsum(loss.units for loss in losses)
            states = add_unreported_loss(states, Mean(total, units))
        return states

    def _set_buffers(self, job: Job, known: Sequence[KnownState]) -> Tensor:
        """Give the model the mean of all ranks' buffers. Returns those of each: [ranks, n]."""
        buffers = known[self.rank].buffers
        with torch.no_grad():
            for buffer, value in zip(job.module.buffers(), buffers, strict=bool(buffers)):
                buffer.copy_(value)
        floating = [number for number, buffer in enumerate(buffers) if buffer.is_floating_point()]
        if not floating:
            return torch.empty(len(known) if job.strategy.buffers_differ else 1, 0)
        of_ranks = []
        for state in known:
            parts = [state.buffers[number].double().flatten() for number in floating]
            of_ranks.append(torch.cat(parts))
        gathered = torch.stack(of_ranks)
        set_buffers(job.module, gathered.mean(0))
        return gathered
