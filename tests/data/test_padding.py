"""Padded batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_train.data.padding import padded
from ddp_train.errors import DataError


def test_padding_counts_as_no_token() -> None:
    batch = padded([torch.tensor([5, 6, 7]), np.array([8]), [3, 2]], padding_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9], [3, 2, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100], [3, 2, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    given = padded(
        [
            {"input_ids": [1, 2], "labels": [-100, 2], "kind": [4, 4]},
            {"input_ids": [3], "labels": [3], "kind": [5]},
        ]
    )
    assert given["labels"].tolist() == [[-100, 2], [3, -100]] and given["kind"].tolist() == [
        [4, 4],
        [5, 0],
    ]
    with pytest.raises(DataError, match="a sample has 2 input_ids, but 1 labels"):
        padded([{"input_ids": [1, 2], "labels": [2]}])
    with pytest.raises(DataError, match=r"input_ids of a sample has the shape \[1, 2\]"):
        padded([{"input_ids": [[1, 2]]}])
