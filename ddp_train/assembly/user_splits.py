"""The splits of a data set of the user's own class."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddp_train.config.user_code import (
    build_transforms,
    call_of,
    instantiate,
    named_function,
    parameters_of,
)
from ddp_train.data.datasets import BatchSource
from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.sample_stream import is_stream
from ddp_train.data.splits import Splits, split_for_validation
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError, DataError
from ddp_train.options.custom import NOT_TELLING, Code, CustomDataConfig, code_of
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.scored_sets import TEST, VALIDATION, full_name, is_name, key_of_set, kind_of
from ddp_train.text import first_line, shown

TRAIN = "train"
SHUFFLE = "shuffle or draw in the stream itself, within a buffer for instance"
NOT_OF_STREAMS = {
    "data.sampler": SHUFFLE,
    "data.batch_sampler": SHUFFLE,
    "data.weights": SHUFFLE,
    "data.batch_by": "use data.batch_by=samples",
    "data.validation": "use data.validation=0, or name a set by data.splits.validation",
    "data.mixup": "mix in the stream itself, or leave it out",
    "data.cutmix": "mix in the stream itself, or leave it out",
}
"""Keys that need any sample of the training set at any time, and what to do with a stream."""
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
            f"data._target_={data.target}: {signature}{why}; give the arguments of each split:"
            f" {example}"
        ]
    )


def _section_of(name: str) -> str:
    """The key of a split: data, or data.validation_sets.noisy of a further set."""
    if "/" in name:
        return key_of_set(name)
    return "data"


class UserSplits:
    """Opens the splits of a data set of the user's own class."""

    def __init__(
        self,
        data: CustomDataConfig,
        seed: int,
        downloads: bool,
        trains: bool,
        samples_of_run: int | None = None,
        status: RankStatus | None = None,
    ) -> None:
        """Check what the class is called with.

        downloads: whether this process may.
        trains: whether the training set is to train, with its augmentation; else its samples are as
            if scored.
        samples_of_run: those that are read of the training set in all; None if passes are counted.
        status: of this process, to which reading a stream is reported.

        Raises ConfigError.
        """
        self.samples_of_run = samples_of_run
        self.status = status
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
        further: dict[str, BatchSource] = {}
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
            further = self._open_validation()
            validation = further.pop(VALIDATION, None)
        for name in data.named_sets():
            further[name] = self._open_split(name)
        splits = Splits(train, test, validation, numbers=numbers, further=further)
        for scored in (splits.validation_sets | splits.test_sets).values():
            assert isinstance(scored, UserDataset)
            self._refuse_draws(scored)
        return splits

    def _open_validation(self) -> dict[str, BatchSource]:
        """The class's own validation set, or those that it returns in a dict, by their names."""
        made = self._make(VALIDATION)
        if not isinstance(made, Mapping):
            return {VALIDATION: self._wrapped(made)}
        target = f"data._target_={self.data.target}: its validation set is a dict"
        if not made:
            raise ConfigError([f"{target} without a data set; use data.validation=0"])
        for name in made:
            if not is_name(name):
                rule = "must be a name of letters, digits, _ and -"
                raise ConfigError([f"{target}, whose key {shown(name)} {rule}"])
        return {full_name(VALIDATION, name): self._wrapped(made[name]) for name in made}

    def _open_split(self, name: str, augments: bool = False) -> UserDataset:
        """A split with the transforms of samples that are scored."""
        made = self._make(name, augments)
        if isinstance(made, Mapping):
            rule = f"its {name} set is a dict of {', '.join(map(str, made))}"
            remedy = (
                "return one data set; give further ones by data.validation_sets and data.test_sets"
            )
            raise ConfigError([f"data._target_={self.data.target}: {rule}; {remedy}"])
        return self._wrapped(made, is_training_set=name == TRAIN)

    def _wrapped(self, dataset: Any, is_training_set: bool = False) -> UserDataset:
        data = self.data
        if is_stream(dataset):
            dataset = self._numbered(dataset, is_training_set)
        return UserDataset(
            dataset, self.seed, self.test_transforms, data.fields, data.outputs, self.collate
        )

    def _numbered(self, stream: Any, is_training_set: bool) -> NumberedStream:
        """A stream with numbers. Raises ConfigError for keys that need any sample at any time."""
        data = self.data
        name = type(stream).__name__
        problems = []
        for key, remedy in NOT_OF_STREAMS.items():
            value = getattr(data, key.removeprefix("data."))
            if is_training_set and value not in (None, {}, 0.0, "samples"):
                rule = f"{name} is a stream, whose samples come in its own order"
                problems.append(f"{key}={shown(value)}: {rule}; {remedy}")
        if problems:
            raise ConfigError(problems)
        needed = None
        if is_training_set:
            needed = self.samples_of_run
        trains = is_training_set and self.trains
        numbered = NumberedStream(
            stream, self.seed, data.limit, needed, trains=trains, status=self.status
        )
        if len(numbered):
            numbered.check_same_when_begun_again()
        return numbered

    def _make(self, name: str, augments: bool = False) -> Any:
        """The data set of a split or a further set, as its class returns it; it may be a dict."""
        code = self._code(name, augments)
        if not self.downloads and "download" in code.arguments:
            code = replace(code, arguments=code.arguments | {"download": False})
        try:
            # What shuffles itself would else be another one on each process.
            with keyed_generators() as seed:
                # What is drawn must not be the same in each split.
                seed(hash_key(self.seed, "data set", name))
                return instantiate(_section_of(name), code)
        except (ValueError, LookupError, NotImplementedError, RuntimeError, OSError) as error:
            self._explain(name, code.arguments, error)
            raise

    def _code(self, name: str, augments: bool = True) -> Code:
        """The class of a split, or of a further set, with its arguments.

        augments: False for samples that are scored: an `augment` of the class is then False, unless
            it is given for this very split.
        """
        data = self.data
        given = data.named_sets().get(name)
        if given is not None and "_target_" in given:
            code = code_of(given)
            parameters = parameters_of(_section_of(name), code)
            of_split = code.arguments
            common: dict[str, Any] = {}
        else:
            code = data.code
            parameters = self.parameters
            of_split = self._arguments_of_split(name)
            common = data.arguments
        of_split = dict(of_split)
        is_given = name != "train" and "augment" in of_split
        if not augments and "augment" in parameters and not is_given:
            of_split["augment"] = False
        arguments = {**common, **of_split}
        if code.target == SHARDS:  # other fields are not even read
            arguments = {"only": data.fields, **arguments}
        return replace(code, arguments=arguments)

    def _arguments_of_split(self, name: str) -> dict[str, Any]:
        """The arguments that a split has beside the common ones.

        A further set has those of the split of its kind, or of the test set, where it does not
        say otherwise.
        """
        if name in self.by_split:
            return self.by_split[name]
        of_kind = self.by_split.get(kind_of(name), self.by_split[TEST])
        return of_kind | self.data.named_sets()[name]

    def _refuse_same_samples(self) -> None:
        """Raise ConfigError if what trains would also test or validate, by what the class is called
        with: a split that is not named, or not by all that tells it apart, has the defaults of the
        signature."""
        data = self.data
        calls = {}
        for name in (*self.by_split, *data.named_sets()):
            code = self._code(name)
            if code.target != data.target:
                continue
            call = call_of("data", code)
            calls[name] = {key: value for key, value in call.items() if key not in NOT_TELLING}
        for name, call in calls.items():
            if name != "train" and call == calls["train"]:
                raise ConfigError([self._same_samples(name, call)])

    def _same_samples(self, name: str, call: dict[str, Any]) -> str:
        """The message for a split that would be the training set.

        call: what the class would be called with for both.
        """
        key = next((key for key in EXAMPLES if key in self.parameters), "NAME")
        of_train, of_other = EXAMPLES.get(key, ("VALUE", "VALUE"))
        if key == "split":
            of_other = name
        plain = {}
        for argument, value in call.items():
            if not callable(value) and value is not None:
                plain[argument] = value
        if "/" in name:
            section = _section_of(name)
            given = shown(self.data.named_sets()[name])
            rule = f"would have the training samples: the class gets {shown(plain)} for both"
            return f"{section}={given}: {rule}; add {section}.NAME=VALUE, an argument that differs"
        return (
            f"data.splits={shown(self.data.splits)}: the training and the {name} set would have"
            f" the same samples: the class gets {shown(plain)} for both; add"
            f" data.splits.train.{key}={of_train} data.splits.{name}.{key}={of_other}, or another"
            " argument that differs"
        )

    def _explain(self, name: str, arguments: dict[str, Any], error: Exception) -> None:
        """Raise ConfigError or DataError if it is known why a split cannot be opened."""
        target = self.data.target
        cause = f"{type(error).__name__}: {first_line(error)}"
        if "/" in name:
            said = f"{_section_of(name)}: cannot be opened with {shown(arguments)}: {cause}"
            raise DataError(said, "check its arguments") from error
        named_by_us = not self.data.splits and "split" in self.by_split[name]
        if named_by_us and isinstance(error, ValueError | LookupError | NotImplementedError):
            if name == "validation":
                remedy = (
                    "use data.validation=0 for no validation set, or data.validation=0.1 for a"
                    " tenth of the training set"
                )
                raise ConfigError(
                    [f"data._target_={target}: split='validation' failed: {cause}; {remedy}"]
                ) from error
            if name in str(error):
                theirs = "data.splits.train.split=NAME data.splits.test.split=NAME"
                raise ConfigError(
                    [
                        f"data._target_={target}: split='{name}' failed: {cause}; use the names"
                        f" of splits that the class knows: {theirs}"
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
        typed = shlex.quote(f"data.test_transform={shown(rest)}")
        instead = ""
        if any(name.endswith("Crop") for name in names):
            instead = ", with a CenterCrop for the random crop"
        raise ConfigError(
            [
                f"data.{key}={shown(items)}: {' and '.join(names)} would draw random numbers for"
                f" validation and test samples; give these samples their own transforms: {typed}"
                f"{instead}"
            ]
        )
