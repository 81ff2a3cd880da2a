"""Keeps the state of a run after each step, and those of its hooks after they acted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_train.checkpoints.checkpoint_hook import CheckpointHook, HookStates
from ddp_train.engine.loop import Job
from ddp_train.engine.step_observers import PhaseReports
from ddp_train.errors import LaunchError, StateError
from ddp_train.optim.stepper import StepObserver, Stepper
from ddp_train.recovery.kept_hooks import HooksPlace, HooksPlaces
from ddp_train.recovery.kept_layout import packed
from ddp_train.recovery.kept_step import KeptStep, Numbers
from ddp_train.recovery.live_state import LiveState, state_of
from ddp_train.recovery.state_keeper import StateKeeper
from ddp_train.resilience.kept_memory import (
    TURNS,
    Record,
    marked_step,
    state_mark,
)
from ddp_train.tasks.mean_loss import ForwardPass, as_tensor


@dataclass(frozen=True)
class EveryHook:
    """Acts whenever another hook is due."""

    call: Callable[[Job], None]

    def due(self, job: Job) -> int:
        return sys.maxsize

    def act(self, job: Job) -> None:
        self.call(job)


class RunKeeper(StepObserver):
    """Keeps the state of a job after steps, and those of its hooks after they acted."""

    def __init__(
        self,
        keeper: StateKeeper,
        hooks_change_it: bool,
        hooks_change_themselves: bool,
        gathered: Callable[[], Tensor] | None = None,
    ) -> None:
        """
        hooks_change_it: hooks may change the weights, or other tensors of the state.
        hooks_change_themselves: the states of hooks may change where these do not act.
        gathered: see `live_state.state_of`.
        """
        self.keeper = keeper
        self.hooks_change_it = hooks_change_it
        self.hooks_change_themselves = hooks_change_themselves
        self.gathered = gathered
        self.hooks_places = {
            places: HooksPlaces(keeper.memory, keeper.rank, places) for places in TURNS
        }
        self.losses: HostLosses | DeviceLosses = HostLosses()
        self.acted_at = 0
        """The last step after which hooks have acted."""
        self.job: Job | None = None
        self.live: LiveState | None = None
        self.tensors_may_differ = False
        """Hooks have acted since the last step: they may have put other tensors into the model."""
        self.hook_states: Callable[[], HookStates] = dict

    @contextlib.contextmanager
    def keeping(
        self, job: Job, checkpoint_hook: CheckpointHook, hooks_owed: bool, owner: dict[str, str]
    ) -> Iterator[None]:
        """A context in which the state after each step is kept, on a GPU at the pace.

        owner: of the run directory, see `run_lock.owner`: nobody else may save what is kept.
        hooks_owed: the hooks of `job.step` have not acted yet.
        """
        keeper = self.keeper
        if keeper.device:
            job.stepper.travelling.append(keeper.device.pace)  # even if this rank can keep nothing
            job.stepper.copies = keeper.device.copies
            self.losses = DeviceLosses(keeper.device.name)
        try:
            keeper.begin(
                {
                    "is_session": False,
                    "manifest": checkpoint_hook.manifest,
                    "buffers_differ": job.strategy.buffers_differ,
                    "owner": owner,
                }
            )
        except LaunchError as error:
            keeper.give_up(error)
            yield
            return
        for places in self.hooks_places.values():
            places.drop()
        self.job = job
        if keeper.rank == 0:  # a checkpoint has those of one rank, and they may be large
            self.hook_states = checkpoint_hook.hook_states
        self.acted_at = job.step - hooks_owed
        # Behind the observers of hooks, whose state is kept; a step is done once it is kept.
        job.stepper.observers.insert(_place_of_reports(job.stepper.observers), self)
        job.hooks = [EveryHook(self._before_hooks), *job.hooks, EveryHook(self._after_hooks)]
        try:
            yield
        finally:
            # It refers to the wrapped model, which must be freed before the process group.
            job.stepper.observers.remove(self)
            self.job = None
            self.live = None

    def after_update(self, steps_done: int) -> None:
        if self.keeper.pace.comes_to_keep():
            self._keep(steps_done)

    def _keep(self, step: int) -> None:
        job = self.job
        assert job
        if self.live is None or not self.live.is_of(job, self.tensors_may_differ):
            self.live = state_of(job, self.gathered)
        self.tensors_may_differ = False
        if step == job.hooks_step:
            self.keeper.facts.set_numbers(step, self.keeper.ranks)
        with self.keeper.turn() as kept:
            self._keep_hooks(self.hooks_places[kept.places], step)
            self._write(kept, state_mark(step, is_later=False))

    def _keep_hooks(self, places: HooksPlaces, step: int) -> None:
        """Keep the states of hooks as they are before these act after a step."""
        places.after.drop()
        if self.hooks_change_themselves:
            began = time.perf_counter()
            self._write_hooks(places.before, step)
            self.keeper.pace.took(time.perf_counter() - began)
        elif places.before.step != self.acted_at:
            self._write_hooks(places.before, self.acted_at)

    def _write_hooks(self, place: HooksPlace, step: int) -> None:
        """Keep the states of hooks. step: after which they have changed last."""
        assert self.job
        place.write(step, self.hook_states(), self.job.stepper)

    def _write(self, kept: KeptStep, mark: int) -> None:
        """Keep the state of the job. mark: see `state_mark`."""
        assert self.job and self.live
        stepper = self.job.stepper
        logged = None
        if stepper.logged.is_used:
            logged = packed((stepper.logged.state(), stepper.logged.kept()))
        kept.write(mark, self.live, self.losses.numbers_of(stepper), logged)

    def _before_hooks(self, job: Job) -> None:
        """Note that hooks act after this step, which they do too where training is stopped.

        They wait until the last state is copied: they may change weights.
        """
        self.keeper.facts.set_numbers(job.step, self.keeper.ranks)
        if job.stepper.copies:
            job.stepper.copies.before_update()

    def _after_hooks(self, job: Job) -> None:
        self.tensors_may_differ = True
        self.acted_at = job.step
        kept = self.keeper.last
        if kept is None or kept.mark is None or marked_step(kept.mark) != job.step:
            return
        after = self.hooks_places[kept.places].after
        if not self.hooks_change_it:
            self._write_hooks(after, job.step)
            return
        assert self.live
        # A process that is killed meanwhile has not kept this step: the one before is whole.
        kept.drop()
        live = state_of(job, self.gathered)
        self.live = self.live if self.live.is_like(live) else live
        try:
            self._write_hooks(after, job.step)
            self._write(kept, state_mark(job.step, is_later=True))
        except StateError:
            raise  # no checkpoint could be saved either
        except LaunchError as error:
            self.keeper.give_up(error)


def _place_of_reports(observers: Sequence[StepObserver]) -> int:
    """The place of those that report a step as done; the end if there are none."""
    places = (n for n, observer in enumerate(observers) if isinstance(observer, PhaseReports))
    return next(places, len(observers))


class HostLosses:
    """Sum and units of the losses since the last line of metrics, on the host."""

    def numbers_of(self, stepper: Stepper) -> Numbers:
        """Sum, units, the time, and the norm of the last gradients."""
        losses = stepper.losses
        norm = 0.0 if stepper.norm is None else stepper.norm.item()
        return losses.known_sum, losses.known_units, time.monotonic(), norm


class DeviceLosses:
    """Sum and units of the losses since the last line of metrics, on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.numbers = torch.zeros(Record.NUMBERS, dtype=torch.float64, device=device)
        """Sum, units, zero, and the norm of the last gradients."""
        self.sum, self.units, _, self.norm = self.numbers.unbind()
        self.counted: list[ForwardPass] = []

    def numbers_of(self, stepper: Stepper) -> Numbers:
        """Add the forward passes that are not counted yet.

        A loss that is not finite counts as nothing.
        """
        passes = stepper.losses.passes
        if not _begins_with(passes, self.counted):  # a line has them, or a step was skipped
            self.numbers.zero_()
            self.counted = []
        new = [one for one in passes[len(self.counted) :] if one[2].num_real]
        self.counted = list(passes)
        if new:
            losses = as_tensor([loss for loss, _, _ in new], self.device)
            self.sum.add_(losses.nan_to_num(posinf=0, neginf=0).sum())
            self.units.add_(as_tensor([units for _, units, _ in new], self.device).sum())
        if stepper.norm is not None:
            self.norm.copy_(stepper.norm)
        return self.numbers


def _begins_with(passes: list[ForwardPass], counted: list[ForwardPass]) -> bool:
    return not counted or (len(passes) >= len(counted) and passes[len(counted) - 1] is counted[-1])
