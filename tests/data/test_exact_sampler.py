"""ExactSampler: each sample on one process, in the order of a run of the launcher."""

from __future__ import annotations

import pytest

from ddp_train import ExactSampler
from ddp_train.data.batch_plan import BatchPlan


@pytest.mark.parametrize(("samples", "ranks"), [(7, 3), (3, 4), (12, 4), (1, 1)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_sample_is_on_one_process(samples: int, ranks: int, epoch: int) -> None:
    samplers = [ExactSampler(range(samples), ranks, rank, seed=5) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]

    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    order = [shares[place % ranks][place // ranks] for place in range(samples)]
    assert sorted(order) == list(range(samples))
    plan = BatchPlan(samples, global_batch_size=samples, accumulation_steps=1, steps=2, seed=5)
    assert order == plan.global_batch(epoch).tolist(), "the order of a run of the launcher"


@pytest.mark.parametrize(("samples", "ranks"), [(7, 3), (3, 4), (12, 4), (1, 1)])
def test_all_ranks_have_as_many_samples_with_drop_last(samples: int, ranks: int) -> None:
    samplers = [ExactSampler(range(samples), ranks, rank, drop_last=True) for rank in range(ranks)]
    assert {len(list(sampler)) for sampler in samplers} == {samples // ranks}


def test_samples_are_in_order_without_shuffling() -> None:
    assert list(ExactSampler(range(7), 3, 0, shuffle=False)) == [0, 3, 6]


def test_rank_beyond_the_number_of_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=3: must be at least 0 and below num_replicas=3"):
        ExactSampler(range(5), 3, 3)


def test_one_process_needs_no_process_group() -> None:
    sampler = ExactSampler(range(5))
    assert sampler.rank == 0
    assert sampler.num_replicas == 1
