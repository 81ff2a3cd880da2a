"""The data set that a config names: what trains, what tests, and what validates if anything
does."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ddp_train.config.user_code import (
    build_transforms,
    call_of,
    instantiate,
    named_function,
    parameters_of,
)
from ddp_train.data.augmentation import Erasing
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.datasets import ArraySource, BatchSource, digests
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.sample_facts import training_weights
from ddp_train.data.splits import Splits, split_for_validation
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.process_group import from_all_ranks, same_everywhere
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.options.custom import NOT_TELLING, CustomDataConfig
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config
from ddp_train.text import first_line, shown

log = logging.getLogger(__name__)

LAUNCHERS_OWN = (
    "name",
    "placement",
    "limit",
    "validation",
    "weights",
    "mixup",
    "cutmix",
    "random_erasing",
)
"""Keys of a data set that are no arguments of its builder."""
SHARDS = "ddp_train.data.shards.TarShards"
SAME_FILES = (
    "give all hosts the same files; a data set of your own that draws numbers, or goes through a"
    " set, when it is made needs a generator with a fixed seed, and sorted()"
)
SPLIT_BY_SPLIT = "data.splits.train.NAME=VALUE data.splits.test.NAME=VALUE"


def open_datasets(config: Config, downloads: bool = True) -> Splits:
    """downloads: whether this process may; another of its host has done so if not. Raises DataError
    or ConfigError."""
    data = config.data
    seed = config.seed
    is_own = isinstance(data, CustomDataConfig)
    trains = not config.uses_trained
    splits, whole = (
        _OwnData(data, seed, downloads, trains).opened() if is_own else _built_in(data, seed)
    )
    if not data.weights or not trains:
        return splits
    chosen = (
        split_for_validation(whole, data.validation, seed)[0]
        if data.validation
        else np.arange(whole)
    )
    weights = training_weights(data.weights, splits.train, chosen[: len(splits.train)], whole)
    return splits._replace(weights=weights)


def _built_in(data: Any, seed: int) -> tuple[Splits, int]:
    """And the number of samples of the training set, before it is parted or limited."""
    arguments = {name: value for name, value in vars(data).items() if name not in LAUNCHERS_OWN}
    open_splits = implementation_of(data.implementation)
    train, test = open_splits(seed=seed, **arguments)
    if data.random_erasing:
        assert isinstance(train, ArraySource | FolderSource), "only images have the key"
        train.erasing = Erasing(data.random_erasing, seed)
    validation = None
    whole = len(train)
    numbers = {}
    if data.validation:
        kept, taken = split_for_validation(len(train), data.validation, seed)
        train, validation, numbers = (
            train.select(kept),
            train.select(taken),
            {"train": kept, "validation": taken},
        )
    return Splits(train, test, validation, numbers=numbers).limited(data.limit), whole


def arguments_of_splits(data: CustomDataConfig, parameters: list[str]) -> dict[str, dict[str, Any]]:
    """What the user's class is called with for each split, beside the arguments that all have; no
    entry: there is none.

    parameters: of the class. Raises ConfigError if nothing says what tells the splits apart.
    """
    if data.splits:
        return {name: data.splits.get(name, {}) for name in ("train", "test", *data.splits)}
    if (
        "split" in parameters and "split" not in data.arguments
    ):  # else it means something else, as in EMNIST
        return {name: {"split": name} for name in ("train", "test", "validation")}
    if "train" in parameters and "train" not in data.arguments:
        return {"train": {"train": True}, "test": {"train": False}}
    if "root" in parameters:
        example = "data.splits.train.root=PATH data.splits.test.root=PATH"
    else:
        example = SPLIT_BY_SPLIT
    signature = f"{data.target.rpartition('.')[2]}({', '.join(parameters)})"
    given = [
        f"data.{name}={shown(data.arguments[name])}"
        for name in ("split", "train")
        if name in data.arguments
    ]
    if given:
        why = f": {' and '.join(given)} would hold for all splits"
    else:
        why = " has neither `split` nor `train`"
    raise ConfigError(
        [
            f"data._target_={data.target}: {signature}{why}; say what the arguments of each split"
            f" are: {example}"
        ]
    )


class _OwnData:
    """The splits of the user's own class."""

    def __init__(self, data: CustomDataConfig, seed: int, downloads: bool, trains: bool) -> None:
        """trains: whether the training set is to train, with its augmentation; else its samples are
        as if scored."""
        self.data = data
        self.seed = seed
        self.downloads = downloads
        self.trains = trains
        self.parameters = parameters_of("data", data.code)
        self.arguments = arguments_of_splits(data, self.parameters)
        self.refuse_same_samples()
        self.transforms = build_transforms("data.transform", data.transform)
        self.test_transforms = self.transforms
        if data.test_transform is not None:
            self.test_transforms = build_transforms("data.test_transform", data.test_transform)
        self.collate = (
            named_function("data.collate_fn", data.collate_fn) if data.collate_fn else None
        )

    def opened(self) -> tuple[Splits, int]:
        """And the number of samples of the training set, before it is parted or limited."""
        data = self.data
        train = self.split("train", augments=self.trains)
        train = train.transformed(self.transforms) if self.trains else train
        test = self.split("test", augments=False)
        validation = None
        whole = len(train)
        numbers = {}
        if data.validation:
            kept, taken = split_for_validation(len(train), data.validation, self.seed)
            plain = self.split("train", augments=False) if "augment" in self.parameters else train
            train = train.select(kept)
            validation = plain.transformed(self.test_transforms).select(taken)
            numbers = {"train": kept, "validation": taken}
        elif data.validation is None and "validation" in self.arguments:
            validation = self.split("validation", augments=False)
        for scored in (test, validation):
            if scored is not None:
                self.refuse_draws(scored)
        return Splits(train, test, validation, numbers=numbers).limited(data.limit), whole

    def called_with(self, name: str, augments: bool = True) -> dict[str, Any]:
        """The arguments of a split. augments: False for samples that are scored: an `augment` of
        the class is then False, unless it is given for this very split."""
        data = self.data
        of_split = dict(self.arguments[name])
        if (
            not augments
            and "augment" in self.parameters
            and (name == "train" or "augment" not in of_split)
        ):
            of_split["augment"] = False
        only = {"only": data.fields} if data.target == SHARDS else {}  # others are not even read
        return {**only, **data.arguments, **of_split}

    def refuse_same_samples(self) -> None:
        """Raises ConfigError if what trains would also test or validate, by what the class is
        called with: a split that is not named, or not by all that tells it apart, has the defaults
        of the signature."""
        data = self.data
        calls = {}
        for name in self.arguments:
            called = call_of("data", replace(data.code, arguments=self.called_with(name)))
            calls[name] = {key: value for key, value in called.items() if key not in NOT_TELLING}
        for name, call in calls.items():
            if name != "train" and call == calls["train"]:
                theirs = {
                    "train": ("true", "false"),
                    "split": ("train", name),
                    "root": ("PATH", "PATH"),
                }
                key = next((key for key in theirs if key in self.parameters), "NAME")
                one, other = theirs.get(key, ("VALUE", "VALUE"))
                plain = {
                    key: value
                    for key, value in call.items()
                    if not callable(value) and value is not None
                }
                raise ConfigError(
                    [
                        f"data.splits={shown(data.splits)}: training and {name} set would be the"
                        f" same samples, with {shown(plain)}; add data.splits.train.{key}={one}"
                        f" data.splits.{name}.{key}={other}, or what else tells them apart"
                    ]
                )

    def split(self, name: str, augments: bool = True) -> UserDataset:
        """A split as it is scored."""
        data = self.data
        arguments = self.called_with(name, augments)
        if not self.downloads and "download" in arguments:
            arguments["download"] = False
        try:
            with (
                keyed_generators() as seed
            ):  # what shuffles itself would else be another one on each process
                seed(
                    hash_key(self.seed, "data set", name)
                )  # of each split: what is drawn must not be the same
                made = instantiate("data", replace(data.code, arguments=arguments))
        except (ValueError, LookupError, NotImplementedError, RuntimeError, OSError) as error:
            self.explain(name, arguments, error)
            raise
        return UserDataset(
            made, self.seed, self.test_transforms, data.fields, data.outputs, self.collate
        )

    def explain(self, name: str, arguments: dict[str, Any], error: Exception) -> None:
        """Raises ConfigError or DataError if it is known why a split cannot be opened."""
        named_by_us = not self.data.splits and "split" in self.arguments[name]
        target = self.data.target
        cause = f"{type(error).__name__}: {first_line(error)}"
        if named_by_us and isinstance(error, ValueError | LookupError | NotImplementedError):
            if name == "validation":
                remedy = (
                    "use data.validation=0, or data.validation=0.1 for a part of the training set"
                )
                raise ConfigError(
                    [f"data._target_={target}: split='validation' failed: {cause}; {remedy}"]
                ) from error
            if name in str(error):
                theirs = "data.splits.train.split=NAME data.splits.test.split=NAME"
                raise ConfigError(
                    [
                        f"data._target_={target}: split='{name}' failed: {cause}; use its own"
                        f" names: {theirs}"
                    ]
                ) from error
        if target.startswith("torchvision."):
            could = "download" in self.parameters and not arguments.get("download")
            remedy = "check its arguments" + ("; add data.download=true" if could else "")
            raise DataError(f"data._target_={target}: {cause}", remedy) from error

    def refuse_draws(self, source: UserDataset) -> None:
        """Raises ConfigError if the transforms of a split that is scored draw random numbers."""
        if not (drawing := source.transforms_that_draw()):
            return
        data = self.data
        key = "transform" if self.data.test_transform is None else "test_transform"
        items = getattr(data, key)
        drawn = [items[place] for place in drawing]
        names = [item if isinstance(item, str) else item["_target_"] for item in drawn]
        rest = [item for place, item in enumerate(items) if place not in drawing]
        raise ConfigError(
            [
                f"data.{key}={shown(items)}: {' and '.join(names)} would draw random numbers for"
                f" samples that are scored; say what those get: data.test_transform={shown(rest)}"
            ]
        )


def common_digests(sources: Splits, read: BatchSource, device: str) -> dict[str, str]:
    """The digests of `read`, the split that trains or is scored, as `data.datasets.digests` gives
    them. One all-gather.

    Raises PeerError if not all processes read the same one, and splits of the same sizes: each
    would compute its part of another batch.
    """
    found = digests(read)
    numbers = {}
    for name, source in (
        ("training", sources.train),
        ("validation", sources.validation),
        ("test", sources.test),
    ):
        numbers[f"the size of the {name} set"] = 0 if source is None else len(source)
    last = "a digest of the samples"
    numbers[last] = int(hashlib.sha256("".join(found.values()).encode()).hexdigest()[:15], 16)
    of_ranks = from_all_ranks(torch.tensor(list(numbers.values()), device=device)).T.tolist()
    for what, theirs in zip(numbers, of_ranks, strict=True):
        if len(set(theirs)) == 1:
            continue
        if (
            what == last
            and from_all_ranks(torch.tensor(int(digests(read) != found), device=device)).any()
        ):
            # drawn with a generator of its own, other samples each time: nothing can be compared
            break
        shown = [f"{number:x}"[:8] if what == last else f"{number:,}" for number in theirs]
        table = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(shown))
        raise PeerError(f"{what} is not the same for all processes ({table})", SAME_FILES)
    return found


def scored_digests(sources: Splits, then: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Those of the sets that are scored, by their names. Warns of one that has changed. then: of a
    checkpoint; none of an older one, or at the beginning."""
    sets = {
        name: source
        for name in ("validation", "test")
        if (source := sources.named(name)) is not None
    }
    found = {}
    for name, source in sets.items():
        try:
            found[name] = now = digests(source)
        except Exception as error:  # noqa: BLE001  its evaluation tells it, which may be far away, or never come
            log.info("the %s set was not compared with that of the checkpoint: %r", name, error)
            continue
        before = then.get(name, now)
        if before != now and digests(source) == now:  # else it draws other samples each time
            what = f"{now['count']} samples, not {before.get('count')}"
            what = what if now["count"] != before.get("count") else "other samples"
            log.warning(
                "the %s set has changed since the checkpoint: %s; scores before and after differ",
                name,
                what,
            )
    return found


def plan_digests(plan: BatchPlan, device: str) -> dict[str, str]:
    """Of the weights, or lengths, that decide which samples a batch has. Raises PeerError if the
    processes read different ones: each would compute its part of another batch."""
    found = plan.digests()
    for name, digest in found.items():
        what = f"a digest of the samples' {name}"
        number = int(digest[:15], 16)
        same_everywhere(number, device, what, SAME_FILES)
    return found
