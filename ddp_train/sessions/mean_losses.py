"""Means of losses over global batches, whose gradients are those of one process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import total
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.exchange_watch import BACKWARD, UNITS, ExchangeWatch
from ddp_train.sessions.loop_state import LoopState
from ddp_train.sessions.models import Models
from ddp_train.sessions.open_step import StatefulLoader, check_one_for_each_sample
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.updates import Updates
from ddp_train.sessions.watches.watches import Watches

GRAPH_OF_GRADIENTS = (
    "backward(create_graph=True) was called on a loss of run.mean. The exchange of gradients"
    " between processes has no graph, so p.grad cannot have one",
    "take the gradients by g = torch.autograd.grad(loss, parameters, create_graph=True), with"
    " parameters = list(model.parameters()), then call loss.backward(retain_graph=True). Average"
    " what you compute from g, as h = torch.autograd.grad(g, parameters, v), over processes:"
    " run.sum(h[0]) / run.processes. Let v be the same on all processes:"
    " ddp_train.noise_like(p, rows='shared')",
)


class MeanLosses:
    """Makes the mean losses of one process, and sees them go backward."""

    def __init__(
        self,
        loop: LoopState,
        models: Models,
        updates: Updates,
        watches: Watches,
        exchange_watch: ExchangeWatch,
        status: RankStatus,
    ) -> None:
        self.loop = loop
        self.models = models
        self.updates = updates
        self.watches = watches
        self.exchange_watch = exchange_watch
        self.status = status

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
                "call it inside of `for batch in loader`, with loader = run.loader(data,"
                " global_batch_size=64). Without a data set, as in reinforcement learning, use"
                " loader = run.loader(range(1000), global_batch_size=8)",
            )
        share = self.loop.open_step.share_of(of)
        self.watches.scores.check_ended()
        if not share.num_real and not losses.requires_grad and torch.is_grad_enabled():
            losses = losses.detach().requires_grad_()  # of a loop over samples: of none
        if over is None:
            check_one_for_each_sample(losses, share)
        self.watches.see_losses(losses, share.num_real, are_of_samples=over is None)
        if accumulate is not None:
            return self._mean_of_window(losses, over, share, accumulate)
        if over is None:
            loss = losses.sum() * share.scale
        else:
            self.watches.see_units(losses, over, share.num_real)
            units = self._units_of_all(over, share)
            loss = losses.sum() * self._part_of_mean(units, share).to(losses.dtype)
        if loss.requires_grad:
            self.watches.see_loss(loss, share.num_real)
            self.updates.gradients.see_loss()
            loss.register_hook(self._in_backward)
        return loss

    def _mean_of_window(
        self, losses: Tensor, over: float | Tensor | None, share: MicroBatch, optimizer: Optimizer
    ) -> Tensor:
        """The loss of a batch whose gradients are to add up to those of a mean over a window."""
        if optimizer not in self.updates.optimizers:
            raise UsageError(
                f"run.mean: accumulate= is an optimizer ({type(optimizer).__name__}) that"
                " run.resume did not get",
                "use run.resume(model=model, optimizer=optimizer) and run.mean(losses,"
                " accumulate=optimizer)",
            )
        units = self._units_of_all(share.num_real if over is None else over, share)
        window = self.updates.gradients.windows.of(optimizer)
        after = window.begin(units)
        before = window.units
        loss = losses.sum() * self._part_of_mean(after, share).to(losses.dtype)
        if loss.requires_grad:
            self.watches.see_loss(loss, share.num_real)
            self.updates.gradients.see_loss()
            loss.register_hook(lambda _: window.see_backward(before, after))
            loss.register_hook(self._in_backward)
        return loss

    def _units_of_all(self, over: float | Tensor, share: MicroBatch) -> Tensor:
        """The number of units of all processes, a scalar, float64. A collective."""
        counts = share.num_real > 0  # also where `over` does not follow from the batch
        device = self.models.device
        units = torch.as_tensor(over, dtype=torch.float64, device=device).detach().sum()
        self.exchange_watch.enter(UNITS, self.loop.position.step)
        return total(units * counts)

    def _part_of_mean(self, units: Tensor, share: MicroBatch) -> Tensor:
        """The factor on the sum of losses here whose mean over the processes is the mean loss."""
        factor = self.models.processes * (share.num_real > 0) / units
        return torch.where(units == 0, 0.0, factor)

    def _in_backward(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled() and self.models.are_reached():
            raise UsageError(*GRAPH_OF_GRADIENTS)
        self.watches.see_backward(gradient)
        if self.models.see_backward():
            self.exchange_watch.enter(BACKWARD, self.loop.position.step)
        self.updates.gradients.see_backward()
        self.status.phase = "backward"
