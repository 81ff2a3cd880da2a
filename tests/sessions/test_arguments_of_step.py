"""Optimizers of others, whose `step` takes other arguments than torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

INPUTS = torch.arange(24.0).view(12, 2).double() / 24


class Scaled(torch.optim.SGD):
    """Plain steps of a size that each is given."""

    def step(self, scale: float, *, more: float = 0.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-scale - more)


class WithLoss(torch.optim.SGD):
    """Steps by a closure, whose loss decides their size."""

    def step(self, evaluate: Callable[[], Tensor], scale: float) -> None:  # type: ignore[override]
        with torch.enable_grad():
            loss = float(evaluate())
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-scale * loss)


def trained(world: World, kind: str) -> Tensor:
    torch.manual_seed(0)
    optimizer: Any
    with session_on(world) as run:
        model = run.wrap(nn.Linear(2, 1).double())
        optimizer = (
            WithLoss(model.parameters()) if kind == "closure" else Scaled(model.parameters())
        )
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for batch in run.loader(INPUTS, global_batch_size=5, shuffle=False):

                def loss_of(rows: Tensor = batch) -> Tensor:
                    optimizer.zero_grad()
                    loss = run.mean(model(rows).square()[:, 0])
                    loss.backward()
                    return loss

                if kind == "closure":
                    optimizer.step(loss_of, 0.1)
                    continue
                loss_of()
                optimizer.step(0.1, more=0.2)
        return model.weight.detach().clone()


@pytest.mark.parametrize("kind", ["numbers", "closure"])
def test_arguments_of_step_are_passed_on(kind: str) -> None:
    (expected,) = on_ranks(1, trained, kind)
    for weight in on_ranks(3, trained, kind):
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=0)
