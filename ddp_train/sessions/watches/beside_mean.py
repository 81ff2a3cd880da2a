"""Parts of a loss that a loop computes from a model's outputs, and adds to what run.mean gave.

A penalty on the mean activation, the entropy of the mean prediction, a balance of experts: they are
of this process's samples, and on another number of processes others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.training_step import CURRENT
from ddp_train.sessions.watches.mixed_rows import (
    can_be_tried,
    dimensions_of_samples,
    watched_operations,
)
from ddp_train.tensor_tree import tensors

BESIDE = (
    "a part of the loss is computed from the model's outputs without run.mean. It covers this"
    " process's samples alone, so it depends on the number of processes. If that part has a"
    " number for each sample, use run.mean(losses + part). If it is one number for the batch,"
    " compute it from the rows of all processes: rows, _ = ddp_train.all_gather(outputs)"
)


class BesideMean:
    """Tells of the first step whether gradients of a model's outputs come past run.mean.

    The gradient that run.mean's losses give the outputs is taken when they are made, and compared
    with the one that arrives. Penalties on weights are none of outputs.
    """

    def __init__(self) -> None:
        self.is_found = False
        self.losses = 0
        """Losses of run.mean so far."""
        self.watched: set[Any] | None = None
        """Operations that the user's code watches; None before the first loss."""
        self.gradients: dict[int, dict[int, Tensor]] = {}
        """The gradient of each loss by each output; of outputs by `id`, which their hooks know."""
        self.factors: dict[int, Tensor] = {}
        """The gradient that each loss has got in the current backward pass."""
        self.backward_pass = -1
        """The number of that pass."""

    def see_loss(self, loss: Tensor, outputs: Iterable[Any], samples: int) -> None:
        """Take note of a mean loss. outputs: of the model; samples: of this process."""
        if self.watched is None:
            self.watched = watched_operations()
        number = self.losses
        self.losses += 1
        # One that is not looked at is known by it, so that nothing is said.
        loss.register_hook(partial(self._see_factor, number))
        if samples < 2 or not torch.is_grad_enabled():
            return
        tried = [one for one in tensors(outputs) if dimensions_of_samples(one, samples)]
        for output in tried:
            if not output.requires_grad or not can_be_tried(loss, output, self.watched):
                continue
            gradient = _gradient(loss, output)
            if gradient is None:
                continue
            key = id(output)
            if key not in self.gradients:
                self.gradients[key] = {}
                output.register_hook(partial(self._see_gradient, key))
            self.gradients[key][number] = gradient

    def _see_factor(self, number: int, factor: Tensor) -> None:
        """Called when a loss goes backward, before the outputs that it comes from."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self.backward_pass:
            self.backward_pass = backward_pass
            self.factors = {}
        self.factors[number] = factor.detach()

    def _see_gradient(self, key: int, gradient: Tensor) -> None:
        """Called with the gradient of an output."""
        of_losses = self.gradients.get(key)
        if of_losses is None or torch._C._current_graph_task_id() != self.backward_pass:
            return  # the first step is over; a gradient that the loop takes by itself
        if not self.factors.keys() <= of_losses.keys():
            return  # a loss that could not be looked at
        expected = torch.zeros_like(gradient)
        for number, factor in self.factors.items():
            expected += factor * of_losses[number]
        rounding = torch.finfo(gradient.dtype).eps ** 0.5
        largest = gradient.detach().abs().max()
        self.is_found |= bool((gradient.detach() - expected).abs().max() > rounding * largest)

    def ends_with_some(self, gathers: int) -> bool:
        """True if there are some. No outputs are looked at from now on.

        gathers: calls of `all_gather` before the step: what is computed of its rows is right.
        """
        self.gradients = {}
        self.factors = {}
        self.watched = None
        return self.is_found and gathers == CURRENT.gathers


def _gradient(loss: Tensor, output: Tensor) -> Tensor | None:
    """The gradient of a loss by an output, zeros if it does not depend on it; None if unknown."""
    with torch.autocast(loss.device.type, enabled=False):
        try:
            (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
        except RuntimeError:
            return None  # the loop's own backward pass raises what is wrong with it
    if gradient is None:
        return torch.zeros_like(output, requires_grad=False)
    return gradient.detach()
