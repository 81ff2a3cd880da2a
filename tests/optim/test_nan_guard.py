"""The hook that brings the NaN of a loss to a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_train.optim.nan_guard import Poison


class NoGradient(torch.autograd.Function):
    """Gives its parameter no gradient, as torch's SyncBatchNorm does where a batch is empty."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs * weight

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def test_a_parameter_without_a_gradient_keeps_none() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    poison = Poison()
    weight.register_hook(poison)
    inputs = torch.ones(0, 2, requires_grad=True)
    loss = NoGradient.apply(inputs, weight).sum()
    poison.zero = loss.detach() * 0
    loss.backward()
    assert weight.grad is None
    poison.zero = torch.tensor(torch.nan)
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.isnan().all()
