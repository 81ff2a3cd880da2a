"""The same global batches for any number of processes, each sample once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.data.batch_plan import BatchPlan, evaluation_batches
from ddp_train.data.splits import split_for_validation
from ddp_train.errors import DataError


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 200),
    per_pass=st.integers(1, 9),
    world=st.integers(1, 5),
    accumulation=st.integers(1, 4),
)
def test_shares_hold_each_sample_once_and_every_rank_takes_part(
    samples: int, per_pass: int, world: int, accumulation: int
) -> None:
    size = per_pass * world * accumulation
    plans = [
        BatchPlan(samples, size, accumulation, -(-samples // size) * 2, 3, rank, world)
        for rank in range(world)
    ]
    of_rank = [list(plan.micro_batches()) for plan in plans]
    assert len({len(micro_batches) for micro_batches in of_rank}) == 1, (
        "every rank makes as many passes"
    )
    seen: dict[int, list[int]] = {0: [], 1: []}
    for micro_batches in zip(*of_rank, strict=True):
        assert (
            len({(micro_batch.step, micro_batch.is_last) for micro_batch in micro_batches}) == 1
        ), "ranks exchange gradients in the same passes"
        for micro_batch in micro_batches:
            assert (
                len(micro_batch.indices) >= 1
                and micro_batch.num_real in (0, len(micro_batch.indices))
                and len(micro_batch.indices) <= per_pass
            )
            assert (micro_batch.scale > 0) == (micro_batch.num_real > 0)
            seen[micro_batch.epoch or 0] += micro_batch.indices[: micro_batch.num_real].tolist()
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(samples))
    # the weights of all samples of a step add up to one, after DDP's division by the world
    for step in range(plans[0].steps):
        weight = (
            sum(
                s.scale * s.num_real
                for micro_batches in of_rank
                for s in micro_batches
                if s.step == step
            )
            / world
        )
        assert abs(weight - 1) < 1e-12
    assert plans[0].samples_seen(plans[0].steps) == 2 * samples


def test_a_plan_continues_where_it_stopped() -> None:
    plan = BatchPlan(101, 24, 2, 20, 0, rank=1, world_size=3)
    whole = list(plan.micro_batches())
    rest = list(plan.micro_batches(7))
    same = [micro_batch for micro_batch in whole if micro_batch.step >= 7]
    assert [(s.step, s.indices.tolist(), s.scale, s.is_last) for s in same] == [
        (s.step, s.indices.tolist(), s.scale, s.is_last) for s in rest
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_shares_hold_each_sample_once(world: int) -> None:
    micro_batches = [
        micro_batch
        for rank in range(world)
        for micro_batch in evaluation_batches(101, 10, rank, world)
    ]
    assert sorted(
        number for micro_batch in micro_batches for number in micro_batch.indices.tolist()
    ) == list(range(101))
    assert sorted(micro_batch.step for micro_batch in micro_batches) == list(range(11))


def test_a_step_knows_whether_its_batch_is_whole() -> None:
    for samples in (95, 96, 97):
        plan = BatchPlan(
            samples=samples, global_batch_size=24, accumulation_steps=1, steps=20, seed=0
        )
        assert [plan.is_full(step) for step in range(20)] == [
            len(plan.global_batch(step)) == 24 for step in range(20)
        ]


def test_an_endless_data_set_is_refused_before_its_order_is_drawn() -> None:
    for samples in (2**63 - 1, 10**12):
        with pytest.raises(DataError, match=f"the data set has {samples:,} samples; their indices"):
            BatchPlan(samples, global_batch_size=4, accumulation_steps=1, steps=4, seed=0)
        with pytest.raises(DataError, match="their indices alone take"):
            evaluation_batches(samples, 4, 0, 1)
        with pytest.raises(DataError, match="their indices alone take"):
            split_for_validation(samples, 0.1, 0)
