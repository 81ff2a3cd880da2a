"""The epochs and steps of the user's loop: when it saves, and what each step must have done."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed, hash_key
from ddp_train.distributed.empty_batch import step_without_samples
from ddp_train.distributed.training_step import CURRENT, TrainingStep
from ddp_train.distributed.world import World
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.kept_memory import KeptMemory
from ddp_train.resilience.preemption import StopController
from ddp_train.sessions.exchange_watch import (
    END_OF_EPOCH,
    END_OF_SESSION,
    LINE,
    ExchangeWatch,
)
from ddp_train.sessions.learning_rates import check_same_rates
from ddp_train.sessions.loop_state import LoopState, OpenEpoch
from ddp_train.sessions.mean_losses import MeanLosses
from ddp_train.sessions.models import Models
from ddp_train.sessions.numbers import SessionNumbers, log_call
from ddp_train.sessions.open_step import (
    OpenStep,
    Place,
    StatefulLoader,
    StepRows,
)
from ddp_train.sessions.saving import Saving
from ddp_train.sessions.session_loaders import SessionLoaders
from ddp_train.sessions.settings import Settings, UsageError
from ddp_train.sessions.update_record import UpdateRecord
from ddp_train.sessions.updates import Updates
from ddp_train.sessions.values import meet
from ddp_train.sessions.watches.epoch_beginning import EpochBeginning
from ddp_train.sessions.watches.watches import Watches
from ddp_train.text import counted

TRAINS_ON = (
    "note: a `break` had left the loop over run.epochs at the end of an epoch, but this start of"
    " the run trains on, in epoch %d. So does each further start. If the run was complete (early"
    " stopping), move the `break` to the top of that loop, before the first batch, with a condition"
    " that a resumed run meets: the epoch's number, or a value in an object that run.resume gets"
)


class StoppedError(BaseException):
    """The agreed stop: all processes leave after the same step, which is saved.

    No `except Exception` may keep it.
    """


class Steps:
    """The steps of one process in the user's loop, and what happens between two of them."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        device: str,
        status: RankStatus,
        stop: StopController,
    ) -> None:
        self.settings = settings
        self.world = world
        self.device = device
        self.status = status
        self.stop = stop
        self.loop = LoopState()
        self.loaders = SessionLoaders(self.loop)
        self.models = Models(device, world.size)
        self.saving: Saving | None = None
        """None before run.resume."""
        self.kept_memory: KeptMemory | None = None
        """In which the state may be kept; None if a failure costs the steps since the last
        checkpoint."""
        self.closings: list[Callable[[], object]] = []
        """Functions that end the processes of each loader, if that still has some."""
        self.has_samples = True
        """False in a step whose batch is empty here, and after it if that was left by an error."""
        self.whole_epochs = False
        """Nothing is saved inside of an epoch."""
        self.epoch_beginning: EpochBeginning | None = None
        """None where nothing is resumed inside of an epoch, and on all ranks but 0."""
        self.exchange_watch = ExchangeWatch(status, world.rank)
        CURRENT.see_exchange = self.exchange_watch.enter
        self.numbers = SessionNumbers(settings.run_dir, world, device, settings.log_every_steps)
        self.media = self.numbers.media
        self.seed_step = StepSeed(settings.seed, settings.first_draws + world.rank, device)
        self.watches = Watches(self.loop, self.loaders, self.models, self.seed_step, world)
        self.update_record: UpdateRecord | None = None
        """The record of a run of `ddp-train prove train.py`; None in any other."""
        if settings.is_proof:
            self.update_record = UpdateRecord(settings.run_dir)
        self.updates = Updates(self.loop, self.models, self.exchange_watch, status)
        self.mean_losses = MeanLosses(
            self.loop, self.models, self.updates, self.watches, self.exchange_watch, status
        )
        self.is_over = False

    def close(self) -> None:
        """End the session: nothing of the user's is held or watched any more."""
        self.is_over = True
        CURRENT.see_exchange = None
        self.updates.close()
        if self.saving:
            self.saving.keeper = None
        if self.update_record:
            self.update_record.close()
        for close in self.closings:
            close()
        self.watches.close()
        self._close_step()
        self.models.release()

    # --- epochs -----------------------------------------------------------------------------------

    def epochs(self, count: int, save_every: int, whole: bool) -> Iterator[int]:
        """See Run.epochs."""
        self.whole_epochs = whole
        saving = self.saving
        if saving is None:
            raise UsageError(
                "run.epochs was called before run.resume, so nothing would be saved or resumed",
                "call run.resume(model=model, optimizer=optimizer) before the loop, with"
                " everything that has a state_dict",
            )
        self.loop.begin_loop(count)
        try:
            yield from self._loop_of_epochs(saving, count, save_every)
        finally:
            self.loop.is_in_loop = False
            if not self.is_over:
                # What follows a loop draws the same where a resumed run finds it done.
                self._seed_alike("end of epochs", self.loop.loops)

    def _loop_of_epochs(self, saving: Saving, count: int, save_every: int) -> Iterator[int]:
        position = self.loop.position
        whole = self.whole_epochs
        saved = None
        if not self.settings.is_proof:
            saved = [*saving.checkpoints.objects.values(), *self.models]
        self.watches.begin_epochs(saved, whole)
        if saved is not None and not whole and self.world.is_leader:
            checkpoints = saving.checkpoints
            self.epoch_beginning = EpochBeginning(checkpoints.modules, checkpoints.objects)
        self.loaders.go_on(saving.checkpoints)
        if saving.checkpoints.resumed_from and position.epoch >= count and self.world.is_leader:
            print(f"run.epochs({count}): all {counted(count, 'epoch')} are done", file=sys.stderr)
        self.numbers.open()
        saving.copies.note()
        while position.epoch < count:
            self.watches.begin_epoch(is_last=position.epoch + 1 == count)
            self._begin_epoch()
            yield position.epoch
            self._end_open_step()
            self.loop.open_epoch = None
            self.has_samples = True
            self.exchange_watch.enter(END_OF_EPOCH)
            meet(END_OF_EPOCH, self.device)
            self.updates.check_same_number()
            self.watches.end_epoch(self.device)
            saving.checkpoints.checkpoint_watch.end_epoch()
            self.numbers.flush(position.step, position.epoch + 1)
            check_same_rates(saving.checkpoints.objects, self.device)
            position.end_epoch()
            saving.keep(is_epoch_over=True)
            is_last = position.epoch == count
            if position.epoch % save_every == 0 or is_last or saving.is_due:
                saving.save()
            if not is_last:
                self._stop_if_agreed()
        self.loaders.end_loop()

    def modules_together(self) -> nn.Module:
        """All models as one module, with the copies of models that run.resume got."""
        modules = nn.ModuleList(model.module for model in self.models)
        if self.saving:
            modules.append(self.saving.checkpoints.copies_here())
        return modules

    def _begin_epoch(self) -> None:
        self._seed_alike("epoch", self.loop.position.epoch)
        self.loop.open_epoch = OpenEpoch(self.loop.position.batch)
        self.loaders.begin_epoch()
        if self.epoch_beginning:
            self.epoch_beginning.begin(self.loop.position.batch > 0)

    def begin_pass(self) -> None:
        """Called where a loader begins a pass over its data, before it takes any.

        Raises UsageError in another loop over epochs than that of the checkpoint.
        """
        self.loop.check_loop()
        if self.loop.take_left_count() and self.world.is_leader:
            print(TRAINS_ON % self.loop.position.epoch, file=sys.stderr)
        self.watches.begin_pass()
        if self.saving:
            self.saving.checkpoints.checkpoint_watch.begin_epoch()
        if self.epoch_beginning and self.loop.open_epoch:
            is_resumed = self.loop.open_epoch.first_batch > 0
            self.epoch_beginning.see_first_batch(self.loop.position.epoch, is_resumed)

    def _seed_alike(self, part: str, number: int) -> None:
        """Seed the global generators alike on all processes, for what is drawn between steps.

        It depends on neither their number nor on where a run was resumed.

        part: of the loop.
        number: of that part.
        """
        key = hash_key(self.settings.seed, part, number)
        torch.manual_seed(key)
        np.random.seed(hash_key(key, "numpy") & 0xFFFFFFFF)
        random.seed(key)

    def end_loop(self) -> None:
        """Called where a loop over batches has none left: what follows it belongs to its last step.

        That was kept if nobody knew that it is the last one, as of a stream. From there the loop
        would be without a batch, which few are written for.
        """
        self._seed_alike("end of loop", self.loop.position.step)
        if self.saving:
            self.saving.take_back_step()

    def end(self) -> None:
        """Save what a `break` has left unsaved, at the end of the `with`.

        Inside of a whole epoch it is told instead: a loop that resumed there would lack what it
        holds from the epoch's beginning on.
        """
        self.exchange_watch.enter(END_OF_SESSION)
        meet(END_OF_SESSION, self.device)
        self._end_open_step()
        self.watches.end_epoch(self.device)
        self.numbers.flush(self.loop.position.step, self.loop.epochs_begun)
        if self.loop.open_epoch and self.saving:
            self.saving.checkpoints.checkpoint_watch.end_epoch()
            for loader in self.loaders.current:
                loader.place.reopen(self.loop.position.step)
            if self.loop.open_epoch.is_complete:
                self.loop.position.end_epoch()
                self.loop.position.left_count = self.loop.largest_count
            if self.whole_epochs and self.loop.position.batch:
                self._tell_of_left_epoch(self.saving.saved_epoch)
            elif not self.saving.is_saved:
                self.saving.save()
        self.loop.open_epoch = None

    def _tell_of_left_epoch(self, saved_epoch: int) -> None:
        """Say that a `break` has left a whole epoch, inside of which nothing is saved.

        saved_epoch: at which the newest checkpoint resumes.
        """
        if not self.world.is_leader:
            return
        position = self.loop.position
        print(
            "note: the loop over run.epochs(..., whole=True) ended inside of epoch"
            f" {position.epoch}, after {counted(position.batch, 'step')} of it. No checkpoint has"
            f" those: the same command resumes at the beginning of epoch {saved_epoch}. Leave the"
            " loop over epochs after the last batch of an epoch, or use run.epochs without"
            " whole=True",
            file=sys.stderr,
        )

    def _stop_if_agreed(self) -> None:
        if self.stop.allows(self.loop.position.step):
            return
        may_save = not self.whole_epochs or not self.loop.position.batch
        if may_save and self.saving and not self.saving.is_saved:
            self.saving.save()
        raise StoppedError

    # --- steps ------------------------------------------------------------------------------------

    def hand_out(self, loader: StatefulLoader, place: Place, share: MicroBatch) -> OpenStep | None:
        """Take note of a batch before it is handed out.

        loader, place: the loader that gives it, and where it is.
        share: this process's share of it.

        Returns the step that begins with it; None inside of a step.
        """
        step = self.loop.open_step
        begins = step is None
        if step is None:
            step = self._begin_step(share)
        elif share.num_real:
            CURRENT.step = TrainingStep(True)
        if not share.num_real and self.has_samples:
            self.has_samples = False
            step.without_samples = step_without_samples()
        step.add(loader, place, share)
        assert CURRENT.step, "it has begun"
        CURRENT.step.all_count = step.all_have_samples
        return step if begins else None

    def _begin_step(self, share: MicroBatch) -> OpenStep:
        """Begin a step. Its draws depend on seed, rank and step alone."""
        self.watches.scores.end()
        self.loop.open_step = OpenStep()
        self.has_samples = True
        self.loop.see_batches_left(True)
        self.updates.gradients.begin_step()
        position = self.loop.position
        rows = StepRows(
            self.settings.seed, position.epoch, position.step, share.indices, share.num_real
        )
        CURRENT.begin(TrainingStep(share.num_real > 0, share=rows))
        self.seed_step(self.loop.position.step)
        key = hash_key(self.seed_step.key, self.loop.position.step)
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
        self.watches.begin_step()
        return self.loop.open_step

    def end_step(self, step: OpenStep, is_last: bool) -> None:
        """End a step, after the user's code is done with its batch.

        is_last: the batch is the last one of its epoch, whose end is not reached yet: what follows
            the loop over batches belongs to it.
        """
        if self.loop.open_step is not step:
            return  # it ended with its epoch
        self.updates.see_end_of_step()
        self._count(step)
        self.has_samples = True
        if self.update_record and self.update_record.is_complete(self.loop.position.step):
            raise StoppedError
        if not is_last and self.loop.position.step % self.numbers.every_steps == 0:
            self.exchange_watch.enter(LINE)
            self.numbers.line(self.loop.position.step, self.loop.position.epoch + 1)
        saving = self.saving
        assert saving, "epochs() has seen to it"
        saving.agree_on_keeping()
        # A loop that counts its batches itself begins anew where it resumes: at a step's begin it
        # is right about when the next one is due.
        could_be_saved = self.updates.gradients.are_used and not is_last and not self.whole_epochs
        # Without gradients of all processes the others may be steps behind.
        if could_be_saved and self.updates.gradients.had_some:
            saving.keep(is_epoch_over=False)
        self.status.step = self.loop.position.step  # what is not kept yet is not done
        if could_be_saved and saving.is_due:
            saving.save()
        may_stop = could_be_saved or (self.whole_epochs and not is_last)
        if may_stop and self.loop.position.step >= self.stop.limit:
            self._stop_if_agreed()

    def leave_step(self, step: OpenStep) -> None:
        """End the last step of a loop that was left by `break`: it counts if it had gradients."""
        if self.loop.open_step is not step:
            return
        if self.updates.gradients.had_some:
            self._count(step)
            self.status.step = self.loop.position.step
        self._close_step()

    def _end_open_step(self) -> None:
        """End the step of an iterator that goes on in the next epoch."""
        if self.loop.open_step is not None:
            self._count(self.loop.open_step)
            self.status.step = self.loop.position.step

    def _close_step(self) -> None:
        if self.loop.open_step is not None:
            self.loop.open_step.without_samples.close()
        self.loop.open_step = None
        CURRENT.end()

    def _count(self, step: OpenStep) -> None:
        """Count a step as done, and close it."""
        self.numbers.end_step(self.loop.position.step, step.samples)
        draws_by_rank = self.watches.end_step(step.samples)
        if self.update_record:
            self.update_record.draws_by_process |= draws_by_rank
            self.update_record.end_step(self.loop.position.step + 1)
        self.loop.position.batch += 1
        self.loop.position.step += 1
        for place in step.places:
            place.batch += 1
            place.step = self.loop.position.step
        self._close_step()

    def log(self, name: str, values: Any, over: Any, how: str) -> None:
        """See Run.log."""
        in_step = self.loop.open_step is not None and not self.watches.scores.is_scoring
        self.numbers.log(self.updates.log_step, log_call(name, values, over, how, in_step))
