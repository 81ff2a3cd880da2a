"""Saves a session where its loop may go on: in checkpoints, and in memory outside its processes."""

from __future__ import annotations

from typing import Any

from ddp_train.models.living_objects import living_objects
from ddp_train.models.unsaved_copies import UnsavedCopies
from ddp_train.recovery.state_keeper import StateKeeper
from ddp_train.resilience.kept_memory import KeptMemory, state_mark
from ddp_train.sessions.exchange_watch import CHECKPOINT, KEEPING, ExchangeWatch
from ddp_train.sessions.gradients import GradientWatch
from ddp_train.sessions.loop_state import LoopState
from ddp_train.sessions.models import Models
from ddp_train.sessions.numbers import SessionNumbers
from ddp_train.sessions.session_checkpoints import SessionCheckpoints
from ddp_train.sessions.session_keeper import SessionKeeper
from ddp_train.sessions.session_loaders import SessionLoaders
from ddp_train.sessions.watches.optimizer_wrappers import OptimizerWrappers
from ddp_train.sessions.watches.unsaved import warn_of_unsaved_schedulers

LOOK_AGAIN = 4
"""All objects are looked through at checkpoint 1, 4, 16 ...: for copies that are made late."""


class Saving:
    """Saves the state of one process; the state is that of the loop when it is called."""

    def __init__(
        self,
        checkpoints: SessionCheckpoints,
        loop: LoopState,
        loaders: SessionLoaders,
        gradients: GradientWatch,
        numbers: SessionNumbers,
        exchange_watch: ExchangeWatch,
    ) -> None:
        self.checkpoints = checkpoints
        self.loop = loop
        self.loaders = loaders
        self.gradients = gradients
        self.numbers = numbers
        self.exchange_watch = exchange_watch
        self.keeper: SessionKeeper | None = None
        """None if a failure costs the steps since the last checkpoint."""
        self.copies = UnsavedCopies([], [])
        self.wrappers = OptimizerWrappers(checkpoints.objects, checkpoints.module)
        self.saves = 0
        """Checkpoints of this process."""
        self.next_look = 1
        """The checkpoint at which all objects are looked through again."""
        self.is_due = False
        """The user wants a checkpoint where the next one can be saved."""

    @property
    def is_saved(self) -> bool:
        """The newest checkpoint has the loop where it is."""
        return self.checkpoints.saved == self.loop.position

    @property
    def saved_epoch(self) -> int:
        """The epoch at which the newest checkpoint resumes; 0 without one."""
        saved = self.checkpoints.saved
        return saved.epoch if saved else 0

    def save(self) -> None:
        """Save a checkpoint. A collective: every process must call it."""
        self.is_due = False
        self.exchange_watch.enter(CHECKPOINT)
        self._warn_of_unsaved()
        status = self.checkpoints.status
        phase = status.phase
        status.phase = "checkpoint"
        loading = self.loaders.state()
        self.numbers.catch_up(self.loop.position.step, self.loop.epochs_begun)
        numbers = self.numbers.state()
        self.checkpoints.save(self.loop.position, loading, self.gradients, numbers)
        status.phase = phase

    def _warn_of_unsaved(self) -> None:
        """Name what no checkpoint holds of the objects that training needs."""
        self.saves += 1
        if self.saves == self.next_look:
            self.next_look *= LOOK_AGAIN
            living = living_objects()
            if self.saves == 1:
                warn_of_unsaved_schedulers(self.checkpoints.objects, living)
            self.copies.look_for(living)
            self.wrappers.look_for(living)
            self.wrappers.warn_of_ids()
        self.wrappers.warn_of_changed()
        self.copies.warn_of_changed()

    # --- outside the processes --------------------------------------------------------------------

    def keep_in(self, memory: KeptMemory, models: Models) -> None:
        """Keep the state after each step in memory that outlives this process."""
        world = self.checkpoints.world
        device = self.checkpoints.device
        rank = world.local_rank
        keeper = StateKeeper(memory, rank, world.local_size, device, copies_beside=False)
        self.keeper = SessionKeeper(keeper, self.checkpoints, models, device, world.is_leader)
        self.keeper.begin()

    def keep(self, *, is_epoch_over: bool) -> None:
        """Keep the state where a checkpoint could be saved: after a step, or after an epoch."""
        mark = state_mark(self.loop.position.step, is_later=is_epoch_over)
        if self.keeper and self.keeper.comes_to_keep(mark):
            numbers = self.numbers.not_in_lines
            self.keeper.keep(mark, self._state_beside, numbers, self.gradients)

    def _state_beside(self) -> dict[str, Any]:
        """The state that is neither of models nor of objects. A collective."""
        loading = self.loaders.state()
        return self.checkpoints.session_state(self.loop.position, loading, self.gradients)

    def take_back_step(self) -> None:
        """Go back to the state before, if the one after this step was kept last."""
        if self.keeper:
            self.keeper.take_back(state_mark(self.loop.position.step, is_later=False))

    def agree_on_keeping(self) -> None:
        """Count a step for the keeper, and agree how often it keeps one where that is due."""
        if self.keeper is None:
            return
        self.keeper.pace.count_step()
        if self.keeper.pace.is_due:
            self.exchange_watch.enter(KEEPING)
            self.keeper.agree()
