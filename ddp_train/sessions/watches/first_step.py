"""The first step of a session, in which more is looked at than time allows in each."""

from __future__ import annotations

import hashlib
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_train.data.rng import StepSeed
from ddp_train.distributed.training_step import CURRENT
from ddp_train.distributed.world import World
from ddp_train.engine.noise_hook import DRAWS_BY_RANK, other_generators
from ddp_train.parallel.sync_batch_norm import TOGETHER
from ddp_train.sessions.models import Models
from ddp_train.sessions.watches.beside_mean import BESIDE, BesideMean
from ddp_train.sessions.watches.local_gradients import LocalGradients
from ddp_train.sessions.watches.mixed_rows import MIXED, mixes_rows
from ddp_train.sessions.watches.other_means import other_mean
from ddp_train.sessions.watches.padded_images import PaddedImages
from ddp_train.sessions.watches.parts_of_batch import PartsOfBatch
from ddp_train.tensor_tree import tensors

SAME_ROWS = (
    "run.wrap: in the first step the model got the same rows on all processes, and they are not"
    " from run.loader. Batch norm over all processes counts each row %d times, so running_var is"
    " too small. For such rows use run.wrap(model, sync_batch_norm=False)"
)
MOST_NUMBERS = 2**16
"""Numbers of a batch that are compared."""
log = logging.getLogger(__name__)


class FirstStep:
    """Warns of results that depend on the number of processes. Rank 0 warns of most."""

    def __init__(self, models: Models, seed_step: StepSeed, world: World) -> None:
        self.models = models
        self.is_leader = world.is_leader
        self.draws: DrawsOfStep | None = None
        """None where there is one process."""
        if world.is_leader and world.size > 1:
            self.draws = DrawsOfStep(seed_step)
        self.rows = ""
        """A digest of the first rows of a model with batch norm over all processes; "" if this
        process had none, or all alike."""
        self.beside_mean: BesideMean | None = None
        """None where there is one process."""
        if world.is_leader and world.size > 1:
            self.beside_mean = BesideMean()
        self.padded_images: PaddedImages | None = None
        """None where there is one process."""
        if world.size > 1:
            self.padded_images = PaddedImages()
        self.gathers = 0
        """Calls of `all_gather` before the step."""
        self.local_gradients: LocalGradients | None = None
        if world.is_leader:
            self.local_gradients = LocalGradients()
        self.parts = PartsOfBatch()

    def begin(self, step: int) -> None:
        """To be called when the generators were seeded for the step."""
        self.gathers = CURRENT.gathers
        if self.draws:
            self.draws.begin(step)
        if self.padded_images:
            self.padded_images.begin(self.models)

    def close(self) -> None:
        """Look at nothing any more, where no step was done."""
        if self.draws:
            self.draws.passes.end()

    def see_means(self, losses: Tensor) -> None:
        """Warn where torch's own mean of losses, one for each sample, is not that over samples."""
        warning = other_mean(losses)
        if warning:
            log.warning(warning)

    def see_units(self, losses: Tensor, over: float | Tensor, samples: int) -> None:
        """Called with the losses and units of each mean over units.

        samples: of this process, in the batch.
        """
        if self.is_leader:
            self.parts.see_mean(losses, over, samples)

    def see_losses(self, losses: Tensor, samples: int) -> None:
        """Warn once if the losses compare samples of this process alone.

        samples: of this process, in the batch.
        """
        if not self.is_leader:
            return
        for model in self.models:
            if mixes_rows(losses, model.gradient_exchange.outputs, samples):
                log.warning(MIXED)
                self._forget_outputs()
                return

    def see_loss(self, loss: Tensor, samples: int) -> None:
        """Called with each mean loss. samples: of this process, in the batch."""
        if self.beside_mean:
            outputs = [model.gradient_exchange.outputs for model in self.models]
            self.beside_mean.see_loss(loss, outputs, samples)

    def see_inputs(self, model: nn.Module, inputs: Any) -> None:
        """Called after a forward pass in train mode."""
        if self.rows or not any(isinstance(layer, TOGETHER) for layer in model.modules()):
            return
        for rows in tensors(inputs):
            if rows.is_floating_point() and rows.ndim and not bool((rows == rows[:1]).all()):
                numbers = rows.detach().reshape(-1)[:MOST_NUMBERS].double().cpu().numpy()
                self.rows = hashlib.sha256(numbers.tobytes()).hexdigest()
                return

    def see_sum(self, value: Any) -> None:
        """Called when a value is added up, or gathered, over all processes."""
        if self.local_gradients:
            self.local_gradients.see_sum(value)

    def see_backward(self, gradient: Tensor) -> None:
        """Called when a mean loss goes backward. gradient: of the loss."""
        if self.is_leader:
            self.parts.see_backward(gradient)
        # With create_graph=True nobody knows yet what becomes of the gradients.
        local = self.local_gradients
        if local and not torch.is_grad_enabled() and self.models.are_in_autograd_grad():
            local.see_grad()

    def end(self) -> bool:
        """Say what was found. Returns whether random numbers depend on the process."""
        draws_by_rank = self.draws is not None and self.draws.are_by_rank()
        if draws_by_rank:
            print(DRAWS_BY_RANK, file=sys.stderr)
        if self.local_gradients:
            self.local_gradients.warn()
        parts = self.parts.warning()
        if parts:
            log.warning(parts)
        if self.beside_mean and self.beside_mean.ends_with_some(self.gathers):
            log.warning(BESIDE)
        if self.padded_images:
            self.padded_images.end()
        self._forget_outputs()
        return draws_by_rank

    def _forget_outputs(self) -> None:
        for model in self.models:
            model.gradient_exchange.end_first_step()


class DrawsOfStep:
    """Tells whether a step draws random numbers that depend on the process."""

    def __init__(self, seed_step: StepSeed) -> None:
        self.seed_step = seed_step
        self.passes = PlainPasses()

    def begin(self, step: int) -> None:
        """Note the generators' states. To be called when they were seeded for this step."""
        self.step = step
        self.others = other_generators()
        self.marks = CURRENT.marks
        self.passes.begin()

    def are_by_rank(self) -> bool:
        """True if one of the generators has moved, by more than what keyed noise asks of it, and
        what torch's loaders draw for processes that they do not have."""
        self.passes.end()
        unused = CURRENT.marks - self.marks + self.passes.count
        by_torch = self.seed_step.has_moved(self.step, unused)
        return by_torch or other_generators() != self.others


class PlainPasses:
    """Counts passes over torch's loaders without processes, between `begin` and `end`.

    Each pass draws a seed as `draw_mark` draws a number, though nobody uses it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.iterate: Any = None
        """The method of torch's loaders between `begin` and `end`; None outside."""

    def begin(self) -> None:
        """Count from 0. A step that was left may have begun already."""
        self.count = 0
        if self.iterate is not None:
            return
        iterate = DataLoader.__iter__

        def iterate_and_count(loader: DataLoader[Any]) -> Any:
            if loader.num_workers == 0 and loader.generator is None:
                self.count += 1
            return iterate(loader)

        self.iterate = iterate
        DataLoader.__iter__ = iterate_and_count  # type: ignore[method-assign]

    def end(self) -> None:
        """Give torch's loaders their own method back."""
        if self.iterate is not None:
            DataLoader.__iter__ = self.iterate  # type: ignore[method-assign]
            self.iterate = None
