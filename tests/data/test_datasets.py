"""Data sets that are held in memory: outputs and parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_train.data.datasets import ArraySource, digests
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError, DataError


def test_numbers_in_a_tensor_are_a_regression() -> None:
    source = UserDataset([(torch.zeros(3), torch.tensor(0.5))], seed=0)
    assert source.outputs == 1
    with pytest.raises(ConfigError, match="needs an attribute `classes`"):
        _ = UserDataset([(torch.zeros(3), torch.tensor(1))], seed=0).outputs


def test_a_part_of_a_data_set_keeps_its_classes() -> None:
    source = ArraySource(torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 1, 2, 2]))
    part = source.select(np.arange(3))
    assert (len(part), part.outputs, len(source)) == (3, 3, 6)
    assert part.to(torch.device("cpu")).get_batch(np.array([2]), None)[0].tolist() == [[2.0]]


def test_samples_that_are_not_on_the_cpu_are_named() -> None:
    on_a_device = ArraySource(torch.zeros(4, 2, device="meta"), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match="sample 0 of the data set is on meta") as failure:
        digests(on_a_device)
    assert "data.placement=device" in str(failure.value.remedy)
