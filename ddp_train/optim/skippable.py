"""Optimizers whose step a flag on the device can leave out, so that no step waits for the host.

Their updates are those of lists of tensors. torch's fused SGD is the one kernel for lists that
reads such a flag, and a learning rate that is a tensor: both may change between replays of a CUDA
graph.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = list[Tensor] | tuple[Tensor, ...]


class SkippableOptimizer(Optimizer):
    """An optimizer that, like torch's fused ones, leaves out a step if `found_inf` is 1."""

    found_inf: Tensor | None = None
    """A float32 scalar on the device: 1 leaves weights and moments as they are."""
    _step_supports_amp_scaling = True  # GradScaler asks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once. Those without a gradient are not changed.

        closure: as in torch's optimizers: called first, with gradients enabled, to compute the
            loss.

        Returns the result of `closure`, or None without one. Raises RuntimeError if a
        GradScaler calls it with gradients that are still scaled: call
        `scaler.unscale_(optimizer)` before `scaler.step(optimizer)`.
        """
        if getattr(self, "grad_scale", None) is not None:  # GradScaler has set it
            raise RuntimeError(
                "call GradScaler.unscale_(optimizer) before GradScaler.step(optimizer)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        """Change weights and moments."""
        raise NotImplementedError

    def lists(self, group: dict[str, Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Parameters of a group that have gradients, and these, in lists of one dtype; of one
        parameter each without `foreach`."""
        found: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                key = parameter.dtype if group["foreach"] else parameter
                parameters, gradients = found.setdefault(key, ([], []))
                parameters.append(parameter)
                gradients.append(parameter.grad)
        return list(found.values())

    def moments(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Tensors like the parameters that last from step to step, zero at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]


def descend(
    params: list[Tensor],
    updates: Tensors,
    found_inf: Tensor | None,
    rate: float | Tensor = 1.0,
    weight_decay: float = 0.0,
) -> None:
    """params -= rate (updates + weight_decay params); nothing if `found_inf` is 1.

    All are of one dtype. Without a flag `rate` is a number.
    """
    if found_inf is not None:
        _fused_sgd(params, updates, [], found_inf, lr=rate, weight_decay=weight_decay)
        return
    if weight_decay:
        torch._foreach_mul_(params, 1 - rate * weight_decay)
    torch._foreach_sub_(params, updates, alpha=float(rate))


def descend_with_momentum(
    params: list[Tensor],
    updates: Tensors,
    momenta: list[Tensor],
    momentum: float,
    found_inf: Tensor | None,
) -> None:
    """momenta = momentum momenta + updates; params -= momenta; nothing if `found_inf` is 1."""
    if found_inf is not None:
        _fused_sgd(params, updates, momenta, found_inf, momentum=momentum)
        return
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, updates)
    torch._foreach_sub_(params, momenta)


def move_towards(
    means: list[Tensor], values: Tensors, weight: float, found_inf: Tensor | None
) -> None:
    """means += weight (values - means); nothing if `found_inf` is 1."""
    if found_inf is None:
        torch._foreach_lerp_(means, values, weight)
    else:  # a descent with a negative rate and a negative decay
        descend(means, values, found_inf, rate=-weight, weight_decay=-1.0)


def _fused_sgd(
    params: list[Tensor],
    grads: Tensors,
    momenta: list[Tensor],
    found_inf: Tensor,
    **options: Any,
) -> None:
    # The kernel takes the strides of a parameter for those of its gradient.
    like_params = [
        grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
        for grad, param in zip(grads, params, strict=True)
    ]
    defaults = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0}
    switches = {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(
        params, like_params, momenta, **{**defaults, **switches, **options}, found_inf=found_inf
    )
