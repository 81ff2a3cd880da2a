"""What is looked at while a loop runs, for results that depend on the number of processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.world import World
from ddp_train.sessions.exchange_watch import SUM
from ddp_train.sessions.loop_state import LoopState
from ddp_train.sessions.models import Models
from ddp_train.sessions.session_loaders import SessionLoaders
from ddp_train.sessions.watches.data_epochs import DataEpochs
from ddp_train.sessions.watches.first_epoch import FirstEpoch
from ddp_train.sessions.watches.first_step import FirstStep
from ddp_train.sessions.watches.loop_generators import LoopGenerators
from ddp_train.sessions.watches.loop_passes import LoopPasses
from ddp_train.sessions.watches.printed_counts import PrintedCounts
from ddp_train.sessions.watches.score_watch import ScoreWatch


class Watches:
    """Tells each watch what it looks at: scores in all steps, more in the first of them."""

    def __init__(
        self,
        loop: LoopState,
        loaders: SessionLoaders,
        models: Models,
        seed_step: StepSeed,
        world: World,
    ) -> None:
        self.loop = loop
        self.loaders = loaders
        self.world = world
        self.scores = ScoreWatch()
        self.data_epochs = DataEpochs()
        self.printed_counts = PrintedCounts()
        self.first_step: FirstStep | None = FirstStep(models, seed_step, world)
        """None when this process has done a step."""
        self.first_epoch: FirstEpoch | None = None
        """None before the loop over epochs begins."""
        self.generators: LoopGenerators | None = None
        """On rank 0 alone."""
        self.passes: LoopPasses | None = None
        """On rank 0 alone, and where steps are resumed."""
        self.whole_epochs = False

    def close(self) -> None:
        """Leave torch's loaders and the user's data sets as they were."""
        self.data_epochs.close()
        if self.first_step:
            self.first_step.close()

    def begin_epochs(self, saved: Collection[Any] | None, whole: bool) -> None:
        """Called where the loop over epochs begins. saved, whole: see `FirstEpoch`."""
        self.first_epoch = FirstEpoch(self.world, saved, whole)
        self.whole_epochs = whole
        if self.world.is_leader and saved is not None:
            beside = [one for one in saved if not isinstance(one, nn.Module | Optimizer)]
            self.generators = LoopGenerators(beside)
            self.passes = None if whole else LoopPasses()
        self.scores.scored_elsewhere = False  # a pass that sets the model up is no score

    def begin_epoch(self, is_last: bool) -> None:
        """Called before an epoch begins. is_last: none follows it."""
        if self.first_epoch and (self.first_epoch.epochs or not is_last):
            self.first_epoch.look_over_epochs()
        if self.generators:
            self.generators.begin_epoch()

    def begin_pass(self) -> None:
        """Called where a loader begins a pass over its data."""
        # What an epoch makes before is made again where all are resumed at their beginnings.
        if self.generators and not self.whole_epochs:
            self.generators.note()

    def begin_step(self) -> None:
        """Called when the generators were seeded for a step."""
        self.scores.begin_step()
        if self.first_step:
            self.first_step.begin(self.loop.position.step)
        if self.passes:
            self.passes.begin_step(self.loop.position.step)
        if self.first_epoch:
            self.first_epoch.begin_step([loader.facts for loader in self.loaders.current])

    def see_batch(self, share: MicroBatch, batch: Any) -> None:
        """Called with each batch before the user's loop has it."""
        if self.first_epoch:
            self.first_epoch.see_batch(share, batch)

    def see_forward(self, *_: object) -> None:
        """Called before each forward pass of a wrapped model."""
        if not self.loop.open_step:
            self.scores.see_score()

    def see_pass(
        self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], outputs: Any
    ) -> None:
        """Called after each forward pass of a wrapped model, on several processes."""
        if torch.compiler.is_compiling():
            return
        self.scores.see_pass((inputs, named), outputs)
        if self.first_step and self.loop.open_step and model.training:
            self.first_step.see_inputs(model, (inputs, named))

    def see_losses(self, losses: Tensor, samples: int, are_of_samples: bool) -> None:
        """Called with the losses of each mean.

        samples: of this process, in the batch.
        are_of_samples: there is one for each sample.
        """
        if not self.first_step:
            return
        if are_of_samples:
            self.first_step.see_means(losses)
        self.first_step.see_losses(losses, samples)

    def see_units(self, losses: Tensor, over: float | Tensor, samples: int) -> None:
        """Called with the losses and units of each mean over units, without `accumulate`.

        samples: of this process, in the batch.
        """
        if self.first_step:
            self.first_step.see_units(losses, over, samples)

    def see_loss(self, loss: Tensor, samples: int) -> None:
        """Called with each mean loss, before it gets hooks: what is watched is not looked at.

        samples: of this process, in the batch.
        """
        if self.first_step:
            self.first_step.see_loss(loss, samples)

    def see_backward(self, gradient: Tensor) -> None:
        """Called when a mean loss goes backward. gradient: of the loss."""
        if self.first_step:
            self.first_step.see_backward(gradient)

    def see_sum(self, call: str, value: Any) -> None:
        """Called when a value is added up, or gathered, over all processes. call: SUM or GATHER."""
        if call == SUM:
            self.scores.see_sum(self.world.size, value)
        if self.first_step:
            self.first_step.see_sum(value)
        if self.first_epoch:
            self.first_epoch.see_sum(call, value)

    def end_step(self, samples: int) -> bool:
        """Called when a step is done. Returns whether its random numbers depend on the process.

        samples: of this process in the step.
        """
        if self.first_epoch:
            self.first_epoch.end_step(samples)
        if not self.first_step:
            return False
        draws_by_rank = self.first_step.end()
        if self.first_epoch:
            self.first_epoch.rows = self.first_step.rows
            self.first_epoch.padded_images = self.first_step.padded_images
        self.first_step = None
        return draws_by_rank

    def end_epoch(self, device: str) -> None:
        """Compare what each process has of its own samples alone. A collective."""
        if self.first_epoch:
            self.first_epoch.compare(device)
        if self.generators:
            self.generators.end_epoch([loader.parts for loader in self.loaders.current])
