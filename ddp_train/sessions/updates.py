"""The updates of the weights in a loop: what each must have done before, and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_train.distributed.process_group import same_everywhere, total
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.errors import ModelError
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.exchange_watch import CLOSURE, OWN_GRADIENTS, ExchangeWatch
from ddp_train.sessions.foreign_optimizers import ForeignOptimizers
from ddp_train.sessions.gradients import GradientWatch
from ddp_train.sessions.loop_state import LoopState
from ddp_train.sessions.models import Models
from ddp_train.sessions.parameter_groups import parameters_of
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.watches.unsaved import refuse_unsaved_scaler
from ddp_train.sessions.wrapped import Wrapped

SAME_UPDATES = (
    "each process has only its part of a loss, so let all processes decide by the same sum: if"
    " math.isfinite(run.sum(loss.item())): optimizer.step()"
)
WAY_OF_OWN_GRADIENTS = (
    "If you compute gradients yourself (for example clipped per sample, as in DP-SGD): take them"
    " with torch.autograd.grad, let total be their sum over this process's samples, and on every"
    " process set p.grad = run.sum(total) / run.sum(len(batch))"
)


class Updates:
    """Sees each step of any optimizer in this process, and refuses one that is not of all."""

    def __init__(
        self, loop: LoopState, models: Models, exchange_watch: ExchangeWatch, status: RankStatus
    ) -> None:
        self.loop = loop
        self.models = models
        self.exchange_watch = exchange_watch
        self.status = status
        self.gradients = GradientWatch()
        self.saved: Mapping[str, Any] = {}
        """The objects that run.resume got, but for the models."""
        self.optimizers: dict[Optimizer, list[Wrapped]] = {}
        """Those of them that are optimizers, and the models of each."""
        self.foreign_optimizers = ForeignOptimizers(models)
        self.looked_at: set[Optimizer] = set()
        """The optimizers whose scaler, if they have one, is saved."""
        self.own_steps = 0
        """Steps of optimizers with gradients that the loop itself has set."""
        self.next_comparison = 1
        """The one of these steps after which weights are compared."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """See no more steps."""
        for handle in self._handles:
            handle.remove()

    def watch(self, saved: Mapping[str, Any]) -> None:
        """Expect steps of the optimizers among the objects that run.resume got."""
        self.saved = saved
        for value in saved.values():
            if isinstance(value, Optimizer):
                self.optimizers[value] = self.models.trained_by(value)
        self.gradients.sees_steps = bool(self.optimizers)
        self.gradients.windows.see_objects(saved.values())

    @property
    def log_step(self) -> int:
        """The number of updates that are done, for what is logged now."""
        in_step = self.loop.open_step is not None
        is_done = in_step and self.gradients.are_used and self.gradients.had_some
        return self.loop.position.step + is_done

    def check_same_number(self) -> None:
        """Raise PeerError if the processes have updated the weights differently often."""
        what = "the number of steps of the optimizers"
        same_everywhere(self.gradients.updates, self.models.device, what, SAME_UPDATES)

    def see_end_of_step(self) -> None:
        """Called when the user's code is done with a step.

        Raises an error if it has updated weights by itself, with gradients that are not of all.
        """
        if not self.optimizers:
            self._check_gradients(self.models)

    def _before_step(
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
        if optimizer not in self.looked_at:
            self.looked_at.add(optimizer)
            refuse_unsaved_scaler(self.saved)
        _, *given = arguments  # the first one is the optimizer
        if given and callable(given[0]):  # others than torch's may take no closure, but a number
            self._see_closure(optimizer)
            closure, *others = given
            return (optimizer, partial(self._loss_of_all, closure, optimizer), *others), named
        if callable(named.get("closure")):
            self._see_closure(optimizer)
            closure = partial(self._loss_of_all, named["closure"], optimizer)
            return arguments, {**named, "closure": closure}
        if not self.gradients.had_backward:
            self._see_own_gradients(optimizer)
        self._check_gradients(self.optimizers[optimizer])
        self.gradients.see_step(optimizer)
        self.status.phase = "optimizer step"
        return None

    def _see_closure(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimizer that computes its loss by a closure."""
        self.gradients.see_step(optimizer)
        self.status.phase = "optimizer step"

    def _see_own_gradients(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimizer in a step of the loop without a loss of run.mean.

        Raises UsageError unless the loop itself has set the gradients.
        """
        gradients = [parameter.grad for parameter in parameters_of(optimizer)]
        models = self.optimizers[optimizer]
        went_backward = any(model.gradient_exchange.foreign_pass is not None for model in models)
        if went_backward or all(gradient is None for gradient in gradients):
            raise UsageError(
                "optimizer.step() was called in a step whose loss was not computed by run.mean:"
                " its gradient would not be the mean over the global batch",
                "use loss = run.mean(losses), with one loss for each sample (reduction='none'),"
                f" then loss.backward(). {WAY_OF_OWN_GRADIENTS}",
            )
        self.gradients.had_own = True

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Called after each step of any optimizer in this process.

        Compares the weights of all processes after own steps 1, 2, 4, 8 ...: an optimizer may
        change gradients within its step.

        Raises UsageError if they differ.
        """
        if not self.gradients.had_own or optimizer not in self.optimizers:
            return
        self.own_steps += 1
        if self.own_steps != self.next_comparison:
            return
        self.next_comparison *= 2
        self.exchange_watch.enter(OWN_GRADIENTS, self.loop.position.step)
        try:
            for model in self.optimizers[optimizer]:
                check_same_weights(model.module)
        except ModelError as error:
            raise UsageError(
                "the loop itself set the gradients (p.grad = ...), and after optimizer.step()"
                f" {error}",
                f"{WAY_OF_OWN_GRADIENTS}. For noise use ddp_train.noise_like(p, rows='shared'),"
                " which is the same on all processes",
            ) from error

    def _check_gradients(self, models: Iterable[Wrapped]) -> None:
        """Raise an error if an update of models would use gradients that are not those of all."""
        for model in models:
            model.gradient_exchange.check_gradients(type(model.module).__name__)

    @torch.no_grad()
    def _loss_of_all(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """The mean over the processes of the loss that a closure returns. A collective."""
        with torch.enable_grad():
            loss = closure()
        if not self.gradients.had_backward:
            raise UsageError(
                "optimizer.step(closure): the closure's loss was not computed by run.mean",
                "in the closure call optimizer.zero_grad(), loss = run.mean(losses) with one loss"
                " for each sample (reduction='none'), loss.backward(), and return loss",
            )
        self._check_gradients(self.optimizers[optimizer])
        if not isinstance(loss, Tensor):
            return loss
        self.exchange_watch.enter(CLOSURE)
        return total(loss.detach().clone()) / self.models.processes
