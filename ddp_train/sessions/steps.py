"""The epochs and steps of the user's loop: when it saves, and what each step must have done."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed, hash_key
from ddp_train.distributed.empty_batch import step_without_samples
from ddp_train.distributed.process_group import same_everywhere, total
from ddp_train.distributed.training_step import CURRENT, TrainingStep
from ddp_train.distributed.world import World
from ddp_train.models.living_objects import living_objects
from ddp_train.models.unsaved_copies import UnsavedCopies
from ddp_train.recovery.state_keeper import StateKeeper
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.kept_memory import KeptMemory, state_mark
from ddp_train.resilience.preemption import StopController
from ddp_train.sessions.exchange_watch import (
    BACKWARD,
    CHECKPOINT,
    CLOSURE,
    END_OF_EPOCH,
    END_OF_SESSION,
    KEEPING,
    LINE,
    UNITS,
    ExchangeWatch,
)
from ddp_train.sessions.first_epoch import FirstEpoch
from ddp_train.sessions.first_step import FirstStep
from ddp_train.sessions.foreign_optimizers import ForeignOptimizers
from ddp_train.sessions.gradients import GradientWatch
from ddp_train.sessions.learning_rates import check_same_rates
from ddp_train.sessions.loop_state import LoopState, OpenEpoch
from ddp_train.sessions.models import Models
from ddp_train.sessions.numbers import SessionNumbers, log_call
from ddp_train.sessions.open_step import (
    OpenStep,
    Place,
    StatefulLoader,
    StepRows,
    check_one_for_each_sample,
)
from ddp_train.sessions.score_watch import ScoreWatch
from ddp_train.sessions.session_checkpoints import SessionCheckpoints
from ddp_train.sessions.session_keeper import SessionKeeper
from ddp_train.sessions.session_loaders import SessionLoaders
from ddp_train.sessions.settings import Settings, UsageError
from ddp_train.sessions.unsaved import refuse_unsaved_scaler, warn_of_unsaved_schedulers
from ddp_train.sessions.update_record import UpdateRecord
from ddp_train.sessions.values import meet
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.text import counted

SAME_UPDATES = (
    "each process has its own part of a loss: decide for all of them by a sum,"
    " if math.isfinite(run.sum(loss.item())): optimizer.step()"
)
LOOK_AGAIN = 4
"""All objects are looked through at checkpoint 1, 4, 16 ...: for copies that are made late."""


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
        self.checkpoints: SessionCheckpoints | None = None
        self.kept_memory: KeptMemory | None = None
        """In which the state may be kept; None if a failure costs the steps since the last
        checkpoint."""
        self.keeper: SessionKeeper | None = None
        self.optimizers: dict[Optimizer, list[Wrapped]] = {}
        """The optimizers that run.resume got, and the models of each."""
        self.foreign_optimizers = ForeignOptimizers(self.models)
        self.looked_at: set[Optimizer] = set()
        """The optimizers whose scaler, if they have one, is saved."""
        self.copies = UnsavedCopies([], [])
        self.saves = 0
        """Checkpoints of this process."""
        self.next_look = 1
        """The checkpoint at which all objects are looked through again."""
        self.closings: list[Callable[[], object]] = []
        """Functions that end the processes of each loader, if that still has some."""
        self.has_samples = True
        """False in a step whose batch is empty here, and after it if that was left by an error."""
        self.is_save_due = False
        self.whole_epochs = False
        """Nothing is saved inside of an epoch."""
        self.gradients = GradientWatch()
        self.had_backward = False
        """The mean loss of this step has gone backward."""
        self.exchange_watch = ExchangeWatch(status, world.rank)
        CURRENT.see_exchange = self.exchange_watch.enter
        self.score_watch = ScoreWatch()
        self.numbers = SessionNumbers(settings.run_dir, world, device, settings.log_every_steps)
        self.media = self.numbers.media
        self.seed_step = StepSeed(settings.seed, settings.first_draws + world.rank, device)
        self.first_step: FirstStep | None = FirstStep(self.models, self.seed_step, world)
        """None when this process has done a step."""
        self.first_epoch: FirstEpoch | None = None
        """None before the loop over epochs begins."""
        self.update_record: UpdateRecord | None = None
        """The record of a run of `ddp-train prove train.py`; None in any other."""
        if settings.is_proof:
            self.update_record = UpdateRecord(settings.run_dir)
        self.is_over = False
        self._handle = register_optimizer_step_pre_hook(self._before_optimizer_step)

    def close(self) -> None:
        """End the session: nothing of the user's is held or watched any more."""
        self.is_over = True
        CURRENT.see_exchange = None
        self._handle.remove()
        self.keeper = None
        if self.update_record:
            self.update_record.close()
        for close in self.closings:
            close()
        self._close_step()
        self.models.release()

    # --- epochs -----------------------------------------------------------------------------------

    def epochs(self, count: int, save_every: int, whole: bool) -> Iterator[int]:
        """See Run.epochs."""
        self.whole_epochs = whole
        if self.checkpoints is None:
            raise UsageError(
                "run.epochs: run.resume was not called: nothing would be saved, and nothing"
                " resumed",
                "run.resume(model=model, optimizer=optimizer) before it, with whatever has a"
                " state_dict",
            )
        position = self.loop.position
        saved = None
        if not self.settings.is_proof:
            saved = [*self.checkpoints.objects.values(), *self.models]
        self.first_epoch = FirstEpoch(self.world, saved, whole)
        self.loaders.go_on(self.checkpoints)
        if self.checkpoints.resumed_from and position.epoch >= count and self.world.is_leader:
            print(f"all {count} epochs are done: nothing is left to train", file=sys.stderr)
        self.numbers.open()
        self.copies.note()
        self.score_watch.scored_elsewhere = False  # a pass that sets the model up is no score
        while position.epoch < count:
            if position.epoch + 1 < count or self.first_epoch.epochs:
                self.first_epoch.look_over_epochs()
            self._begin_epoch()
            yield position.epoch
            self._end_open_step()
            self.loop.open_epoch = None
            self.has_samples = True
            self.exchange_watch.enter(END_OF_EPOCH)
            meet(END_OF_EPOCH, self.device)
            self._check_updates()
            self.first_epoch.compare(self.device)
            self.numbers.flush(position.step, position.epoch + 1)
            check_same_rates(self.checkpoints.objects, self.device)
            position.end_epoch()
            self._keep(state_mark(position.step, is_later=True))
            is_last = position.epoch == count
            if position.epoch % save_every == 0 or is_last or self.is_save_due:
                self.save_now()
            if not is_last:
                self._stop_if_agreed()

    def modules_together(self) -> nn.Module:
        """All models as one, with the copies of them that run.resume got."""
        modules = nn.ModuleList(model.module for model in self.models)
        if self.checkpoints:
            modules.append(self.checkpoints.copies_here())
        return modules

    def _begin_epoch(self) -> None:
        self._seed_alike("epoch", self.loop.position.epoch)
        self.loop.open_epoch = OpenEpoch(self.loop.position.batch)
        self.loaders.begin_epoch()

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

    def _check_updates(self) -> None:
        """Raise PeerError if the processes have updated the weights differently often."""
        what = "the number of steps of the optimizers"
        same_everywhere(self.gradients.updates, self.device, what, SAME_UPDATES)

    @property
    def saved_epoch(self) -> int:
        """The epoch at which the newest checkpoint resumes; 0 without one."""
        saved = self.checkpoints.saved if self.checkpoints else None
        return saved.epoch if saved else 0

    def end_loop(self) -> None:
        """Called where a loop over batches has none left: what follows it belongs to its last step.

        That was kept if nobody knew that it is the last one, as of a stream. From there the loop
        would be without a batch, which few are written for.
        """
        self._seed_alike("end of loop", self.loop.position.step)
        if self.keeper:
            self.keeper.take_back(state_mark(self.loop.position.step, is_later=False))

    def end(self) -> None:
        """Save what a `break` has left unsaved, at the end of the `with`.

        Inside of a whole epoch it is told instead: a loop that resumed there would lack what it
        holds from the epoch's beginning on.
        """
        self.exchange_watch.enter(END_OF_SESSION)
        meet(END_OF_SESSION, self.device)
        self._end_open_step()
        if self.first_epoch:
            self.first_epoch.compare(self.device)
        self.numbers.flush(self.loop.position.step, self.loop.epochs_begun)
        if self.loop.open_epoch and self.checkpoints:
            for loader in self.loaders.current:
                loader.place.reopen(self.loop.position.step)
            if self.loop.open_epoch.is_complete:
                self.loop.position.end_epoch()
            if self.whole_epochs and self.loop.position.batch:
                self._tell_of_left_epoch()
            elif self.loop.position != self.checkpoints.saved:
                self.save_now()
        self.loop.open_epoch = None

    def _tell_of_left_epoch(self) -> None:
        """Say that a `break` has left a whole epoch, inside of which nothing is saved."""
        if not self.world.is_leader:
            return
        position = self.loop.position
        print(
            f"note: run.epochs(..., whole=True) was left inside of epoch {position.epoch} after"
            f" {counted(position.batch, 'step')} of it, which are in no checkpoint: the same"
            f" command resumes at the beginning of epoch {self.saved_epoch}; leave the loop over"
            " epochs behind its last batch, or use run.epochs without whole=True",
            file=sys.stderr,
        )

    def _stop_if_agreed(self) -> None:
        if self.stop.allows(self.loop.position.step):
            return
        may_save = not self.whole_epochs or not self.loop.position.batch
        if may_save and self.checkpoints and self.checkpoints.saved != self.loop.position:
            self.save_now()
        raise StoppedError

    def save_now(self) -> None:
        assert self.checkpoints, "epochs() has seen to it"
        self.is_save_due = False
        self.exchange_watch.enter(CHECKPOINT)
        self._warn_of_unsaved(self.checkpoints.objects)
        phase = self.status.phase
        self.status.phase = "checkpoint"
        loading = self.loaders.state()
        self.numbers.catch_up(self.loop.position.step, self.loop.epochs_begun)
        numbers = self.numbers.state()
        self.checkpoints.save(self.loop.position, loading, self.gradients, numbers)
        self.status.phase = phase

    def _state_beside(self) -> dict[str, Any]:
        assert self.checkpoints, "epochs() has seen to it"
        return self.checkpoints.session_state(
            self.loop.position, self.loaders.state(), self.gradients
        )

    def keep_in(self, memory: KeptMemory) -> None:
        """Keep the state after each step in memory that outlives this process."""
        assert self.checkpoints, "resume() has made them"
        world = self.world
        rank = world.local_rank
        keeper = StateKeeper(memory, rank, world.local_size, self.device, copies_beside=False)
        self.keeper = SessionKeeper(
            keeper, self.checkpoints, self.models, self.device, world.is_leader
        )
        self.keeper.begin()

    def _keep(self, mark: int) -> None:
        """Keep the state where a checkpoint could be saved. mark: see `state_mark`."""
        if self.keeper and self.keeper.comes_to_keep(mark):
            self.keeper.keep(mark, self._state_beside, self.numbers.not_in_lines, self.gradients)

    def _agree_on_keeping(self) -> None:
        """Count a step for the keeper, and agree how often it keeps one where that is due."""
        if self.keeper is None:
            return
        self.keeper.pace.count_step()
        if self.keeper.pace.is_due:
            self.exchange_watch.enter(KEEPING)
            self.keeper.agree()

    def _warn_of_unsaved(self, objects: Mapping[str, Any]) -> None:
        """Name what no checkpoint holds of the objects that training needs."""
        self.saves += 1
        if self.saves == self.next_look:
            self.next_look *= LOOK_AGAIN
            living = living_objects()
            if self.saves == 1:
                warn_of_unsaved_schedulers(objects, living)
            self.copies.look_for(living)
        self.copies.warn_of_changed()

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
        self.score_watch.end()
        self.loop.open_step = OpenStep()
        self.has_samples = True
        self.loop.see_batches_left(True)
        self.had_backward = False
        position = self.loop.position
        rows = StepRows(
            self.settings.seed, position.epoch, position.step, share.indices, share.num_real
        )
        CURRENT.begin(TrainingStep(share.num_real > 0, share=rows))
        self.seed_step(self.loop.position.step)
        key = hash_key(self.seed_step.key, self.loop.position.step)
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
        if self.first_step:
            self.first_step.begin(self.loop.position.step)
        if self.first_epoch:
            self.first_epoch.begin_step([loader.facts for loader in self.loaders.current])
        return self.loop.open_step

    def see_batch(self, share: MicroBatch, batch: Any) -> None:
        """Called with each batch before the user's loop has it."""
        if self.first_epoch:
            self.first_epoch.see_batch(share, batch)

    def end_step(self, step: OpenStep, is_last: bool) -> None:
        """End a step, after the user's code is done with its batch.

        is_last: the batch is the last one of its epoch, whose end is not reached yet: what follows
            the loop over batches belongs to it.
        """
        if self.loop.open_step is not step:
            return  # it ended with its epoch
        if not self.optimizers:
            self._check_gradients(self.models)  # the loop has updated the weights by itself
        self._count(step)
        self.has_samples = True
        if self.update_record and self.update_record.is_complete(self.loop.position.step):
            raise StoppedError
        if not is_last and self.loop.position.step % self.numbers.every_steps == 0:
            self.exchange_watch.enter(LINE)
            self.numbers.line(self.loop.position.step, self.loop.position.epoch + 1)
        self._agree_on_keeping()
        # A loop that counts its batches itself begins anew where it resumes: at a step's begin it
        # is right about when the next one is due.
        could_be_saved = self.gradients.are_used and not is_last and not self.whole_epochs
        if could_be_saved and self.had_backward:  # else the others may be steps behind
            self._keep(state_mark(self.loop.position.step, is_later=False))
        self.status.step = self.loop.position.step  # what is not kept yet is not done
        if could_be_saved and self.is_save_due:
            self.save_now()
        may_stop = could_be_saved or (self.whole_epochs and not is_last)
        if may_stop and self.loop.position.step >= self.stop.limit:
            self._stop_if_agreed()

    def leave_step(self, step: OpenStep) -> None:
        """End the last step of a loop that was left by `break`: it counts if it went backward."""
        if self.loop.open_step is not step:
            return
        if self.had_backward:
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
        if self.first_epoch:
            self.first_epoch.end_step(step.samples)
        if self.first_step:
            draws_by_rank = self.first_step.end()
            if self.first_epoch:
                self.first_epoch.rows = self.first_step.rows
            self.first_step = None
            if draws_by_rank and self.update_record:
                self.update_record.draws_by_process = True
        self.loop.position.batch += 1
        self.loop.position.step += 1
        for place in step.places:
            place.batch += 1
            place.step = self.loop.position.step
        self._close_step()

    def log(self, name: str, values: Any, over: Any, how: str) -> None:
        """See Run.log."""
        in_step = self.loop.open_step is not None and not self.score_watch.is_scoring
        self.numbers.log(self.log_step, log_call(name, values, over, how, in_step))

    @property
    def log_step(self) -> int:
        """The number of updates that are done, for what is logged now."""
        in_step = self.loop.open_step is not None
        return self.loop.position.step + (in_step and self.gradients.are_used and self.had_backward)

    def mean(
        self,
        losses: Tensor,
        over: float | Tensor | None,
        of: StatefulLoader | None,
        accumulate: Optimizer | None,
    ) -> Tensor:
        """See Run.mean."""
        if self.loop.open_step is None:
            raise UsageError(
                "run.mean was called outside of a step",
                "call it inside of: for batch in loader, of loader = run.loader(...); without a"
                " data set, as in reinforcement learning, of numbers:"
                " run.loader(range(1000), global_batch_size=8)",
            )
        share = self.loop.open_step.share_of(of)
        self.score_watch.check_ended()
        if not share.num_real and not losses.requires_grad and torch.is_grad_enabled():
            losses = losses.detach().requires_grad_()  # of a loop over samples: of none
        if over is None:
            check_one_for_each_sample(losses, share)
        if self.first_step and over is None:
            self.first_step.see_means(losses)
        if self.first_step:
            self.first_step.see_losses(losses, share.num_real)
        if accumulate is not None:
            return self._mean_of_window(losses, over, share, accumulate)
        if over is None:
            loss = losses.sum() * share.scale
        else:
            units = self._units_of_all(over, share)
            loss = losses.sum() * self._part_of_mean(units, share).to(losses.dtype)
        if loss.requires_grad:
            self._look_at_outputs(loss, share)
            self.gradients.see_loss()
            loss.register_hook(self._in_backward)
        return loss

    def _look_at_outputs(self, loss: Tensor, share: MicroBatch) -> None:
        """To be called before other hooks of a mean loss: what is watched is not looked at."""
        if self.first_step:
            self.first_step.see_loss(loss, share.num_real)

    def _mean_of_window(
        self, losses: Tensor, over: float | Tensor | None, share: MicroBatch, optimizer: Optimizer
    ) -> Tensor:
        """The loss of a batch whose gradients are to add up to those of a mean over a window."""
        if optimizer not in self.optimizers:
            raise UsageError(
                f"run.mean: accumulate is a {type(optimizer).__name__} that run.resume did not get",
                "run.resume(model=model, optimizer=optimizer) and"
                " run.mean(losses, accumulate=optimizer)",
            )
        units = self._units_of_all(share.num_real if over is None else over, share)
        window = self.gradients.windows.of(optimizer)
        after = window.begin(units)
        before = window.units
        loss = losses.sum() * self._part_of_mean(after, share).to(losses.dtype)
        if loss.requires_grad:
            self._look_at_outputs(loss, share)
            self.gradients.see_loss()
            loss.register_hook(lambda _: window.see_backward(before, after))
            loss.register_hook(self._in_backward)
        return loss

    def _units_of_all(self, over: float | Tensor, share: MicroBatch) -> Tensor:
        """The number of units of all processes, a scalar, float64. A collective."""
        counts = share.num_real > 0  # also where `over` does not follow from the batch
        units = torch.as_tensor(over, dtype=torch.float64, device=self.device).detach().sum()
        self.exchange_watch.enter(UNITS, self.loop.position.step)
        return total(units * counts)

    def _part_of_mean(self, units: Tensor, share: MicroBatch) -> Tensor:
        """The factor on the sum of losses here whose mean over the processes is the mean loss."""
        factor = self.world.size * (share.num_real > 0) / units
        return torch.where(units == 0, 0.0, factor)

    def see_forward(self, *_: object) -> None:
        """Called before each forward pass of the wrapped model."""
        if not self.loop.open_step:
            self.score_watch.see_score()

    def see_pass(
        self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], outputs: Any
    ) -> None:
        """Called after each forward pass of the wrapped model, on several processes."""
        if torch.compiler.is_compiling():
            return
        self.score_watch.see_pass((inputs, named), outputs)
        if self.first_step and self.loop.open_step and model.training:
            self.first_step.see_inputs(model, (inputs, named))

    def see_sum(self, call: str, value: Any) -> None:
        """Called when a value is added up, or gathered, over all processes. call: SUM or GATHER."""
        self.exchange_watch.enter(call)
        if self.first_step:
            self.first_step.see_sum(value)
        if self.first_epoch:
            self.first_epoch.see_sum(call, value)

    def _in_backward(self, _: Tensor) -> None:
        if self.first_step:
            self.first_step.see_backward()
        self.had_backward = True
        if self.models.see_backward():
            self.exchange_watch.enter(BACKWARD, self.loop.position.step)
        self.gradients.see_backward()
        self.status.phase = "backward"

    def watch_optimizers(self, objects: Iterable[object]) -> None:
        """Expect steps of the optimizers among the objects that run.resume got."""
        for value in objects:
            if isinstance(value, Optimizer):
                self.optimizers[value] = self.models.trained_by(value)
        self.gradients.sees_steps = bool(self.optimizers)
        if self.update_record and self.checkpoints:
            self.update_record.begin(self.checkpoints.module, self.optimizers)

    def _before_optimizer_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before each step of any optimizer in this process.

        Returns the arguments of the step, if it is given a closure: that gives the loss over all
        processes, so that all decide alike what to do by it.
        """
        if not self.loop.open_epoch:
            return None
        if optimizer not in self.optimizers:
            in_step = self.loop.open_step is not None
            self.foreign_optimizers.see_step(optimizer, self.loop.position.step, in_step)
            return None
        if optimizer not in self.looked_at and self.checkpoints:
            self.looked_at.add(optimizer)
            refuse_unsaved_scaler(self.checkpoints.objects)
        _, *given = arguments  # the first one is the optimizer
        closure = given[0] if given else named.get("closure")
        if closure is not None:
            self.gradients.see_step(optimizer)
            self.status.phase = "optimizer step"
            return (optimizer,), {"closure": partial(self._loss_of_all, closure, optimizer)}
        if not self.had_backward:
            raise UsageError(
                "optimizer.step() in a step whose loss did not come by run.mean: its gradient would"
                " not be the mean over the global batch",
                "loss = run.mean(losses), of one loss for each sample (reduction='none'), then"
                " loss.backward()",
            )
        self._check_gradients(self.optimizers[optimizer])
        self.gradients.see_step(optimizer)
        self.status.phase = "optimizer step"
        return None

    def _check_gradients(self, models: Iterable[Wrapped]) -> None:
        """Raise an error if an update of models would use gradients that are not those of all."""
        for model in models:
            model.gradient_exchange.check_gradients(type(model.module).__name__)

    @torch.no_grad()
    def _loss_of_all(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """The mean over the processes of the loss that a closure returns. A collective."""
        with torch.enable_grad():
            loss = closure()
        if not self.had_backward:
            raise UsageError(
                "optimizer.step(closure): the closure's loss did not come by run.mean",
                "in it: optimizer.zero_grad(), loss = run.mean(losses), of one loss for each"
                " sample (reduction='none'), loss.backward(), return loss",
            )
        self._check_gradients(self.optimizers[optimizer])
        if not isinstance(loss, Tensor):
            return loss
        self.exchange_watch.enter(CLOSURE)
        return total(loss.detach().clone()) / self.world.size
