"""LARS and LAMB: optimizers whose rate is adapted to each layer, for global batches of thousands.

Each update of a layer is scaled so that its length is in a fixed proportion to that of the layer's
weights. What depends on values stays on the device: no step waits for it, and a step can be
captured in a CUDA graph. For that the learning rate of a group may be a 0-dim tensor on the device,
filled anew before each replay; and like torch's fused optimizers they leave out a step if the
tensor `found_inf` of the optimizer, which a GradScaler sets, is 1.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_*: torch's own optimizers are made of them.
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ddp_train.optim.skippable import (
    SkippableOptimizer,
    Tensors,
    descend,
    descend_with_momentum,
    move_towards,
)

Groups = Iterable[Tensor] | Iterable[dict[str, Any]]
COMMON_DEFAULTS = {"layer_adaptation": True, "capturable": True}
"""In a group with `layer_adaptation=False` each trust ratio is 1. Capturable, as torch calls it: a
loaded step counter goes to the device."""


class Lars(SkippableOptimizer):
    """The LARS optimizer: SGD with momentum and a learning rate for each layer.

    The source is arXiv:1708.03888, algorithm 1. For a parameter w with gradient g, weight decay b
    and trust coefficient c: v = momentum v + lr r (g + b w); w = w - v, with the trust ratio r = c
    |w| / (|g| + b |w| + eps). Where |w| or |g| is zero, r is 1, as in MLPerf's reference code.
    Since v contains lr, a change of lr affects only later gradients.

    params: parameters or parameter groups, as in torch's optimizers. In a group with
        `layer_adaptation=False` r is 1.
    lr: learning rate, a number or a tensor.
    momentum: factor of v; 0 for none.
    weight_decay: b.
    trust_coefficient: c.
    eps: added to the denominator.
    foreach: True updates all parameters of a group together, False one after the other.
    """

    def __init__(
        self,
        params: Groups,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        foreach: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "foreach": foreach,
        }
        super().__init__(params, COMMON_DEFAULTS | defaults)

    def update(self) -> None:
        for group in self.param_groups:
            decay = group["weight_decay"]
            momentum = group["momentum"]
            for parameters, gradients in self.lists(group):
                updates = torch._foreach_add(gradients, parameters, alpha=decay)
                rates = group["lr"]
                if group["layer_adaptation"]:
                    weights = _norms(parameters)
                    grads = _norms(gradients)
                    denominators = torch.add(grads, weights, alpha=decay).add_(group["eps"])
                    ratios = group["trust_coefficient"] * weights / denominators
                    rates = _layer_rates(rates, ratios, weights, grads)
                torch._foreach_mul_(updates, rates)
                if momentum:
                    momenta = self.moments(parameters, "momentum_buffer")
                    descend_with_momentum(parameters, updates, momenta, momentum, self.found_inf)
                else:
                    descend(parameters, updates, self.found_inf)


class Lamb(SkippableOptimizer):
    """The LAMB optimizer: Adam with a learning rate for each layer.

    The source is arXiv:1904.00962v5, algorithm 2, with phi(z) = z. For a parameter w with Adam's
    bias-corrected moments m and s: u = m / (sqrt(s) + eps) + weight_decay w; w = w - lr |w| / |u|
    u. The trust ratio |w| / |u| is set to 1 where |w| or |u| is zero. All parameters of a group
    share one step count, which also includes steps in which a parameter has no gradient.

    params: parameters or parameter groups, as in torch's optimizers. In a group with
        `layer_adaptation=False` the trust ratio is 1.
    lr: learning rate, a number or a tensor.
    betas: decay rates of the two moments.
    eps: added to the denominator.
    weight_decay: decoupled weight decay, as in AdamW.
    max_trust_ratio: upper limit of the trust ratio; None for no limit.
    foreach: True updates all parameters of a group together, False one after the other.
    """

    def __init__(
        self,
        params: Groups,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_trust_ratio: float | None = None,
        foreach: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_trust_ratio": max_trust_ratio,
            "foreach": foreach,
        }
        super().__init__(params, COMMON_DEFAULTS | defaults)

    def update(self) -> None:
        for group in self.param_groups:
            lists = self.lists(group)
            if not lists:
                continue
            scale, eps = self._correct_bias(group)
            for parameters, gradients in lists:
                dtype = parameters[0].dtype
                self._update(group, parameters, gradients, scale.to(dtype), eps.to(dtype))

    def _correct_bias(self, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Bias correction, as what is left of it: m / (sqrt(s) + eps) is scale x moment /
        (sqrt(square) + eps').

        Returns scale and eps', 0-dim float64: in float32, 1 - 0.999 is off by 2e-5 of it.
        """
        first = group["params"][0]
        beta1, beta2 = group["betas"]
        state = self.state[first]
        if "step" not in state:
            state["step"] = torch.zeros((), device=first.device)
        state["step"] += 1 if self.found_inf is None else 1 - self.found_inf
        steps = state["step"].double()
        root = (1 - beta2**steps).sqrt_()
        return root / (1 - beta1**steps), root * group["eps"]

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        scale: Tensor,
        eps: Tensor,
    ) -> None:
        beta1, beta2 = group["betas"]
        moments = self.moments(parameters, "exp_avg")
        squares = self.moments(parameters, "exp_avg_sq")
        move_towards(moments, gradients, 1 - beta1, self.found_inf)
        move_towards(squares, torch._foreach_mul(gradients, gradients), 1 - beta2, self.found_inf)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, eps, alpha=1)  # without alpha torch would read the value of eps
        updates = torch._foreach_div(moments, roots)
        torch._foreach_mul_(updates, scale)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        rates = group["lr"]
        if group["layer_adaptation"]:
            weights = _norms(parameters)
            lengths = _norms(updates)
            ratios = weights / lengths
            if group["max_trust_ratio"] is not None:
                ratios.clamp_(max=group["max_trust_ratio"])
            rates = _layer_rates(rates, ratios, weights, lengths)
        torch._foreach_mul_(updates, rates)
        descend(parameters, updates, self.found_inf)


def _norms(tensors: Tensors) -> Tensor:
    """The norm of each tensor, [len(tensors)]."""
    return torch.stack(torch._foreach_norm(tensors))


def _layer_rates(
    rate: float | Tensor, ratios: Tensor, norms: Tensor, other_norms: Tensor
) -> tuple[Tensor, ...]:
    """The rate of each layer, 0-dim: times its ratio, or 1 where one of the norms is zero.

    A norm that is NaN is not zero: the NaN must reach the weights.
    """
    known_ratios = torch.where(torch.logical_and(norms, other_norms), ratios, 1.0)
    return (known_ratios * rate).unbind()
