"""Batches of samples of about one length."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.length_batches import ALIKE, LengthBatches, even_cuts
from tests.support.jobs import micro_batches_of


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    tokens=st.integers(40, 400),
    accumulation=st.integers(1, 3),
)
def test_batches_by_length_hold_each_sample_once(
    lengths: list[int], tokens: int, accumulation: int
) -> None:
    of = np.array(lengths)
    batches = LengthBatches(np.array(lengths), tokens)
    steps = 2 * batches.steps
    plans = {
        world: [
            BatchPlan(len(of), tokens, accumulation, steps, 7, rank, world, lengths=batches)
            for rank in range(world)
        ]
        for world in range(1, 6)
    }
    plan = plans[1][0]
    seen = 0
    for step in range(plan.steps):
        batch = plan.global_batch(step)
        assert (
            plan.samples_seen(step) == seen
            and len(batch) * of[batch].max() <= tokens
            and len(batch)
        )
        assert (of[batch][:-1] >= of[batch][1:]).all()
        seen += len(batch)
        for world, ranks in plans.items():
            mine = micro_batches_of(ranks, step)
            passes = len(mine) // world
            assert (
                len(mine) == passes * world
                and [one.is_last for one in mine] == ([False] * (passes - 1) + [True]) * world
            )
            assert sorted(np.concatenate([one.indices[: one.num_real] for one in mine])) == sorted(
                batch
            )
            assert sum(one.scale * one.num_real for one in mine) / world == pytest.approx(
                1, abs=1e-12
            )
            assert all(len(one.indices) for one in mine), "a process without samples has a stand-in"
            assert sum(one.num_real == 0 for one in mine) == max(0, len(mine) - len(batch))
            most = max(one.num_real * of[one.indices].max() for one in mine)
            assert (
                most
                <= -(-len(batch) // len(mine)) * of[batch].max()
                <= tokens / len(mine) + of[batch].max()
            )
    assert plan.samples_seen(plan.steps) == seen == 2 * len(of)
    for epoch in range(2):
        numbers = [plan.global_batch(epoch * batches.steps + step) for step in range(batches.steps)]
        assert sorted(np.concatenate(numbers)) == list(range(len(of)))


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), parts=st.integers(1, 4))
def test_no_cut_has_a_smaller_largest_part(lengths: list[int], parts: int) -> None:
    lengths.sort(reverse=True)

    def largest(cuts: list[int]) -> int:
        return max(
            (end - start) * lengths[start] for start, end in itertools.pairwise(cuts) if end > start
        )

    cuts = even_cuts(np.array(lengths), parts)
    assert (
        cuts[0] == 0
        and cuts[-1] == len(lengths)
        and cuts == sorted(cuts)
        and len(cuts) == parts + 1
    )
    within = itertools.combinations_with_replacement(range(len(lengths) + 1), parts - 1)
    assert largest(cuts) == min(largest([0, *inner, len(lengths)]) for inner in within)
    if len(lengths) >= parts:
        assert len(set(cuts)) == len(cuts), "no part is empty"


def test_samples_of_about_one_length_meet_others_in_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, 3_000)
    batches = LengthBatches(lengths, 4_000)
    plan = BatchPlan(3_000, 4_000, 1, 3 * batches.steps, 0, lengths=batches)
    of_epoch = [
        [plan.global_batch(step) for step in range(e * batches.steps, (e + 1) * batches.steps)]
        for e in (0, 1)
    ]
    spread = [1 - lengths[batch].min() / lengths[batch].max() for batch in of_epoch[0]]
    assert np.mean(np.array(spread) <= ALIKE) > 0.9, (
        "but for the shortest, of which few fill a bucket"
    )
    tokens = sum(len(batch) * lengths[batch].max() for batch in of_epoch[0])
    assert lengths.sum() / tokens > 1 - batches.padding > 0.93
    assert tokens / (batches.steps * 4_000) > 0.9, "batches are full"
    together = [{frozenset(batch.tolist()) for batch in epoch} for epoch in of_epoch]
    assert len(together[0] & together[1]) <= 1, "other samples stand together in each epoch"
    first = [[lengths[batch].max() for batch in epoch] for epoch in of_epoch]
    assert (
        abs(np.corrcoef(first[0], np.arange(len(first[0])))[0, 1]) < 0.2 and first[0] != first[1]
    ), "batches are shuffled"
    assert not any(plan.is_full(step) for step in range(plan.steps)), "so none is captured"
