"""The reader of a batch: it has a target for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.assembly.batches import loader_options
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Loader
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.tasks.builtin import Classification, Segmentation
from ddp_train.tasks.user_task import complete
from tests.support.jobs import config_of
from tests.support.task_samples import Returns


@pytest.mark.parametrize("kept", [[0, 2], [0, 1, 2, 0, 1, 2]])
def test_collate_function_that_drops_samples_is_refused(kept: list[int]) -> None:
    data = [(torch.ones(2), number % 2) for number in range(6)]

    def other(samples: list[Any]) -> Any:
        inputs, labels = zip(*(samples[number] for number in kept), strict=True)
        return torch.stack(inputs), torch.tensor(labels)

    source = UserDataset(data, 0, outputs=2, collate=other)
    plan = [MicroBatch(0, 0, np.arange(3), 3, 1.0, True)]
    for task, refused in (
        (Classification(), True),
        (Segmentation(), False),
        (complete(Returns(None)), False),
    ):
        loader = Loader(source, plan, "cpu", loader_options(config_of(World()), task))
        if refused:
            with pytest.raises(
                DataError, match=f"a batch of 3 samples has {len(kept)} targets"
            ) as caught:
                next(iter(loader))
            assert "let collate_fn return one target for each sample" in caught.value.remedy
        else:
            assert len(next(iter(loader)).data[1]) == len(kept)
