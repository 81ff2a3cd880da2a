"""The data set that a config names: what trains, what tests, and what validates if anything does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddp_train.config.schema import Config
from ddp_train.config.user_code import instantiate, parameters_of
from ddp_train.data.augment import Erasing
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.datasets import ArraySource, UserDataset, build_datasets
from ddp_train.data.image_folder import FolderSource
from ddp_train.data.sample_facts import training_weights
from ddp_train.data.splits import Splits, parted
from ddp_train.distributed.process_group import same_everywhere
from ddp_train.errors import ConfigError

LAUNCHERS_OWN = ("name", "placement", "limit", "validation", "weights", "mixup", "cutmix", "random_erasing")
"""Keys of a data set that are no arguments of its builder."""


def open_datasets(config: Config) -> Splits:
    """Raises DataError or ConfigError."""
    data, seed = config.data, config.seed
    splits, whole = _own_datasets(data, seed) if data.name == "custom" else _built_in(data, seed)
    if not data.weights:
        return splits
    trains = parted(whole, data.validation, seed)[0] if data.validation else np.arange(whole)
    weights = training_weights(data.weights, splits.train, trains[: len(splits.train)], whole)
    return splits._replace(weights=weights)


def _built_in(data: Any, seed: int) -> tuple[Splits, int]:
    """And the number of samples of the training set, before it is parted or limited."""
    arguments = {name: value for name, value in vars(data).items() if name not in LAUNCHERS_OWN}
    train, test = build_datasets(data.name, seed, **arguments)
    if data.random_erasing:
        assert isinstance(train, ArraySource | FolderSource), "only images have the key"
        train.erasing = Erasing(data.random_erasing, seed)
    validation, whole = None, len(train)
    if data.validation:
        kept, taken = parted(len(train), data.validation, seed)
        train, validation = train.select(kept), train.select(taken)
    return Splits(train, test, validation).limited(data.limit), whole


def _own_datasets(data: Any, seed: int) -> tuple[Splits, int]:
    """Likewise. Of the user's own class: by its `split`, "train", "validation" and "test", or else by its `train`."""
    parameters = parameters_of("data", data)
    by_split = "split" in parameters and "split" not in data.arguments  # else it means something else, as in EMNIST

    def opened(split: str, section: Any = data) -> UserDataset:
        which = {"split": split} if by_split else {"train": split == "train"}
        return UserDataset(instantiate("data", section, **which), seed)

    train, test, validation = opened("train"), opened("test"), None
    whole = len(train)
    if data.validation:
        kept, taken = parted(len(train), data.validation, seed)
        plain = train
        if "augment" in parameters:
            plain = opened("train", replace(data, arguments={**data.arguments, "augment": False}))
        train, validation = train.select(kept), plain.select(taken)
    elif data.validation is None and by_split:
        try:
            validation = opened("validation")
        except (ValueError, LookupError, NotImplementedError) as error:
            problem = f"data._target_={data.target}: split='validation' failed: {type(error).__name__}: {error}"
            remedy = "use data.validation=0, or data.validation=0.1 for a part of the training set"
            raise ConfigError([f"{problem}; {remedy}"]) from error
    return Splits(train, test, validation), whole


def plan_digests(plan: BatchPlan, device: str) -> dict[str, str]:
    """Of the weights, or lengths, that decide which samples a batch has. Raises PeerError if the processes read
    different ones: each would compute its part of another batch."""
    found = plan.digests()
    for name, digest in found.items():
        what, number = f"a digest of the samples' {name}", int(digest[:15], 16)
        same_everywhere(number, device, what, "give all hosts the same files")
    return found
