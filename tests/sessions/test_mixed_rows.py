"""Losses that compare the samples of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.distributed.all_gather import all_gather
from ddp_train.distributed.world import World
from ddp_train.sessions import steps
from ddp_train.sessions.mixed_rows import MIXED, mixes_rows
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

SAMPLES = 6
INPUTS = torch.randn(2 * SAMPLES, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2])


def outputs_of(rows: int = SAMPLES) -> Tensor:
    return INPUTS[:rows].clone().requires_grad_().tanh()


def hardest(outputs: Tensor) -> Tensor:
    distances = torch.cdist(outputs.detach(), outputs.detach()).fill_diagonal_(torch.inf)
    return (outputs - outputs[distances.argmin(1)]).square().sum(1)


def of_two_views(outputs: Tensor) -> Tensor:
    """NT-Xent over rows that stand in turns: all first views, all second ones."""
    similarity = functional.normalize(outputs) @ functional.normalize(outputs).T
    similarity = similarity.fill_diagonal_(-torch.inf)
    positives = torch.arange(2 * SAMPLES).roll(SAMPLES)
    return functional.cross_entropy(similarity, positives, reduction="none")


def differences_of_views(outputs: Tensor) -> Tensor:
    first, second = outputs.chunk(2)
    return (first - second).square().sum(1)


def differences_of_neighbours(outputs: Tensor) -> Tensor:
    return (outputs[::2] - outputs[1::2]).square().sum(1)


MIXING: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (hardest, SAMPLES),
    (lambda outputs: (outputs - outputs.mean(0)).square().sum(1), SAMPLES),
    (lambda outputs: -(outputs @ outputs.T).log_softmax(0).diag(), SAMPLES),
    (of_two_views, 2 * SAMPLES),
]
SEPARATE: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (lambda outputs: functional.cross_entropy(outputs, TARGETS, reduction="none"), SAMPLES),
    (lambda outputs: (outputs - outputs.detach().mean(0)).square().sum(1), SAMPLES),
    (lambda outputs: outputs.square().sum(), SAMPLES),
    (lambda outputs: outputs.detach().sum(1), SAMPLES),
    (differences_of_views, 2 * SAMPLES),
    (differences_of_neighbours, 2 * SAMPLES),
    (lambda outputs: functional.batch_norm(outputs, None, None, training=True)[:, 0], SAMPLES),
]


@pytest.mark.parametrize(("loss", "rows"), MIXING)
def test_losses_that_compare_samples_are_seen(loss: Any, rows: int) -> None:
    outputs = outputs_of(rows)
    assert mixes_rows(loss(outputs), [outputs, None], SAMPLES)


@pytest.mark.parametrize(("loss", "rows"), SEPARATE)
def test_losses_of_each_sample_are_not(loss: Any, rows: int) -> None:
    outputs = outputs_of(rows)
    assert not mixes_rows(loss(outputs), outputs, SAMPLES)
    assert not mixes_rows(loss(outputs), None, SAMPLES)


def pairs_of_rows(world: World, gathers: bool) -> list[Any]:
    """What a contrastive loop is told, and its gradient.

    gathers: it compares with the samples of all processes."""
    gather: Any = all_gather
    messages: list[str] = []
    steps.log.warning = messages.append  # type: ignore[method-assign]
    torch.manual_seed(0)
    with session_on(world) as run:
        linear = nn.Linear(4, 4)
        model = run.wrap(nn.Sequential(linear, nn.BatchNorm1d(4)))
        loader = run.loader(list(INPUTS), global_batch_size=2 * SAMPLES, shuffle=False)
        run.resume(model=model)
        for _ in run.epochs(1):
            for batch in loader:
                outputs = model(batch)
                own = torch.arange(len(outputs))
                others = outputs
                if gathers:
                    others, own = gather(outputs)
                logits = outputs @ others.T
                losses = functional.cross_entropy(logits, own, reduction="none")
                run.mean(losses).backward()
        assert linear.weight.grad is not None
        gradient = linear.weight.grad.clone()
    return [messages, gradient]


@pytest.mark.slow
def test_a_loop_is_told_once_on_three_processes() -> None:
    """With all_gather it has the gradient of one process, and nothing to be told."""
    (_, expected), *_ = on_ranks(1, pairs_of_rows, False)
    told = on_ranks(3, pairs_of_rows, False)
    assert [messages for messages, _ in told] == [[MIXED], [], []]
    for messages, gradient in on_ranks(3, pairs_of_rows, True):
        assert messages == []
        torch.testing.assert_close(gradient, expected)
    assert not torch.allclose(told[0][1], expected)
