"""A user's data set and transform, and the splits that a config names."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.data.splits import Splits
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config

V2 = "torchvision.transforms.v2"


PLAIN = {"strategy": {"name": "single"}}


def opened(target: str, seed: int = 0, downloads: bool = True, **keys: Any) -> Splits:
    return open_datasets(Config(data=CustomDataConfig(target=target, **keys), seed=seed), downloads)


def batch(source: Any, *numbers: int, epoch: int | None = 0) -> Any:
    return source.get_batch(np.array(numbers), epoch)


class Rows:
    """Somebody's data set, without `limit`, `transform` or anything else."""

    classes = ("even", "odd")

    def __init__(self, split: str, first: int = 0) -> None:
        if split == "validation":
            raise ValueError("Unknown split 'validation'")
        self.first = first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(self.first + number)), number % 2


class Noise:
    """A transform that draws from all generators which people use; it takes the input alone."""

    def __call__(self, image: Tensor) -> Tensor:
        return image + torch.rand(image.shape) + np.random.rand() + random.random()


def joined(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples]).flatten(), torch.tensor(
        [sample[1] for sample in samples]
    )
