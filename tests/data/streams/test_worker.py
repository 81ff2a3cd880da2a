"""Batches that loader processes send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ddp_train.data.streams.worker import check_can_be_sent
from ddp_train.errors import DataError
from tests.support.batch_types import batch_of


def test_batches_of_many_types_can_be_sent() -> None:
    batch: dict[str, Any] = batch_of(2)
    for name in ("read only", "graphs"):  # they cannot be pickled
        with pytest.raises(DataError, match="a batch cannot be sent from a loader process"):
            check_can_be_sent(batch.pop(name))
    check_can_be_sent(batch)


def test_a_class_inside_of_a_function_cannot_be_sent() -> None:
    """torch would wait for ever: the thread that sends it ends."""

    @dataclass
    class Inside:
        rows: torch.Tensor

    with pytest.raises(DataError, match="Can't pickle local object"):
        check_can_be_sent(Inside(torch.ones(2)))
