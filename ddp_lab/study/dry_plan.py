"""Measures the work of one rank of a very large run on its host, without the others: planning,
sampling, bookkeeping.

`python -m ddp_lab.study.dry_plan RANKS` builds the plan of rank 0 of RANKS in a process group
without communication (torch's `fake` backend: collectives return at once and allocate the memory
that they would need), and prints the costs as JSON. It measures work on the host that may grow with
the number of ranks, not the communication.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_lab.study.simulate import LOG_EVERY_STEPS
from ddp_train.data.batch_plan import BatchPlan, MicroBatch, epoch_order, evaluation_batches
from ddp_train.distributed.process_group import averaged_buffers, session
from ddp_train.distributed.world import World
from ddp_train.tasks.mean_loss import RunningLoss

SAMPLES = 1_281_167
TEST_SAMPLES = 50_000
"""ImageNet's."""
BATCH = 32
"""Samples per rank and step."""
CHANNELS = 1_000
"""Channels of batch norm, each with a mean and a variance. ResNet-50 has 26,560: 1.7 GB from 4,096
ranks."""
STEPS = 8
"""Fewer than an epoch has, whose order is cached."""
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one operation on one rank."""

    what: str
    seconds: float
    bytes: int
    """Size of the result."""


def measure(ranks: int) -> list[Cost]:
    """The costs of rank 0 in a world of `ranks`. Must be called in a process without a process
    group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = World(0, ranks, 0, min(ranks, 8))
    plan = BatchPlan(SAMPLES, BATCH * ranks, 1, STEPS, seed=0, rank=0, world_size=ranks)
    with session(world, "cpu", "fake", FakeStore(), 60.0):
        return [
            _cost("order of an epoch, once in each", lambda: _fresh_order(plan)),
            _cost("micro-batches of a step", lambda: list(plan.micro_batches()), operations=STEPS),
            _cost(
                "micro-batches of an evaluation",
                lambda: evaluation_batches(TEST_SAMPLES, 200, 0, ranks),
            ),
            _cost("mean loss at a logging interval", _mean_loss),
            _cost(
                "buffers of a checkpoint, group norm", lambda: _gathered(nn.GroupNorm(8, CHANNELS))
            ),
            _cost(
                "buffers of a checkpoint, batch norm", lambda: _gathered(nn.BatchNorm1d(CHANNELS))
            ),
        ]


def _cost(what: str, work: Callable[[], Any], operations: int = 1) -> Cost:
    """The minimum of REPEATS runs, since other work on the machine only adds time.

    operations: number of them in one run.
    """
    seconds = []
    result = None
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - began)
    return Cost(what, min(seconds) / operations, _bytes(result) // operations)


def _bytes(result: Any) -> int:
    if isinstance(result, list):
        return sum(micro_batch.indices.nbytes for micro_batch in result)
    return getattr(result, "nbytes", 0)


def _fresh_order(plan: BatchPlan) -> np.ndarray:
    epoch_order.cache_clear()
    return epoch_order(plan.seed, 0, plan.samples)


def _mean_loss() -> float:
    running = RunningLoss()
    for step in range(LOG_EVERY_STEPS):
        micro_batch = MicroBatch(
            epoch=0, step=step, indices=np.arange(BATCH), num_real=BATCH, scale=1.0, is_last=True
        )
        running.add(1.0, BATCH, micro_batch)
    return running.mean("cpu").value


def _gathered(module: nn.Module) -> torch.Tensor:
    """The averaged buffers that every rank holds while a checkpoint is saved."""
    with averaged_buffers(module) as buffers:
        return buffers


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(cost) for cost in measure(int(sys.argv[1]))]))
