"""Why the score of an evaluation is not finite: a sample of the data, or the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import evaluation_batches
from ddp_train.distributed.world import World
from ddp_train.engine.non_finite_data import cause_of_non_finite_score
from ddp_train.tasks.score import OF_THE_MODEL
from tests.support.ranks import on_ranks


def batches(rank: int, ranks: int, inputs: Tensor, targets: Tensor) -> list[Batch]:
    return [
        Batch((inputs[batch.indices], targets[batch.indices]), batch)
        for batch in evaluation_batches(len(inputs), 4, rank, ranks)
    ]


def spoilt(place: str) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.zeros(20, 3), torch.zeros(20)
    if place == "target":
        targets[[7, 13]] = torch.nan
    if place == "input":
        inputs[11, 2] = torch.inf
    return inputs, targets


EXPECTED = {
    "target": "the target of sample 7 of that data set is not finite",
    "input": "the input of sample 11 of that data set is not finite",
    "nothing": OF_THE_MODEL,
}


@pytest.mark.parametrize("place", EXPECTED)
def test_the_first_sample_is_named(place: str) -> None:
    assert cause_of_non_finite_score(batches(0, 1, *spoilt(place)), "cpu") == EXPECTED[place]


def causes(world: World) -> list[str]:
    return [
        cause_of_non_finite_score(batches(world.rank, world.size, *spoilt(place)), "cpu")
        for place in EXPECTED
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_all_ranks_name_the_same_sample(ranks: int) -> None:
    assert on_ranks(ranks, causes) == [list(EXPECTED.values())] * ranks


def test_tokens_have_no_such_number() -> None:
    (batch,) = evaluation_batches(3, 4, 0, 1)
    found = cause_of_non_finite_score([Batch(torch.tensor(np.arange(3)), batch)], "cpu")
    assert found == OF_THE_MODEL
