"""Updates of lists of tensors that a flag on the device can leave out, so that no step waits for
the host to look.

torch's fused SGD is the one kernel for lists that reads such a flag, and a learning rate that is a
tensor: both may change between replays of a CUDA graph.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def descend(
    params: list[Tensor],
    updates: list[Tensor] | tuple[Tensor, ...],
    found_inf: Tensor | None,
    momenta: list[Tensor] | None = None,
    momentum: float = 0.0,
    rate: float | Tensor = 1.0,
    weight_decay: float = 0.0,
) -> None:
    """params -= rate (updates + weight_decay params), the updates through momenta if there are any;
    nothing if `found_inf`, a float32 scalar on the device, is 1. All are of one dtype. Without a
    flag `rate` is a number."""
    if found_inf is not None:
        _fused(params, updates, found_inf, momenta or [], momentum, rate, weight_decay)
        return
    if weight_decay:
        torch._foreach_mul_(params, 1 - rate * weight_decay)
    if momenta:
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, updates)
    torch._foreach_sub_(params, momenta or updates, alpha=float(rate))


def move_towards(
    means: list[Tensor],
    values: list[Tensor] | tuple[Tensor, ...],
    weight: float,
    found_inf: Tensor | None,
) -> None:
    """means += weight (values - means); nothing if `found_inf` is 1."""
    if found_inf is None:
        torch._foreach_lerp_(means, values, weight)
    else:  # a descent with a negative rate and a negative decay
        _fused(means, values, found_inf, rate=-weight, weight_decay=-1.0)


def _fused(
    params: list[Tensor],
    grads: Sequence[Tensor],
    found_inf: Tensor,
    momenta: Sequence[Tensor] = (),
    momentum: float = 0.0,
    rate: float | Tensor = 1.0,
    weight_decay: float = 0.0,
) -> None:
    # The kernel takes the strides of a parameter for those of its gradient.
    like_params = [
        grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
        for grad, param in zip(grads, params, strict=True)
    ]
    torch._fused_sgd_(
        params,
        like_params,
        list(momenta),
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate,  # pyright: ignore[reportArgumentType]  there is an overload for a tensor
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=found_inf,
    )


def kept(optimizer: Optimizer, parameters: list[Tensor], name: str) -> list[Tensor]:
    """Tensors like the parameters that last from step to step, zero at first."""
    for parameter in parameters:
        if name not in optimizer.state[parameter]:
            optimizer.state[parameter][name] = torch.zeros_like(parameter)
    return [optimizer.state[parameter][name] for parameter in parameters]


def of_one_type(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Apart by dtype: the kernels for lists take one at a time."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def refuse_scaled_gradients(optimizer: Optimizer) -> None:
    """Raises RuntimeError if gradients are still multiplied by the scale of a GradScaler."""
    if getattr(optimizer, "grad_scale", None) is not None:  # GradScaler has set it
        raise RuntimeError("call GradScaler.unscale_(optimizer) before GradScaler.step(optimizer)")
