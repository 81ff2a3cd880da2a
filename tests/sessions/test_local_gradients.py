"""Gradients that a loop takes of a mean loss by `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.sessions.watches import local_gradients
from ddp_train.sessions.watches.local_gradients import LOCAL_GRADIENTS
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


def balanced_losses(world: World, adds_up: bool, **options: Any) -> tuple[list[str], Tensor]:
    """What a loop that weighs two losses by their gradients is told, and its weights.

    adds_up: by the gradients of all processes.
    options: of run.wrap.
    """
    messages: list[str] = []
    local_gradients.log.warning = messages.append  # type: ignore[method-assign]
    torch.manual_seed(0)
    with session_on(world) as run:
        model = run.wrap(nn.Linear(3, 2), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(list(INPUTS), global_batch_size=6, shuffle=False)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for x in loader:
                first, second = model(x).add(torch.tensor([-1, 3])).square().unbind(1)
                losses = [run.mean(first), run.mean(second)]
                norms = []
                for loss in losses:
                    (gradient,) = torch.autograd.grad(loss, model.weight, retain_graph=True)
                    if adds_up:
                        gradient = run.sum(gradient) / run.processes
                    norms.append(gradient.norm())
                optimizer.zero_grad()
                (losses[0] + norms[0] / norms[1] * losses[1]).backward()
                optimizer.step()
                run.sum(losses[0].item())
        return messages, model.weight.detach().clone()


@pytest.mark.slow
def test_gradients_of_one_process_are_warned_of_once() -> None:
    """Those that are added up are told nothing of, and are right."""
    ((_, expected),) = on_ranks(1, balanced_losses, True)
    local = on_ranks(3, balanced_losses, False)
    assert [messages for messages, _ in local] == [[LOCAL_GRADIENTS], [], []]
    assert not torch.allclose(local[0][1], expected)
    for messages, weight in on_ranks(3, balanced_losses, True):
        assert messages == []
        torch.testing.assert_close(weight, expected)


def with_unused_parameters(world: World) -> Tensor:
    return balanced_losses(world, True, find_unused_parameters=True)[1]


@pytest.mark.slow
def test_gradients_are_taken_beside_unused_parameters() -> None:
    ((_, expected),) = on_ranks(1, balanced_losses, True)
    for weight in on_ranks(3, with_unused_parameters):
        torch.testing.assert_close(weight, expected)
