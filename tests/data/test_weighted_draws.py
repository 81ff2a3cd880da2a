"""Samples drawn by weight: the same draws on any number of processes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.weighted_draws import WeightedDraws
from tests.support.jobs import micro_batches_of


def test_draws_have_the_frequencies_of_the_weights() -> None:
    weights = np.tile([0.0, 1.0, 2.0, 5.0], 5_000)
    draws = WeightedDraws(weights)
    epoch = draws.epoch(seed=3, epoch=0)
    assert len(epoch) == len(weights) and np.array_equal(epoch, draws.epoch(3, 0))
    assert not np.array_equal(epoch, draws.epoch(3, 1)) and not np.array_equal(
        epoch, draws.epoch(4, 0)
    )
    assert (weights[epoch] > 0).all()
    found = np.bincount(epoch % 4, minlength=4)[1:]
    expected = len(weights) * np.array([1, 2, 5]) / 8
    assert ((found - expected) ** 2 / expected).sum() < 13.8, (
        "chi-squared of 2 degrees of freedom: 1 in 1,000"
    )
    repeats = Counter(
        Counter(epoch.tolist()).values()
    )  # of a weight of 5: Poisson with a mean of 2.5
    assert repeats[2] > 500 and len(set(epoch.tolist())) < 0.7 * len(weights)
    halves = epoch.reshape(2, -1) % 4
    assert abs(np.corrcoef(halves)[0, 1]) < 0.05, "draws do not depend on each other"
    assert set(WeightedDraws(np.array([0, 0, 3e300, 0])).epoch(0, 0)) == {2}, (
        "none at the ends has a weight"
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_world_draws_the_same_and_resumes_where_it_stopped(world: int) -> None:
    draws = WeightedDraws(np.arange(101.0))
    plans = [BatchPlan(101, 24, 2, 10, 0, rank, world, weights=draws) for rank in range(world)]
    assert plans[0].steps_per_epoch == 5 and plans[0].samples_seen(7) == 101 + 48, (
        "an epoch is n draws"
    )
    for step in range(10):
        batch = plans[0].global_batch(step)
        assert np.array_equal(batch, draws.epoch(0, step // 5)[step % 5 * 24 :][:24])
        mine = micro_batches_of(plans, step)
        assert sorted(np.concatenate([one.indices[: one.num_real] for one in mine])) == sorted(
            batch
        )
        assert sum(one.scale * one.num_real for one in mine) / world == pytest.approx(1, abs=1e-12)
