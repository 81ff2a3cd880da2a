"""A sampler that draws by process in some later epoch is named in that epoch."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.sampled_epochs import SampledEpochs
from ddp_train.distributed.world import World
from ddp_train.engine.order_check import order_checks
from ddp_train.errors import DataError
from ddp_train.tasks.mean_loss import RunningLoss
from tests.support.ranks import on_ranks

SAMPLES = 12


class ApartFrom:
    """A sampler that begins elsewhere on one rank from some epoch on."""

    def __init__(self, first_epoch: int, rank: int) -> None:
        self.first_epoch = first_epoch
        self.rank = rank
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.start = self.rank if epoch >= self.first_epoch else 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        return iter(np.roll(np.arange(SAMPLES), self.start).tolist())


def outcome_of_epochs(world: World, first_epoch: int) -> list[str]:
    """What the exchange of the losses says after each of the six steps of three epochs."""
    sampled = SampledEpochs(
        lambda: ApartFrom(first_epoch, world.rank), samples=range(SAMPLES), key=1
    )
    plan = BatchPlan(SAMPLES, 6, 1, 6, 3, world.rank, world.size, sampled=sampled)
    outcomes = []
    for step in range(1, 7):
        try:
            RunningLoss().mean("cpu", order_checks(plan, step))
            outcomes.append("")
        except DataError as error:
            outcomes.append(str(error))
    return outcomes


def test_each_epoch_of_a_sampler_is_compared() -> None:
    for outcomes in on_ranks(3, outcome_of_epochs, 1):
        assert outcomes[:2] == ["", ""]
        said = "ApartFrom gives other numbers on each process in epoch 2 (rank 0: "
        assert said in outcomes[2] and "epoch 3" in outcomes[4]


def test_one_order_on_all_processes_is_not_named() -> None:
    assert on_ranks(3, outcome_of_epochs, 9) == [[""] * 6] * 3


def test_the_first_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = SampledEpochs(lambda: ApartFrom(9, 0), samples=range(SAMPLES), key=1)
    for epoch in range(6):
        sampled.epoch(epoch)
    monkeypatch.setattr(sampled, "make", lambda: pytest.fail("the sampler is made again"))
    assert sorted(sampled.kept) == [0, 4, 5] and sampled.digest(2) == sampled.digest(5)
