"""The epochs and steps of the user's loop: when it saves, and what each step must have done."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Loader
from ddp_train.data.rng import StepSeed, hash_key
from ddp_train.distributed.empty_batch import step_without_samples
from ddp_train.distributed.process_group import total
from ddp_train.distributed.training_step import CURRENT, training_step
from ddp_train.distributed.world import World
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController
from ddp_train.sessions.gradients import GradientWatch
from ddp_train.sessions.numbers import SessionNumbers
from ddp_train.sessions.session_checkpoints import Position, SessionCheckpoints
from ddp_train.sessions.settings import Settings, UsageError
from ddp_train.sessions.values import meet
from ddp_train.sessions.wrapped import Wrapped

log = logging.getLogger(__name__)


class StoppedError(BaseException):
    """The agreed stop: all processes leave after the same step, which is saved.

    No `except Exception` may keep it.
    """


class Steps:
    """The position of one process in the user's loop, and what happens between two steps."""

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
        self.position = Position()
        self.model: Wrapped | None = None
        self.checkpoints: SessionCheckpoints | None = None
        self.loader_facts: dict[str, Any] = {}
        """Those of the whole session; `samples` when it began."""
        self.epoch_facts: dict[str, int] = {}
        """Samples and batches of the current epoch, once its loader is used."""
        self.optimizers: set[int] = set()
        """The `id` of each optimizer that run.resume got."""
        self.foreign_optimizers: set[int] = set()
        """The `id` of each optimizer of another model."""
        self.loaders: list[Loader] = []
        """Their processes end with the session."""
        self.micro_batch: MicroBatch | None = None
        """The share of the current step; None between two steps."""
        self.empty_step = contextlib.ExitStack()
        """The context of a step whose batch is empty here."""
        self.has_samples = True
        """False in a step whose batch is empty here, and after it if that was left by an error."""
        self.in_epoch = False
        self.first_batch = 0
        """Batches of the current epoch that were done before it began here: it was resumed."""
        self.is_save_due = False
        self.gradients = GradientWatch()
        self.had_backward = False
        """The mean loss of this step has gone backward."""
        self.score_watch = ScoreWatch()
        self.numbers = SessionNumbers(settings.run_dir, world, device, settings.log_every_steps)
        self.seed_step = StepSeed(settings.seed, world.rank, device)
        self.is_over = False
        self._handle = register_optimizer_step_pre_hook(self._before_optimizer_step)

    def close(self) -> None:
        """End the session: nothing of the user's is held or watched any more."""
        self.is_over = True
        self._handle.remove()
        for loader in self.loaders:
            loader.close()
        self._leave_micro_batch()
        if self.model:
            self.model.release()

    # --- epochs -----------------------------------------------------------------------------------

    def epochs(self, count: int, save_every: int) -> Iterator[int]:
        """See Run.epochs."""
        if self.checkpoints is None:
            raise UsageError(
                "run.epochs: run.resume was not called: nothing would be saved, and nothing"
                " resumed",
                "run.resume(model=model, optimizer=optimizer) before it, with whatever has a"
                " state_dict",
            )
        position = self.position
        self.checkpoints.check_batches(self.loader_facts, position)
        if self.checkpoints.resumed_from and position.epoch >= count and self.world.is_leader:
            print(f"all {count} epochs are done: nothing is left to train", file=sys.stderr)
        while position.epoch < count:
            self.in_epoch = True
            self.first_batch = position.batch
            yield position.epoch
            self.in_epoch = False
            self.first_batch = 0
            self.has_samples = True
            meet("the end of an epoch", self.device)
            self.numbers.flush(position.step, position.epoch + 1)
            position.end_epoch()
            is_last = position.epoch == count
            if position.epoch % save_every == 0 or is_last or self.is_save_due:
                self.save_now()
            if not is_last:
                self._stop_if_agreed()

    def open_epoch(self, method: str) -> int:
        """The number of the current epoch. Raises UsageError if `method` is used outside of one."""
        if not self.in_epoch:
            raise UsageError(
                f"{method} was used outside of an epoch", "for epoch in run.epochs(10): ..."
            )
        return self.position.epoch

    def end(self) -> None:
        """Save what a `break` has left unsaved, at the end of the `with`."""
        meet("the end of the session", self.device)
        self.numbers.flush(self.position.step, self.position.epoch + self.in_epoch)
        if self.in_epoch and self.checkpoints:
            if self.position.batch == self.epoch_facts.get("steps_of_epoch"):
                self.position.end_epoch()
            if self.position != self.checkpoints.saved:
                self.save_now()
        self.in_epoch = False

    def _stop_if_agreed(self) -> None:
        if self.stop.allows(self.position.step):
            return
        if self.checkpoints and self.checkpoints.saved != self.position:
            self.save_now()
        raise StoppedError

    def save_now(self) -> None:
        assert self.checkpoints, "epochs() has seen to it"
        self.is_save_due = False
        phase = self.status.phase
        self.status.phase = "checkpoint"
        batches = self.loader_facts | self.epoch_facts
        self.numbers.catch_up(self.position.step, self.position.epoch + self.in_epoch)
        numbers = self.numbers.state()
        self.checkpoints.save(self.position, batches, self.gradients, numbers)
        self.status.phase = phase

    def begin_batches(self, samples: int, steps_of_epoch: int) -> None:
        """Begin what is left of the batches of the current epoch.

        Raises DataError if a checkpoint lies inside of the epoch, and the data set had another
        length then.
        """
        self.epoch_facts = {"samples_of_epoch": samples, "steps_of_epoch": steps_of_epoch}
        if self.checkpoints:
            self.checkpoints.check_batches(self.epoch_facts, self.position)

    # --- steps ------------------------------------------------------------------------------------

    def begin_step(self, micro_batch: MicroBatch) -> None:
        """Begin a step, before its batch is handed out.

        Its draws depend on seed, rank and step alone.
        """
        self.micro_batch = micro_batch
        self.has_samples = micro_batch.num_real > 0
        self.had_backward = False
        CURRENT.step = training_step(self.has_samples)
        if not self.has_samples:
            self.empty_step = step_without_samples()
        self.seed_step(self.position.step)
        key = hash_key(self.seed_step.key, self.position.step)
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)

    def end_step(self, is_last: bool) -> None:
        """End a step, after the user's code is done with its batch.

        is_last: the batch is the last one of its epoch, whose end is not reached yet: what follows
            the loop over batches belongs to it.
        """
        self._count_step()
        self.has_samples = True
        if not is_last and self.position.step % self.numbers.every_steps == 0:
            self.numbers.line(self.position.step, self.position.epoch + 1)
        # A loop that counts its batches itself begins anew where it resumes: at a step's begin it
        # is right about when the next one is due.
        if is_last or not self.gradients.are_used:
            return
        if self.is_save_due:
            self.save_now()
        if self.position.step >= self.stop.limit:
            self._stop_if_agreed()

    def leave_step(self) -> None:
        """End the last step of a loop that was left by `break`: it counts if it went backward."""
        if self.had_backward:
            self._count_step()
        self._leave_micro_batch()

    def _leave_micro_batch(self) -> None:
        self.micro_batch = None
        CURRENT.step = None
        self.empty_step.close()

    def _count_step(self) -> None:
        samples = self.micro_batch.num_real if self.micro_batch else 0
        self.numbers.end_step(self.position.step, samples)
        self._leave_micro_batch()
        self.position.batch += 1
        self.position.step += 1
        self.status.step = self.position.step

    def log(self, name: str, values: Any, over: Any, how: str) -> None:
        """See Run.log."""
        in_step = self.micro_batch is not None and not self.score_watch.is_scoring
        is_updated = in_step and self.gradients.are_used and self.had_backward
        step = self.position.step + is_updated
        self.numbers.log(step, name, values, over, how, in_step)

    def mean(self, losses: Tensor, over: float | Tensor | None) -> Tensor:
        """See Run.mean."""
        share = self.micro_batch
        if share is None:
            raise UsageError(
                "run.mean was called outside of a step",
                "call it inside of: for batch in loader, of loader = run.loader(...)",
            )
        if over is not None:
            loss = losses.sum() * self._part_of_units(over, share).to(losses.dtype)
        elif losses.shape == (share.num_real,):
            loss = losses.sum() * share.scale
        else:
            raise UsageError(
                f"run.mean: the losses have the shape {list(losses.shape)}, and the batch"
                f" {share.num_real} samples",
                "give it one loss for each sample, with reduction='none'; of several numbers per"
                " sample their mean, or say with over=NUMBER how many they are",
            )
        if loss.requires_grad:
            self.gradients.see_loss()
            loss.register_hook(self._in_backward)
        return loss

    def _part_of_units(self, over: float | Tensor, share: MicroBatch) -> Tensor:
        """The factor on the sum of losses here whose mean over the processes is the mean loss."""
        counts = share.num_real > 0  # also where `over` does not follow from the batch
        units = torch.as_tensor(over, dtype=torch.float64, device=self.device).detach().sum()
        all_units = total(units * counts)
        factor = self.world.size * counts / all_units
        return torch.where(all_units == 0, 0.0, factor)

    def see_forward(self, *_: object) -> None:
        """Called before each forward pass of the wrapped model."""
        if not torch.is_grad_enabled() and not self.micro_batch:
            self.score_watch.see_score()

    def _in_backward(self, _: Tensor) -> None:
        self.had_backward = True
        self.gradients.see_backward()
        self.status.phase = "backward"

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before each step of any optimizer in this process.

        Returns the arguments of the step, if it is given a closure: that gives the loss over all
        processes, so that all decide alike what to do by it.
        """
        if not self.in_epoch or id(optimizer) in self.foreign_optimizers:
            return None
        if id(optimizer) not in self.optimizers:
            if self.model is None or not self.model.is_trained_by(optimizer):
                self.foreign_optimizers.add(id(optimizer))
                return None
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that run.resume did not get makes a"
                " step: its state would be lost",
                "run.resume(model=model, optimizer=optimizer)",
            )
        _, *given = arguments  # the first one is the optimizer
        closure = given[0] if given else named.get("closure")
        if closure is not None:
            self.gradients.see_step(optimizer)
            self.status.phase = "optimizer step"
            return (optimizer,), {"closure": partial(self._loss_of_all, closure)}
        if not self.had_backward:
            raise UsageError(
                "optimizer.step() in a step whose loss did not come by run.mean: where processes"
                " have different numbers of samples it would be the mean over none of them",
                "loss = run.mean(losses), of one loss for each sample (reduction='none'), then"
                " loss.backward()",
            )
        self.gradients.see_step(optimizer)
        self.status.phase = "optimizer step"
        return None

    @torch.no_grad()
    def _loss_of_all(self, closure: Callable[[], Any]) -> Any:
        """The mean over the processes of the loss that a closure returns. A collective."""
        with torch.enable_grad():
            loss = closure()
        if not self.had_backward:
            raise UsageError(
                "optimizer.step(closure): the closure's loss did not come by run.mean",
                "in it: optimizer.zero_grad(), loss = run.mean(losses), of one loss for each"
                " sample (reduction='none'), loss.backward(), return loss",
            )
        if not isinstance(loss, Tensor):
            return loss
        return total(loss.detach().clone()) / self.world.size


class ScoreWatch:
    """Warns once if what each process computed of all samples is added up."""

    def __init__(self) -> None:
        self.is_scoring = False
        """A test loader gives batches."""
        self.scored_elsewhere = False
        """The model has scored other batches since the last sum."""
        self.has_warned = False

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Inside, batches come from a test loader."""
        self.is_scoring = True
        try:
            yield
        finally:
            self.is_scoring = False

    def see_score(self) -> None:
        if not self.is_scoring:
            self.scored_elsewhere = True

    def see_sum(self, processes: int) -> None:
        if self.scored_elsewhere and not self.has_warned and processes > 1:
            self.has_warned = True
            log.warning(
                "run.sum: the model was given batches that are not from run.test_loader; if each"
                " process had all of them, the sum counts them %d times: score with"
                " run.test_loader(data, batch_size=256)",
                processes,
            )
        self.scored_elsewhere = False
