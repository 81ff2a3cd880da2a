"""Loops that need second derivatives of their mean loss, as AdaHessian."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.sessions.settings import UsageError
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

INPUTS = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)).double()
"""The last batch of an epoch has 2 samples: of three processes one has none."""


def trained(world: World, in_backward: bool) -> list[Tensor]:
    """The weights of a loop that divides gradients by estimates of second derivatives.

    in_backward: gradients with a graph are taken by backward().
    """
    torch.manual_seed(0)
    with session_on(world) as run:
        model = run.wrap(nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(INPUTS, global_batch_size=4)
        run.resume(model=model, optimizer=optimizer)
        parameters = list(model.parameters())
        for _ in run.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                loss = run.mean(model(batch).square()[:, 0])
                if in_backward:
                    loss.backward(create_graph=True)
                gradients = torch.autograd.grad(loss, parameters, create_graph=True)
                loss.backward(retain_graph=True)
                drawn = [ddp_train.noise_like(p, rows="shared").sign() for p in parameters]
                products = torch.autograd.grad(gradients, parameters, drawn)
                for p, product, v in zip(parameters, products, drawn, strict=True):
                    second = run.sum(product) / run.processes * v
                    assert p.grad is not None
                    p.grad /= second.abs() + 1
                optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("ranks", [3, 4])
def test_second_derivatives_are_those_of_one_process(ranks: int) -> None:
    (expected,) = on_ranks(1, trained, False)
    for weights in on_ranks(ranks, trained, False):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def refusal(world: World) -> str:
    with pytest.raises(UsageError) as refused:
        trained(world, True)
    return refused.value.remedy


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_graph_of_gradients_is_refused_with_a_way_out(ranks: int) -> None:
    for remedy in on_ranks(ranks, refusal):
        assert "loss.backward(retain_graph=True)" in remedy


def of_inputs(world: World) -> bool:
    with session_on(world) as run:
        model = run.wrap(nn.Linear(3, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for batch in run.loader(INPUTS, global_batch_size=4):
                inputs = batch.clone().requires_grad_()
                loss = run.mean(model(inputs).square()[:, 0])
                (slopes,) = torch.autograd.grad(loss, inputs, create_graph=True)
                (loss + 0 * slopes.sum()).backward()
                optimizer.step()
    return True


def test_gradients_of_inputs_may_have_a_graph() -> None:
    assert all(on_ranks(3, of_inputs))


class Critic(nn.Module):
    """A discriminator that adds to each sample the spread of the whole batch, see
    "Progressive growing of GANs" (arXiv:1710.10196)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 4)
        self.score = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        features = torch.tanh(self.features(inputs))
        rows, _ = ddp_train.all_gather(features)
        spread = rows.std(0, unbiased=False).mean().expand(len(inputs), 1)
        return self.score(torch.cat([features, spread], 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def penalised(world: World, make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The state of a model that is trained with a gradient penalty, R1 (arXiv:1801.04406)."""
    torch.manual_seed(0)
    with session_on(world) as run:
        model = run.wrap(make().double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(INPUTS, global_batch_size=4)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for batch in loader:
                inputs = batch.clone().requires_grad_()
                scores = model(inputs)
                (slopes,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
                optimizer.zero_grad()
                run.mean(slopes.square().sum(1) + scores.square()[:, 0]).backward()
                optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("make", [Critic, normed])
def test_gradient_penalties_are_those_of_one_process(
    ranks: int, make: Callable[[], nn.Module]
) -> None:
    (expected,) = on_ranks(1, penalised, make)
    for state in on_ranks(ranks, penalised, make):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
