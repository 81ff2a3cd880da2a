"""Where the user's loop is: its epochs and steps, when it saves, where it stops, and what each step
must have done."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Loader
from ddp_train.data.rng import StepSeed, hash_key
from ddp_train.distributed.process_group import total
from ddp_train.distributed.training_step import CURRENT, training_step
from ddp_train.distributed.world import World
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController
from ddp_train.sessions.session_checkpoints import Position, SessionCheckpoints
from ddp_train.sessions.settings import Settings, UsageError
from ddp_train.sessions.wrapped import Wrapped

log = logging.getLogger(__name__)


class StoppedError(BaseException):
    """The agreed stop: all processes leave after the same step, which is saved. No `except
    Exception` may keep it."""


class Steps:
    """The counters of one process, and what happens between two steps."""

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
        self.optimizers: set[int] = set()
        """Those that run.resume got, by id."""
        self.foreign: set[int] = set()
        """Optimizers of other models, by id."""
        self.loaders: list[Loader] = []
        """Whose processes end with the session."""
        self.micro_batch: MicroBatch | None = None
        """Of the current step."""
        self.in_epoch = False
        self.is_save_due = False
        self.is_whole = True
        """Whether the optimizer has stepped since the loss that came last: gradients that add up
        are not saved."""
        self.had_backward = False
        self.is_scoring = False
        """While a test loader gives batches."""
        self.scored_elsewhere = False
        """Whether the model was given other batches than those of loaders, without gradients, since
        the last sum."""
        self.steps_seeds = StepSeed(settings.seed, world.rank, device)
        self.has_warned = False
        self.is_over = False
        self._handle = register_optimizer_step_pre_hook(self._before_optimizer_step)

    def close(self) -> None:
        """End the session: nothing of the user's is held or watched any more."""
        self.is_over = True
        self._handle.remove()
        for loader in self.loaders:
            loader.close()
        self.micro_batch = CURRENT.step = None
        if self.model:
            self.model.release()

    # --- epochs -----------------------------------------------------------------------------------

    def epochs(self, count: int, save_every: int) -> Iterator[int]:
        if self.checkpoints is None:
            raise UsageError(
                "run.epochs: run.resume was not called: nothing would be saved, and nothing"
                " resumed",
                "run.resume(model=model, optimizer=optimizer) before it, with whatever has a"
                " state_dict",
            )
        self.checkpoints.check_batches(self.loader_facts, self.position)
        if self.checkpoints.resumed_from and self.position.epoch >= count and self.world.is_leader:
            print(f"all {count} epochs are done: nothing is left to train", file=sys.stderr)
        while self.position.epoch < count:
            self.in_epoch = True
            yield self.position.epoch
            self.in_epoch = False
            self.position.epoch = self.position.epoch + 1
            self.position.batch = 0
            done = self.position.epoch
            if done % save_every == 0 or done == count or self.is_save_due:
                self.save_now()
            if done < count and not self.stop.allows(self.position.step):
                self._stop()

    def open_epoch(self, what: str) -> int:
        """The number of the current epoch. Raises UsageError if none is."""
        if not self.in_epoch:
            raise UsageError(
                f"{what} was used outside of an epoch", "for epoch in run.epochs(10): ..."
            )
        return self.position.epoch

    def end(self) -> None:
        """At the end of the `with`: what a `break` has left unsaved."""
        if self.in_epoch and self.checkpoints and self.is_whole:
            if self.position.batch == self.loader_facts.get("steps_per_epoch"):
                self.position.epoch = self.position.epoch + 1
                self.position.batch = 0
            if self.position != self.checkpoints.saved:
                self.save_now()
        self.in_epoch = False

    def _stop(self) -> None:
        if self.checkpoints and self.checkpoints.saved != self.position:
            self.save_now()
        raise StoppedError

    def save_now(self) -> None:
        assert self.checkpoints, "epochs() has seen to it"
        self.is_save_due = False
        before = self.status.phase
        self.status.phase = "checkpoint"
        self.checkpoints.save(self.position, self.loader_facts)
        self.status.phase = before

    # --- steps ------------------------------------------------------------------------------------

    def begin_step(self, micro_batch: MicroBatch) -> None:
        """Before a batch is handed out: whatever the step draws depends on seed, rank and step
        alone."""
        self.micro_batch = micro_batch
        self.had_backward = False
        CURRENT.step = training_step(micro_batch.num_real > 0)
        self.steps_seeds(self.position.step)
        key = hash_key(self.steps_seeds.key, self.position.step)
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)

    def end_step(self, is_last: bool) -> None:
        """After the user's code is done with a batch. is_last: of its epoch, whose end is not
        reached yet: what follows the loop over batches belongs to it."""
        self.micro_batch = CURRENT.step = None
        self.position.batch += 1
        self.position.step += 1
        self.status.step = self.position.step
        if is_last or not self.is_whole:
            return
        if self.is_save_due:
            self.save_now()
        if self.position.step >= self.stop.limit and not self.stop.allows(self.position.step):
            self._stop()

    def mean(self, losses: Tensor, over: float | Tensor | None) -> Tensor:
        """See Run.mean."""
        step = self.micro_batch
        if step is None:
            raise UsageError(
                "run.mean was called outside of a step",
                "call it inside of: for batch in loader, of loader = run.loader(...)",
            )
        if over is not None:
            mine = torch.as_tensor(over, dtype=torch.float64, device=self.device).detach().sum() * (
                step.num_real > 0
            )
            everybody = total(mine.clone())
            factor = torch.where(everybody == 0, 0.0, self.world.size / everybody).to(losses.dtype)
            loss = losses.sum() * (factor if step.num_real else 0.0)
        elif losses.shape != (len(step.indices),):
            raise UsageError(
                f"run.mean: the losses have the shape {list(losses.shape)}, and the batch"
                f" {len(step.indices)} samples",
                "give it one loss for each sample, with reduction='none'; of several numbers per"
                " sample their mean, or say with over=NUMBER how many they are",
            )
        else:
            loss = losses.sum() * step.scale
        if loss.requires_grad:
            self.is_whole = False
            loss.register_hook(self._in_backward)
        return loss

    def see_forward(self, *_: object) -> None:
        """Of the wrapped model."""
        self.scored_elsewhere |= not (
            torch.is_grad_enabled() or self.is_scoring or self.micro_batch
        )

    def warn_of_sum(self) -> None:
        """Once: what each process computed of all samples must not be added up."""
        if self.scored_elsewhere and not self.has_warned and self.world.size > 1:
            self.has_warned = True
            log.warning(
                "run.sum: the model was given batches that are not from run.test_loader; if each"
                " process had all of them, the sum counts them %d times: score with"
                " run.test_loader(data, batch_size=256)",
                self.world.size,
            )
        self.scored_elsewhere = False

    def _in_backward(self, _: Tensor) -> None:
        self.had_backward = True
        self.status.phase = "backward"

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Of every optimizer in this process."""
        if self.micro_batch is None or id(optimizer) in self.foreign:
            return
        if id(optimizer) not in self.optimizers:
            if self.model:
                ours = {id(parameter) for parameter in self.model.parameters()}
            else:
                ours = set[int]()
            held = [
                id(parameter) for group in optimizer.param_groups for parameter in group["params"]
            ]
            if ours.isdisjoint(held):
                self.foreign.add(id(optimizer))
                return
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that run.resume did not get makes a"
                " step: its state would be lost",
                "run.resume(model=model, optimizer=optimizer)",
            )
        if not self.had_backward:
            raise UsageError(
                "optimizer.step() in a step whose loss did not come by run.mean: where processes"
                " have different numbers of samples it would be the mean over none of them",
                "loss = run.mean(losses), of one loss for each sample (reduction='none'), then"
                " loss.backward()",
            )
        self.is_whole = True
        self.status.phase = "optimizer step"
