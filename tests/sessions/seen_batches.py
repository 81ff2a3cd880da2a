"""Training in a session and by torch alone, with the numbers of the samples of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from tests.support.session_ranks import Interrupted, session_on

EPOCHS = 3
SAMPLES = 23
Trained = tuple[list[list[int]], Tensor]
"""The sample numbers of each global batch, and the weights at the end."""


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def losses_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs)[:, 0] - inputs.sum(1)).square()


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def plain_loop(batches_of: Callable[[int], Iterable[Any]]) -> Trained:
    """One process without this package. batches_of: the batches of an epoch."""
    model = net()
    optimizer = sgd(model)
    seen = []
    for epoch in range(EPOCHS):
        for inputs, numbers in batches_of(epoch):
            seen.append(numbers.tolist())
            optimizer.zero_grad()
            losses_of(model, inputs).mean().backward()
            optimizer.step()
    return seen, weights_of(model)


def session_loop(
    world: World,
    folder: Path,
    loader_of: Callable[[Run], Any],
    until: int | None = None,
    device: str = "cpu",
) -> Trained:
    """The same in a session. until: the step at which it is saved and interrupted."""
    seen: list[list[int]] = []
    with session_on(world, str(folder), device) as run:
        model = run.wrap(net())
        optimizer = sgd(model)
        loader = loader_of(run)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(EPOCHS):
            for inputs, numbers in loader:
                if until is not None and run.step == until:
                    raise Interrupted
                if until is not None and run.step == until - 1:
                    run.save()
                seen.append(run.gather(numbers).tolist())
                optimizer.zero_grad()
                run.mean(losses_of(model, inputs)).backward()
                optimizer.step()
    return seen, weights_of(model)
