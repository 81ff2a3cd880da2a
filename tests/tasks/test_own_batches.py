"""A task of the user's own whose batches are objects, against plain PyTorch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.distributed.world import World
from ddp_train.options.schema import Config
from examples.graphs import GraphNetwork, together
from tests.support.graph_job import Rings
from tests.support.jobs import config_of, job_of, trained
from tests.support.ranks import on_ranks

STEPS = 4
MORE = {
    "model": {"_target_": "examples.graphs.GraphNetwork"},
    "data": {"_target_": "tests.support.graph_job.Rings", "validation": 0},
    "task": {"_target_": "tests.support.graph_job.TellRings"},
    "train": {"global_batch_size": 15, "epochs": 2, "max_steps": STEPS},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "schedule": {"name": "constant"},
    "tuning": {"precision": "fp64", "num_workers": 0},
}


def config_on(world: World) -> Config:
    strategy: dict[str, Any] = {"name": "single"}
    if world.size > 1:
        strategy = {"name": "ddp", "sync_bn": True}
    return config_of(world, **MORE, strategy=strategy)


def train_on(world: World) -> dict[str, Tensor]:
    return trained(world, config_on(world))


def by_hand() -> dict[str, Tensor]:
    job = job_of(config_on(World()), World())
    model = GraphNetwork().double()
    model.load_state_dict(job.module.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Rings(train=True)
    for step in range(STEPS):
        batch = together([data[int(number)] for number in job.plan.global_batch(step)])
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), batch.targets).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "processes",
    [
        1,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_a_task_of_graphs_is_that_of_one_process(processes: int) -> None:
    expected = by_hand()
    for found in on_ranks(processes, train_on):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
