"""The data set that a config names: what trains, what tests, and what validates if anything does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddp_train.config.options.custom import CustomDataConfig
from ddp_train.config.schema import Config
from ddp_train.config.user_code import build_transforms, instantiate, named_function, parameters_of
from ddp_train.data.augment import Erasing
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.datasets import ArraySource, build_datasets
from ddp_train.data.image_folder import FolderSource
from ddp_train.data.own import UserDataset
from ddp_train.data.sample_facts import training_weights
from ddp_train.data.splits import Splits, parted
from ddp_train.distributed.process_group import same_everywhere
from ddp_train.errors import ConfigError, DataError
from ddp_train.text import first_line, shown

LAUNCHERS_OWN = ("name", "placement", "limit", "validation", "weights", "mixup", "cutmix", "random_erasing")
"""Keys of a data set that are no arguments of its builder."""
SPLIT_BY_SPLIT = "data.splits.train.NAME=VALUE data.splits.test.NAME=VALUE"


def open_datasets(config: Config, downloads: bool = True) -> Splits:
    """downloads: whether this process may; another of its host has done so if not. Raises DataError or ConfigError."""
    data, seed = config.data, config.seed
    is_own = isinstance(data, CustomDataConfig)
    splits, whole = _OwnData(data, seed, downloads).opened() if is_own else _built_in(data, seed)
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


def arguments_of_splits(data: CustomDataConfig, parameters: list[str]) -> dict[str, dict[str, Any]]:
    """What the user's class is called with for each split, beside the arguments that all have; no entry: there is none.

    parameters: of the class. Raises ConfigError if nothing says what tells the splits apart.
    """
    if data.splits:
        return {name: data.splits.get(name, {}) for name in ("train", "test", *data.splits)}
    if "split" in parameters and "split" not in data.arguments:  # else it means something else, as in EMNIST
        return {name: {"split": name} for name in ("train", "test", "validation")}
    if "train" in parameters and "train" not in data.arguments:
        return {"train": {"train": True}, "test": {"train": False}}
    example = "data.splits.train.root=PATH data.splits.test.root=PATH" if "root" in parameters else SPLIT_BY_SPLIT
    signature = f"{data.target.rpartition('.')[2]}({', '.join(parameters)})"
    given = [f"data.{name}={shown(data.arguments[name])}" for name in ("split", "train") if name in data.arguments]
    why = f": {' and '.join(given)} would hold for all splits" if given else " has neither `split` nor `train`"
    raise ConfigError(
        [f"data._target_={data.target}: {signature}{why}; say what the arguments of each split are: {example}"]
    )


class _OwnData:
    """The splits of the user's own class."""

    def __init__(self, data: CustomDataConfig, seed: int, downloads: bool) -> None:
        self.data, self.seed, self.downloads = data, seed, downloads
        self.parameters = parameters_of("data", data)
        self.arguments = arguments_of_splits(data, self.parameters)
        self.transforms = build_transforms("data.transform", data.transform)
        self.test_transforms = self.transforms
        if data.test_transform is not None:
            self.test_transforms = build_transforms("data.test_transform", data.test_transform)
        self.collate = named_function("data.collate_fn", data.collate_fn) if data.collate_fn else None

    def opened(self) -> tuple[Splits, int]:
        """And the number of samples of the training set, before it is parted or limited."""
        data = self.data
        train = self.split("train").transformed(self.transforms)
        test, validation, whole = self.split("test"), None, len(train)
        if data.validation:
            kept, taken = parted(len(train), data.validation, self.seed)
            plain = self.split("train", augment=False) if "augment" in self.parameters else train
            train, validation = train.select(kept), plain.transformed(self.test_transforms).select(taken)
        elif data.validation is None and "validation" in self.arguments:
            validation = self.split("validation")
        for scored in (test, validation):
            if scored is not None:
                self.refuse_draws(scored)
        return Splits(train, test, validation).limited(data.limit), whole

    def split(self, name: str, **more: Any) -> UserDataset:
        """A split as it is scored. more: further arguments of the class."""
        data = self.data
        arguments = {**data.arguments, **self.arguments[name], **more}
        if not self.downloads and "download" in arguments:
            arguments["download"] = False
        try:
            made = instantiate("data", replace(data, arguments=arguments))
        except (ValueError, LookupError, NotImplementedError, RuntimeError, OSError) as error:
            self.explain(name, arguments, error)
            raise
        return UserDataset(made, self.seed, self.test_transforms, data.fields, data.outputs, self.collate)

    def explain(self, name: str, arguments: dict[str, Any], error: Exception) -> None:
        """Raises ConfigError or DataError if it is known why a split cannot be opened."""
        named_by_us = not self.data.splits and "split" in self.arguments[name]
        target, cause = self.data.target, f"{type(error).__name__}: {first_line(error)}"
        if named_by_us and isinstance(error, ValueError | LookupError | NotImplementedError):
            if name == "validation":
                remedy = "use data.validation=0, or data.validation=0.1 for a part of the training set"
                raise ConfigError([f"data._target_={target}: split='validation' failed: {cause}; {remedy}"]) from error
            if name in str(error):
                theirs = "data.splits.train.split=NAME data.splits.test.split=NAME"
                raise ConfigError(
                    [f"data._target_={target}: split='{name}' failed: {cause}; use its own names: {theirs}"]
                ) from error
        if target.startswith("torchvision."):
            could = "download" in self.parameters and not arguments.get("download")
            remedy = "check its arguments" + ("; add data.download=true" if could else "")
            raise DataError(f"data._target_={target}: {cause}", remedy) from error

    def refuse_draws(self, source: UserDataset) -> None:
        """Raises ConfigError if the transforms of a split that is scored draw random numbers."""
        if not (drawing := source.drawing()):
            return
        data, key = self.data, "transform" if self.data.test_transform is None else "test_transform"
        items = getattr(data, key)
        drawn = [items[place] for place in drawing]
        names = [item if isinstance(item, str) else item["_target_"] for item in drawn]
        rest = [item for place, item in enumerate(items) if place not in drawing]
        raise ConfigError(
            [
                f"data.{key}={shown(items)}: {' and '.join(names)} would draw random numbers for samples that are "
                f"scored; say what those get: data.test_transform={shown(rest)}"
            ]
        )


def plan_digests(plan: BatchPlan, device: str) -> dict[str, str]:
    """Of the weights, or lengths, that decide which samples a batch has. Raises PeerError if the processes read
    different ones: each would compute its part of another batch."""
    found = plan.digests()
    for name, digest in found.items():
        what, number = f"a digest of the samples' {name}", int(digest[:15], 16)
        same_everywhere(number, device, what, "give all hosts the same files")
    return found
