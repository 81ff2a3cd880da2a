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

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.optim.flagged import (
    descend,
    kept,
    move_towards,
    of_one_type,
    refuse_scaled_gradients,
)

Groups = Iterable[Tensor] | Iterable[dict[str, Any]]


class _LayerWise(Optimizer):
    """What both share. In a group with `layer_adaptation=False` each trust ratio is 1."""

    found_inf: Tensor | None = None
    """A float32 scalar on the device: 1 leaves weights and moments as they are."""
    _step_supports_amp_scaling = True  # GradScaler asks

    def __init__(self, params: Groups, **defaults: Any) -> None:
        # capturable, as torch calls it: a loaded step counter goes to the device.
        super().__init__(params, {"layer_adaptation": True, "capturable": True, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient stay as they are. Raises RuntimeError if the
        gradients are still multiplied by the scale of a GradScaler."""
        refuse_scaled_gradients(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                common = self._begin(group)
                for together in (
                    of_one_type(parameters) if group["foreach"] else [[one] for one in parameters]
                ):
                    gradients = [one.grad for one in together if one.grad is not None]
                    self._update(group, together, gradients, *common)
        return loss

    def _begin(self, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """What all updates of a group in this step have in common."""
        return ()

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        *common: Tensor,
    ):
        raise NotImplementedError


class Lars(_LayerWise):
    """Layer-wise Adaptive Rate Scaling, SGD with momentum (arXiv:1708.03888, algorithm 1).

    With weight decay b and trust coefficient c: v = momentum v + lr c |w| / (|g| + b |w| + eps) (g
    + b w); w = w - v. The trust ratio is 1 where |w| or |g| is zero, as in MLPerf's reference. The
    rate is inside the momentum.
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
        """foreach: all layers of a group together, as torch calls it; False: one after the
        other."""
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            foreach=foreach,
        )

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        *common: Tensor,
    ):
        decay = group["weight_decay"]
        rates = group["lr"]
        momenta = kept(self, parameters, "momentum_buffer") if group["momentum"] else []
        updates = torch._foreach_add(gradients, parameters, alpha=decay)
        if group["layer_adaptation"]:
            weights = _norms(parameters)
            grads = _norms(gradients)
            ratios = (
                group["trust_coefficient"]
                * weights
                / torch.add(grads, weights, alpha=decay).add_(group["eps"])
            )
            rates = _scaled(rates, _or_one(ratios, weights, grads))
        torch._foreach_mul_(updates, rates)
        descend(parameters, updates, self.found_inf, momenta, group["momentum"])


class Lamb(_LayerWise):
    """Layer-wise Adaptive Moments (arXiv:1904.00962v5, algorithm 2), with phi(z) = z.

    With m and s, Adam's moments after bias correction, and weight decay b: u = m / (sqrt(s) + eps)
    + b w; w = w - lr |w| / |u| u. The trust ratio |w| / |u| is 1 where one of the norms is zero.
    Steps are counted for each group together, also for a parameter that had no gradient in some.
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
        """max_trust_ratio: larger trust ratios are cut to it. foreach: all layers of a group
        together, as torch calls it; False: one after the other."""
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_trust_ratio=max_trust_ratio,
            foreach=foreach,
        )

    def _begin(self, group: dict[str, Any]) -> tuple[Tensor, ...]:
        """Bias correction, as what is left of it: m / (sqrt(s) + eps) is scale x moment /
        (sqrt(square) + eps').

        Returns scale and eps', 0-dim float64: in float32, 1 - 0.999 is off by 2e-5 of it.
        """
        first, (beta1, beta2) = group["params"][0], group["betas"]
        if "step" not in self.state[first]:
            self.state[first]["step"] = torch.zeros((), device=first.device)
        self.state[first]["step"] += 1 if self.found_inf is None else 1 - self.found_inf
        steps = self.state[first]["step"].double()
        root = (1 - beta2**steps).sqrt_()
        return root / (1 - beta1**steps), root * group["eps"]

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        *common: Tensor,
    ):
        scale, eps = (value.to(parameters[0].dtype) for value in common)
        (beta1, beta2), rates = group["betas"], group["lr"]
        moments = kept(self, parameters, "exp_avg")
        squares = kept(self, parameters, "exp_avg_sq")
        move_towards(moments, gradients, 1 - beta1, self.found_inf)
        move_towards(squares, torch._foreach_mul(gradients, gradients), 1 - beta2, self.found_inf)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, eps, alpha=1)  # without alpha torch would read the value of eps
        updates = torch._foreach_div(moments, roots)
        torch._foreach_mul_(updates, scale)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["layer_adaptation"]:
            weights = _norms(parameters)
            lengths = _norms(updates)
            ratios = weights / lengths
            if group["max_trust_ratio"] is not None:
                ratios.clamp_(max=group["max_trust_ratio"])
            rates = _scaled(rates, _or_one(ratios, weights, lengths))
        torch._foreach_mul_(updates, rates)
        descend(parameters, updates, self.found_inf)


def _norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """[len(tensors)]"""
    return torch.stack(torch._foreach_norm(tensors))


def _or_one(ratios: Tensor, norms: Tensor, other_norms: Tensor) -> Tensor:
    """1 where one of the norms is zero. A norm that is NaN is not: the NaN must reach the
    weights."""
    return torch.where(torch.logical_and(norms, other_norms), ratios, 1.0)


def _scaled(rate: float | Tensor, ratios: Tensor) -> tuple[Tensor, ...]:
    """The rate of each layer, 0-dim."""
    return (ratios * rate).unbind()
