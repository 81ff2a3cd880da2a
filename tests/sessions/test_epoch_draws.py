"""What a loop draws from the global generators between its steps: the same on any number of
processes, and in a resumed run."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from tests.sessions.loops import net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

STOPPED_AT = 6
"""The step, in the second of three epochs of four."""


def drawn() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def trained(run: Run, whole: bool, stops: bool) -> dict[str, torch.Tensor]:
    """A loop with weights of samples that each epoch draws, and with others for its end."""
    model = run.wrap(net())
    optimizer = sgd(model)
    data = rows()
    loader = run.loader(range(len(data)), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer)
    inputs, labels = data.tensors
    for _ in run.epochs(3, whole=whole):
        weights = torch.rand(len(data), dtype=torch.float64) + sum(drawn())
        for i in loader:
            optimizer.zero_grad()
            losses = (model(inputs[i]).squeeze(1) - labels[i]).square()
            torch.rand(run.rank)  # a draw of this process alone
            run.mean(losses * weights[i]).backward()
            optimizer.step()
            if run.step == STOPPED_AT - 2 and not whole:
                run.save()
            if run.step == STOPPED_AT and stops:
                raise Interrupted
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * sum(drawn())
    return weights_of(model=model)


def calm_and_resumed(world: World, folder: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for whole in (False, True):
        with session_on(world) as run:
            found.append(trained(run, whole, stops=False))
        place = str(folder / f"{world.size}_{whole}")
        for stops in (True, False):
            with session_on(world, place) as run:
                weights = trained(run, whole, stops)
        found.append(weights)
    return found


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_draws_between_steps_are_those_of_the_epoch(processes: int, tmp_path: Path) -> None:
    with session_on(World()) as run:
        expected = trained(run, whole=True, stops=False)
    for of_rank in on_ranks(processes, calm_and_resumed, tmp_path):
        for weights in of_rank:
            torch.testing.assert_close(weights, expected)
