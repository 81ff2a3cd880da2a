"""What a session says of its steps: sums over batches that every process had, draws by rank."""

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
from ddp_train.sessions.steps import DrawsOfStep, ScoreWatch


def test_sum_over_batches_of_a_test_loader_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    with watch.scoring():
        watch.see_score()
    watch.see_sum(processes=2)
    assert not caplog.records


def test_sum_over_other_batches_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    for _ in range(2):
        watch.see_score()
        watch.see_sum(processes=2)
    assert caplog.text.count("the sum counts them 2 times") == 1


def test_one_process_may_sum_what_it_likes(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    watch.see_score()
    watch.see_sum(processes=1)
    assert not caplog.records


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
