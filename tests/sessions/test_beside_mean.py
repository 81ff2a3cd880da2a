"""Parts of a loss that do not come by run.mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.distributed.all_gather import all_gather
from ddp_train.distributed.world import World
from ddp_train.sessions.watches import first_step
from ddp_train.sessions.watches.beside_mean import BESIDE
from tests.sessions.loops import rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

gather: Any = all_gather


class Coder(nn.Module):
    """An autoencoder that returns its code too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 3).double()
        self.decoder = nn.Linear(3, 4).double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(inputs).sigmoid()
        return self.decoder(code), code


def of_mean(code: Tensor) -> Tensor:
    """The divergence of the mean activation of each unit from 0.1."""
    mean = code.mean(0)
    return 0.1 * ((0.1 / mean).log() * 0.1 + (0.9 / (1 - mean)).log() * 0.9).sum()


def beside(run: Any, model: Any, inputs: Tensor) -> None:
    outputs, code = model(inputs)
    (run.mean((outputs - inputs).square().sum(1)) + of_mean(code)).backward()


def beside_logits(run: Any, model: Any, inputs: Tensor) -> None:
    """The entropy of the mean prediction."""
    outputs, _ = model(inputs)
    losses = functional.cross_entropy(outputs, inputs.argmax(1), reduction="none")
    mean = outputs.softmax(1).mean(0)
    (2 * run.mean(losses) + (mean * mean.log()).sum()).backward()


def gathered(run: Any, model: Any, inputs: Tensor) -> None:
    outputs, code = model(inputs)
    part = of_mean(gather(code)[0])
    (run.mean((outputs - inputs).square().sum(1)) + part).backward()


def in_losses(run: Any, model: Any, inputs: Tensor) -> None:
    """Several means, with factors, in one backward pass and in two; a penalty on weights."""
    outputs, code = model(inputs)
    loss = 0.5 * run.mean((outputs - inputs).square().sum(1)) + 3 * run.mean(code.sum(1))
    (loss + 0.1 * model.encoder.weight.square().sum()).backward(retain_graph=True)
    run.mean(code.square().sum(1)).backward()


def penalised(run: Any, model: Any, inputs: Tensor) -> None:
    """A gradient by inputs, whose norm is a loss of each sample."""
    inputs = inputs.clone().requires_grad_()
    outputs, _ = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    run.mean(slopes.square().sum(1) + outputs.square().sum(1)).backward()


def of_two_loaders(world: World) -> list[str]:
    """What is said of a batch of two loaders, which share out other numbers of samples: the model
    has both at once, and each has a mean."""
    messages: list[str] = []
    first_step.log.warning = lambda text, *_: messages.append(text)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(Coder())
        optimizer = sgd(model)
        inputs = list(rows().tensors[0])
        one = run.loader(inputs, global_batch_size=6)
        other = run.loader(inputs, global_batch_size=15)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for x, y in zip(one, other, strict=False):
                optimizer.zero_grad()
                losses = model(torch.cat([x, y]))[0].square().sum(1)
                of_one = run.mean(losses[: len(x)], of=one)
                (of_one + run.mean(losses[len(x) :], of=other)).backward()
                optimizer.step()
    return messages


def told(world: World, backward: Callable[..., None]) -> list[Any]:
    messages: list[str] = []
    first_step.log.warning = lambda text, *_: messages.append(text)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(Coder())
        optimizer = sgd(model)
        loader = run.loader(list(rows().tensors[0]), global_batch_size=10)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for inputs in loader:
                optimizer.zero_grad()
                backward(run, model, inputs)
                optimizer.step()
        weights = weights_of(model=model)
    return [messages, weights]


@pytest.mark.parametrize("backward", [beside, beside_logits])
def test_a_part_of_outputs_beside_the_mean_is_told_once(backward: Any) -> None:
    assert [messages for messages, _ in on_ranks(3, told, backward)] == [[BESIDE], [], []]
    assert on_ranks(1, told, backward)[0][0] == []


@pytest.mark.parametrize("backward", [gathered, in_losses, penalised])
def test_what_comes_by_the_mean_is_exact_and_not_told(backward: Any) -> None:
    ((_, expected),) = on_ranks(1, told, backward)
    for size in (3, 4):
        for messages, weights in on_ranks(size, told, backward):
            assert messages == []
            torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("size", [3, 4])
def test_two_means_of_one_pass_are_not_told(size: int) -> None:
    assert on_ranks(size, of_two_loaders) == [[]] * size
