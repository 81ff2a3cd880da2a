"""Gradients that a loop sets itself, as the clipped ones of each sample in DP-SGD."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.world import World
from ddp_train.sessions.settings import UsageError
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

INPUTS = torch.randn(14, 3, generator=torch.Generator().manual_seed(0)).double()
BATCH = 6
"""The last batch of an epoch has 2 samples: of three processes one has none."""
EPOCHS = 2


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def clipped_sum(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """The sum of the gradients of a batch's samples, each clipped to a norm of 0.1."""
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for row in batch:
        gradients = torch.autograd.grad(model(row[None]).square().sum(), parameters)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(0.1 / norm, 1.0)
    return sums


def plain() -> list[Tensor]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for epoch in range(EPOCHS):
        order = torch.as_tensor(epoch_order(0, epoch, len(INPUTS)))
        for numbers in order.split(BATCH):
            sums = clipped_sum(model, INPUTS[numbers])
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total / len(numbers)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained(
    world: World,
    noise: float = 0.0,
    adds_up: bool = True,
    folder: str | None = None,
    stops_at: int = -1,
) -> tuple[list[Tensor], int]:
    """The weights, and the step at which the loop began."""
    first_step = 0
    with session_on(world, folder) as run:
        model = run.wrap(new_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        loader = run.loader(INPUTS, global_batch_size=BATCH)
        first_step = run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                sums = clipped_sum(model, batch)
                for parameter, total in zip(model.parameters(), sums, strict=True):
                    drawn = noise * ddp_train.noise_like(parameter, rows="shared")
                    if adds_up:
                        total = run.sum(total)
                    parameter.grad = (total + drawn) / run.sum(len(batch))
                optimizer.step()
                if run.step == stops_at:
                    run.save()
                if run.step == stops_at + 1 > 0:
                    raise Interrupted
    return [parameter.detach().clone() for parameter in model.parameters()], first_step


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_clipped_gradients_of_samples_are_those_of_one_process(ranks: int) -> None:
    for weights, _ in on_ranks(ranks, trained):
        torch.testing.assert_close(weights, plain(), rtol=1e-12, atol=0)


def test_shared_noise_may_be_added() -> None:
    ((expected, _),) = on_ranks(1, trained, 0.5)
    for weights, _ in on_ranks(3, trained, 0.5):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def test_a_step_with_own_gradients_can_be_saved() -> None:
    expected = on_ranks(3, trained, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(3, trained, 0.5, True, folder, 4)
        resumed = on_ranks(3, trained, 0.5, True, folder)
    for (weights, first_step), (uninterrupted, _) in zip(resumed, expected, strict=True):
        assert first_step == 5
        assert all(map(torch.equal, weights, uninterrupted))


def refusal_of_own_gradients(world: World) -> tuple[str, str]:
    with pytest.raises(UsageError) as refused:
        trained(world, adds_up=False)
    return str(refused.value), refused.value.remedy


def test_gradients_of_one_process_are_refused() -> None:
    for text, remedy in on_ranks(3, refusal_of_own_gradients):
        assert (
            "itself set the gradients (p.grad = ...), and after optimizer.step() the weights"
            in text
        )
        assert "run.sum(total) / run.sum(len(batch))" in remedy


class AddsUpItself(torch.optim.SGD):
    """An optimizer that adds up gradients in its step."""

    run: Any = None

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = self.run.sum(parameter.grad)
        super().step()


def trained_by_optimizer(world: World) -> list[Tensor]:
    with session_on(world) as run:
        model = run.wrap(new_model())
        optimizer = AddsUpItself(model.parameters(), lr=0.1)
        optimizer.run = run
        loader = run.loader(INPUTS, global_batch_size=BATCH)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for batch in loader:
                for parameter, total in zip(
                    model.parameters(), clipped_sum(model, batch), strict=True
                ):
                    parameter.grad = total
                optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_an_optimizer_may_add_up_gradients_in_its_step() -> None:
    (expected,) = on_ranks(1, trained_by_optimizer)
    for weights in on_ranks(3, trained_by_optimizer):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
