"""Numbers beside a copy of a model, which no checkpoint holds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches.counts_beside_copies import COUNTS
from tests.sessions.loops import net, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on, told_by


class Average:
    """An average of weights, whose decay warms up, as `ModelEMA` of YOLOv3 has it."""

    def __init__(self, model: nn.Module) -> None:
        self.copy = copy.deepcopy(model).requires_grad_(False)
        self.updates = 0
        self.decay = lambda updates: 0.9 * (1 - math.exp(-updates / 20))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = self.decay(self.updates)
        weights, own = model.state_dict(), self.copy.state_dict()
        for name, value in own.items():
            value *= decay
            value += (1 - decay) * weights[name].detach()

    def state_dict(self) -> dict[str, Any]:
        return {"copy": self.copy.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copy.load_state_dict(state["copy"])
        self.updates = state["updates"]


class Trainer:
    """The training itself, with a count for the log."""

    def __init__(self, model: nn.Module, average: nn.Module) -> None:
        self.model = model
        self.average = average
        self.steps = 0


def averaged(run: Run, saves_all: bool = False) -> None:
    model = run.wrap(net())
    optimizer = sgd(model)
    average = Average(model)
    trainer = Trainer(model, average.copy)
    loader = run.loader(rows(), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer, average=average if saves_all else average.copy)
    for _ in run.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()
            average.update(model)
            trainer.steps += 1


def told(world: World) -> list[str]:
    messages, _ = told_by(world, averaged)
    return messages


@pytest.mark.parametrize("processes", [1, 3])
def test_count_beside_a_copy_is_named_once(processes: int) -> None:
    of_leader, *of_others = on_ranks(processes, told)
    assert of_leader == [COUNTS % "average.updates"]
    assert not any(of_others)


def test_count_that_is_saved_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with session_on(World()) as run:
        averaged(run, saves_all=True)
    assert not caplog.records
