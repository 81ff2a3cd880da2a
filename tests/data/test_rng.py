"""Draws depend on their key and counter alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.data import rng
from ddp_train.data.rng import global_states


def test_a_draw_depends_on_its_key_and_number_alone() -> None:
    numbers = torch.arange(1000)
    together = rng.uniform(5, numbers, 3)
    alone = torch.cat([rng.uniform(5, number[None], 3) for number in numbers[[17, 500, 999]]])
    assert torch.equal(together[[17, 500, 999]], alone)
    assert not torch.equal(together, rng.uniform(6, numbers, 3))


def test_bits_are_splitmix64() -> None:
    """Against the reference generator (prng.di.unimi.it/splitmix64.c) in plain Python integers."""

    def reference(state: int) -> int:
        mask = (1 << 64) - 1
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    start = rng.hash_key(42)
    expected = [
        reference((start + n * 0x9E3779B97F4A7C15) & (1 << 64) - 1) & (1 << 63) - 1
        for n in range(50)
    ]
    assert rng.hash_bits(42, torch.arange(50)).tolist() == expected


def test_uniform_numbers_are_uniform() -> None:
    draws = rng.uniform(1, torch.arange(100_000), 2)
    assert draws.min() >= 0 and draws.max() < 1
    # standard error of the mean: 0.29 / sqrt(200,000) = 0.00065
    assert abs(draws.mean() - 0.5) < 0.004 and abs(draws.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(draws.T)[0, 1]) < 0.015


def test_an_order_is_a_permutation_and_each_epoch_has_its_own() -> None:
    orders = [rng.order(rng.hash_key(0, "order", epoch), 1433) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1433))
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])


def test_keys_do_not_collide_by_adding_up() -> None:
    keys = {rng.hash_key(seed, "augment", epoch) for seed in range(50) for epoch in range(50)}
    assert len(keys) == 2500
    assert rng.hash_key(1, 2) != rng.hash_key(2, 1)


@pytest.mark.parametrize(
    "which, draw", [(0, lambda: torch.rand(1)), (1, np.random.rand), (2, random.random)]
)
def test_a_draw_is_seen_in_the_state_of_its_own_generator(which: int, draw: Any) -> None:
    """numpy keeps a position beside its 624 words: they change once in 624 draws."""
    before = global_states()
    for _ in range(2):
        draw()
        after = global_states()
        assert [one != other for one, other in zip(before, after, strict=True)] == [
            i == which for i in range(3)
        ]
        before = after
