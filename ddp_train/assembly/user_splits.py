"""The splits of a data set of the user's own class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddp_train.config.user_code import (
    build_transforms,
    call_of,
    instantiate,
    named_function,
    parameters_of,
)
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.splits import Splits, split_for_validation
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError, DataError
from ddp_train.options.custom import NOT_TELLING, CustomDataConfig
from ddp_train.text import first_line, shown

SHARDS = "ddp_train.data.shards.TarShards"
EXAMPLES = {"train": ("true", "false"), "split": ("train", "test"), "root": ("PATH", "PATH")}
"""Parameters of classes that tell splits apart, with what they are for training and test."""


def arguments_of_splits(data: CustomDataConfig, parameters: list[str]) -> dict[str, dict[str, Any]]:
    """The arguments of the user's class for each split, beside those that all have; no entry: there
    is no such split.

    parameters: of the class.

    Raises ConfigError if nothing says what tells the splits apart.
    """
    if data.splits:
        return {name: data.splits.get(name, {}) for name in ("train", "test", *data.splits)}
    # If they are given, they mean something else, as in EMNIST.
    if "split" in parameters and "split" not in data.arguments:
        return {name: {"split": name} for name in ("train", "test", "validation")}
    if "train" in parameters and "train" not in data.arguments:
        return {"train": {"train": True}, "test": {"train": False}}
    example = "data.splits.train.NAME=VALUE data.splits.test.NAME=VALUE"
    if "root" in parameters:
        example = "data.splits.train.root=PATH data.splits.test.root=PATH"
    signature = f"{data.target.rpartition('.')[2]}({', '.join(parameters)})"
    given = [
        f"data.{name}={shown(data.arguments[name])}"
        for name in ("split", "train")
        if name in data.arguments
    ]
    why = " has neither `split` nor `train`"
    if given:
        why = f": {' and '.join(given)} would hold for all splits"
    raise ConfigError(
        [
            f"data._target_={data.target}: {signature}{why}; say what the arguments of each split"
            f" are: {example}"
        ]
    )


class UserSplits:
    """Opens the splits of a data set of the user's own class."""

    def __init__(self, data: CustomDataConfig, seed: int, downloads: bool, trains: bool) -> None:
        """Check what the class is called with.

        downloads: whether this process may.
        trains: whether the training set is to train, with its augmentation; else its samples are as
            if scored.

        Raises ConfigError.
        """
        self.data = data
        self.seed = seed
        self.downloads = downloads
        self.trains = trains
        self.parameters = parameters_of("data", data.code)
        self.by_split = arguments_of_splits(data, self.parameters)
        self._refuse_same_samples()
        self.transforms = build_transforms("data.transform", data.transform)
        self.test_transforms = self.transforms
        if data.test_transform is not None:
            self.test_transforms = build_transforms("data.test_transform", data.test_transform)
        self.collate = None
        if data.collate_fn:
            self.collate = named_function("data.collate_fn", data.collate_fn)

    def open(self) -> Splits:
        """The splits. Raises ConfigError or DataError."""
        data = self.data
        train = self._open_split("train", augments=self.trains)
        if self.trains:
            train = train.transformed(self.transforms)
        test = self._open_split("test")
        validation = None
        numbers = {}
        if data.validation:
            kept, taken = split_for_validation(len(train), data.validation, self.seed)
            plain = train
            if "augment" in self.parameters:
                plain = self._open_split("train")
            train = train.select(kept)
            validation = plain.transformed(self.test_transforms).select(taken)
            numbers = {"train": kept, "validation": taken}
        elif data.validation is None and "validation" in self.by_split:
            validation = self._open_split("validation")
        for scored in (test, validation):
            if scored is not None:
                self._refuse_draws(scored)
        return Splits(train, test, validation, numbers=numbers)

    def _open_split(self, name: str, augments: bool = False) -> UserDataset:
        """A split with the transforms of samples that are scored."""
        data = self.data
        arguments = self._arguments(name, augments)
        if not self.downloads and "download" in arguments:
            arguments["download"] = False
        try:
            # What shuffles itself would else be another one on each process.
            with keyed_generators() as seed:
                # What is drawn must not be the same in each split.
                seed(hash_key(self.seed, "data set", name))
                dataset = instantiate("data", replace(data.code, arguments=arguments))
        except (ValueError, LookupError, NotImplementedError, RuntimeError, OSError) as error:
            self._explain(name, arguments, error)
            raise
        return UserDataset(
            dataset, self.seed, self.test_transforms, data.fields, data.outputs, self.collate
        )

    def _arguments(self, name: str, augments: bool = True) -> dict[str, Any]:
        """The arguments of a split.

        augments: False for samples that are scored: an `augment` of the class is then False, unless
            it is given for this very split.
        """
        data = self.data
        of_split = dict(self.by_split[name])
        is_given = name != "train" and "augment" in of_split
        if not augments and "augment" in self.parameters and not is_given:
            of_split["augment"] = False
        arguments = {**data.arguments, **of_split}
        if data.target == SHARDS:  # other fields are not even read
            arguments = {"only": data.fields, **arguments}
        return arguments

    def _refuse_same_samples(self) -> None:
        """Raise ConfigError if what trains would also test or validate, by what the class is called
        with: a split that is not named, or not by all that tells it apart, has the defaults of the
        signature."""
        data = self.data
        calls = {}
        for name in self.by_split:
            call = call_of("data", replace(data.code, arguments=self._arguments(name)))
            calls[name] = {key: value for key, value in call.items() if key not in NOT_TELLING}
        for name, call in calls.items():
            if name == "train" or call != calls["train"]:
                continue
            key = next((key for key in EXAMPLES if key in self.parameters), "NAME")
            of_train, of_other = EXAMPLES.get(key, ("VALUE", "VALUE"))
            if key == "split":
                of_other = name
            plain = {
                key: value
                for key, value in call.items()
                if not callable(value) and value is not None
            }
            raise ConfigError(
                [
                    f"data.splits={shown(data.splits)}: training and {name} set would be the"
                    f" same samples, with {shown(plain)}; add data.splits.train.{key}={of_train}"
                    f" data.splits.{name}.{key}={of_other}, or what else tells them apart"
                ]
            )

    def _explain(self, name: str, arguments: dict[str, Any], error: Exception) -> None:
        """Raise ConfigError or DataError if it is known why a split cannot be opened."""
        target = self.data.target
        cause = f"{type(error).__name__}: {first_line(error)}"
        named_by_us = not self.data.splits and "split" in self.by_split[name]
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
            remedy = "check its arguments"
            if "download" in self.parameters and not arguments.get("download"):
                remedy += "; add data.download=true"
            raise DataError(f"data._target_={target}: {cause}", remedy) from error

    def _refuse_draws(self, source: UserDataset) -> None:
        """Raise ConfigError if the transforms of a split that is scored draw random numbers."""
        drawing = source.transforms_that_draw()
        if not drawing:
            return
        key = "transform" if self.data.test_transform is None else "test_transform"
        items = getattr(self.data, key)
        drawn = [items[place] for place in drawing]
        names = [item if isinstance(item, str) else item["_target_"] for item in drawn]
        rest = [item for place, item in enumerate(items) if place not in drawing]
        raise ConfigError(
            [
                f"data.{key}={shown(items)}: {' and '.join(names)} would draw random numbers for"
                f" samples that are scored; say what those get: data.test_transform={shown(rest)}"
            ]
        )
