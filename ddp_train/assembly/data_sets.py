"""The data set that a config names: what trains, what tests, and what validates if anything
does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_train.assembly.arguments import arguments_of
from ddp_train.assembly.user_splits import UserSplits
from ddp_train.data.augmentation import Erasing
from ddp_train.data.datasets import ArraySource
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.sample_facts import training_weights
from ddp_train.data.splits import Splits, split_for_validation
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.scored_sets import key_of_set

BESIDE_ARGUMENTS = (
    "placement",
    "limit",
    "validation",
    "weights",
    "sampler",
    "batch_sampler",
    "drop_last",
    "mixup",
    "cutmix",
    "random_erasing",
    "validation_sets",
    "test_sets",
)
"""Keys of a data set that are not arguments of the function that opens it."""


LOOKED_AT = 32
"""Samples of the training set of which a run that does not train looks at some."""


def open_datasets(
    config: Config, downloads: bool = True, status: RankStatus | None = None
) -> Splits:
    """The splits of the data set that a config names.

    downloads: whether this process may; another of its host has done so if not.
    status: of this process, to which reading a stream is reported.

    Raises DataError or ConfigError.
    """
    data = config.data
    trains = not config.uses_trained
    if isinstance(data, CustomDataConfig):
        needed = _samples_of_run(config)
        whole = UserSplits(data, config.seed, downloads, trains, needed, status).open()
    else:
        whole = _open_built_in(data, config.seed)
    splits = whole.limited(data.limit)
    if not data.weights or not trains:
        return splits
    samples = len(whole.train)
    numbers = np.arange(samples)
    if whole.numbers:  # a part of the training set validates
        samples = sum(map(len, whole.numbers.values()))
        numbers = whole.numbers["train"]
    numbers = numbers[: len(splits.train)]
    weights = training_weights(data.weights, splits.train, numbers, samples)
    return splits._replace(weights=weights)


def _samples_of_run(config: Config) -> int | None:
    """The samples that are read of the training set in all; None if its passes are counted."""
    train = config.train
    if config.mode == "predict" and config.predict.split == "train":
        return None
    if config.uses_trained:
        return LOOKED_AT
    if train.most_epochs is None and train.max_steps:
        return train.max_steps * train.global_batch_size
    return None


def _open_built_in(data: Any, seed: int) -> Splits:
    open_splits = implementation_of(data.implementation)
    arguments = arguments_of(data, *BESIDE_ARGUMENTS)
    train, test = open_splits(seed=seed, **arguments)
    further = {}
    for name, given in data.named_sets().items():
        open_set = implementation_of(data.set_implementation)
        further[name] = open_set(f"{key_of_set(name)}={given}", given, train, **arguments)
    if data.random_erasing:
        assert isinstance(train, ArraySource | FolderSource), "only images have the key"
        train.erasing = Erasing(data.random_erasing, seed)
    if not data.validation or train is test:
        return Splits(train, test, further=further)
    kept, taken = split_for_validation(len(train), data.validation, seed)
    numbers = {"train": kept, "validation": taken}
    validation = train.select(taken)
    return Splits(train.select(kept), test, validation, numbers=numbers, further=further)
