"""Buffers that are not the same on all processes."""

from __future__ import annotations

import torch
from torch import nn

from ddp_train.distributed.buffers_of_ranks import (
    buffers_apart,
    is_batch_norm_apart,
    is_statistic,
    whole_numbers_apart,
)
from ddp_train.distributed.world import World
from tests.support.ranks import on_ranks


def test_buffers_that_each_process_fills_alone_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("codes", torch.zeros(3))
    model[1].register_buffer("scale", torch.ones(1))
    alike = torch.zeros(2, 8)  # mean and variance of the norm, codes, scale
    alike[:, 7] = torch.nan
    others = alike.clone()
    others[1, 0] = 1.0
    assert buffers_apart(model, alike) == []
    others[1, 6] = 1.0
    mean, codes = buffers_apart(model, others)
    assert [mean.name, codes.name] == ["0.running_mean", "1.codes"]
    assert is_statistic(mean) and not is_statistic(codes)
    assert is_batch_norm_apart(mean) and not is_batch_norm_apart(codes)
    assert buffers_apart(nn.Linear(1, 1), torch.empty(3, 0)) == []


def test_statistics_of_another_rounding_are_the_same() -> None:
    of_ranks = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0 + 1e-6, 3.0, 4.0]]).double()
    (mean,) = buffers_apart(nn.BatchNorm1d(2), of_ranks)
    assert not is_batch_norm_apart(mean)


def names_of_whole_numbers_apart(world: World) -> list[str]:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].num_batches_tracked.fill_(world.rank)
    model[1].register_buffer("counts", torch.arange(4))
    model[1].register_buffer("place", torch.tensor(world.rank, dtype=torch.int32))
    model[1].register_buffer("seen", torch.tensor([True, world.rank == 2]))
    model[1].register_buffer("none", torch.empty(0, dtype=torch.int64))
    model[1].register_buffer("mean", torch.full((2,), float(world.rank)))
    return whole_numbers_apart(model, "cpu")


def test_whole_numbers_that_differ_are_named_but_for_counts_of_norms() -> None:
    for names in on_ranks(3, names_of_whole_numbers_apart):
        assert names == ["1.place", "1.seen"]
