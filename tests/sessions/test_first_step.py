"""Draws by rank in the first step of a session."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ddp_train import noise_like
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.sessions.first_step import DrawsOfStep


@pytest.mark.parametrize(
    ("draw", "are_by_rank"),
    [
        (lambda: noise_like(torch.zeros(2, 3)), False),
        (lambda: torch.rand(1), True),
        (np.random.rand, True),
        (random.random, True),
    ],
)
def test_draws_by_rank_are_told_from_keyed_noise(
    draw: Callable[[], object], are_by_rank: bool
) -> None:
    seed_step = StepSeed(0, 1, "cpu")
    draws = DrawsOfStep(seed_step)
    seed_step(4)
    draws.begin(4)
    with TrainingStep(share=MicroBatch(0, 4, np.arange(2), 2, 1.0, True)):
        draw()
    assert draws.are_by_rank() is are_by_rank
