"""Any map-style data set, whose draws are keyed and whose errors name the sample."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ddp_train.data import rng
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import DataError
from ddp_train.resilience.failure import failure_from
from ddp_train.resilience.heartbeat import RankStatus


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(3), 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "data._target_: list has no samples"),
        (Stream(), "Stream has no __getitem__ or no __len__"),
        (
            [(object(), 0)],
            "cannot be put into one batch: default_collate: batch must contain tensors",
        ),
        (
            [(torch.zeros(3), 0), (torch.zeros(2), 0)],
            "samples of list cannot be put into one batch: stack expects",
        ),
    ],
    ids=["empty", "iterable", "object", "shapes"],
)
def test_what_is_no_data_set_is_told(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        UserDataset(dataset, 0).get_batch(np.arange(len(dataset)), None)


class Spoilt(torch.utils.data.Dataset):
    """A foreign dataset one of whose samples raises."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number == 3:
            raise ValueError("bad row")
        return torch.zeros(2), 0


class Noisy(torch.utils.data.Dataset):
    """A foreign dataset that draws from torch's and Python's global generators."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.rand(2) + random.random(), number % 2


def test_a_foreign_dataset_that_raises_is_told_with_the_sample() -> None:
    with pytest.raises(ValueError, match="bad row") as caught:
        UserDataset(Spoilt(), 0).get_batch(np.array([2, 3]), 0)
    detail = failure_from(caught.value, 0, RankStatus(), Path("log"), "").detail
    assert detail == "ValueError: bad row (sample 3 of Spoilt)"


def test_draws_of_a_foreign_data_set_are_keyed() -> None:
    source = UserDataset(Noisy(), seed=3)
    torch.manual_seed(0)
    expected_next = torch.rand(1)
    torch.manual_seed(0)
    together = source.get_batch(np.array([1, 2, 3]), 0)[0]
    assert torch.equal(torch.rand(1), expected_next)
    assert torch.equal(source.get_batch(np.array([2]), 0)[0][0], together[1])
    assert not torch.equal(source.get_batch(np.array([2]), 1)[0][0], together[1])
    assert source.outputs == 2


def test_draws_are_those_of_torch_manual_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = rng.hash_key(3, "augment", 0, 2)
    torch.manual_seed(key)
    random.seed(key)
    expected = Noisy()[2][0]
    monkeypatch.setattr(
        traceback, "format_stack", lambda *_: pytest.fail("torch noted a stack for a device")
    )
    assert torch.equal(UserDataset(Noisy(), seed=3).get_batch(np.array([2]), 0)[0][0], expected)
