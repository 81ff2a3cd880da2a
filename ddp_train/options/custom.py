"""Classes and functions of your own: `_target_=package.Name`, with arguments beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ddp_train.options.data_keys import (
    batch_sampler,
    drop_last,
    mixing_alpha,
    named_test_sets,
    named_validation_sets,
    sample_weights,
    sampler,
    validation_part,
)
from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RequestedRun,
    ScheduleConfig,
    TaskConfig,
)
from ddp_train.scored_sets import in_order
from ddp_train.text import did_you_mean, shown

NAME = "custom"
"""The option that is code of your own, in every group that has one."""
NOT_TELLING = ("download", "augment", "transform", "transforms", "target_transform")
"""Arguments of data sets that do not say which samples they have."""
SPLITS = ("train", "validation", "test")
TORCH_SCHEDULERS = "torch.optim.lr_scheduler"
FUNCTIONS_OF_SCHEDULERS = ("lr_lambda", "scale_fn")
"""Arguments of torch's schedulers that are functions: their dotted paths stand there."""
ARGUMENTS = "{ARGUMENT: ...} of your class, or {_target_: package.Name, ARGUMENT: ...}"


@dataclass(frozen=True)
class Code:
    """A class or function of your own, and what it is called with."""

    target: str
    """Its dotted path."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, plain values."""


@dataclass
class CustomOption:
    """The keys of every option that is code of your own."""

    target: str = key(
        "", "dotted path of your own class or function, whose code then runs", may_be_empty=True
    )
    arguments: dict[str, Any] = key({}, "keyword arguments of that class or function, plain values")
    name: str = NAME
    is_custom: ClassVar[bool] = True

    @property
    def code(self) -> Code:
        """The class or function that `_target_` names."""
        return Code(self.target, self.arguments)

    def paths(self) -> Iterator[tuple[str, str]]:
        """The dotted paths of code: each with the key that names it."""
        yield "_target_", self.target

    def values(self) -> dict[str, Any]:
        """The values that the class is called with, by their keys below the section."""
        return self.arguments

    def all_values(self) -> dict[str, Any]:
        """The values that any code of the section is called with."""
        return self.values()


@dataclass
class CustomTaskConfig(CustomOption, TaskConfig):
    """Your own task: `_target_=package.Name`, and its arguments beside it."""


@dataclass
class CustomModelConfig(CustomOption, ModelConfig):
    """Your own model: `_target_=package.Name`, and its arguments beside it."""


@dataclass
class CustomOptimizerConfig(CustomOption, OptimizerConfig):
    """Your own optimizer: `_target_=package.Name`, and its arguments beside it.

    Any class of torch.optim may be named too.
    """

    def group_rules(self) -> dict[str, Mapping[str, Any]] | None:
        return None  # only the worker knows which arguments the class takes

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        implementation = run.config.tuning.optimizer
        if implementation != "default":
            yield Problem(
                f"tuning.optimizer={implementation}",
                f"has no effect on optimizer._target_={self.target}",
                "use tuning.optimizer=default and the class's own arguments, for example"
                " optimizer.foreach=true",
            )
        yield from super().problems(run)
        if self.layer_decay is not None and "lr" not in self.arguments:
            yield Problem(
                f"optimizer.layer_decay={self.layer_decay:g}",
                "multiplies optimizer.lr, which is not set",
                "add optimizer.lr=0.001",
            )


@dataclass
class CustomScheduleConfig(CustomOption, ScheduleConfig):
    """Your own schedule: `_target_=package.Name`, and its arguments beside it.

    A scheduler of torch.optim.lr_scheduler, or a function of (step, steps) that returns a factor.
    """

    interval: str = key(
        "step",
        "when a scheduler steps: after each optimizer step, or after each epoch; a scheduler"
        " that follows a metric always steps after each evaluation",
        choices=("step", "epoch"),
    )
    metric: str = key(
        "auto",
        "the metric that ReduceLROnPlateau follows, validation.NAME or test.NAME; auto: the loss"
        " of the validation set, or of the test set if there is none",
    )

    def paths(self) -> Iterator[tuple[str, str]]:
        yield from super().paths()
        yield from paths_in_scheduler(self.arguments)

    def values(self) -> dict[str, Any]:
        return {}  # schedulers may stand within schedulers: `paths` has all of their code

    def all_values(self) -> dict[str, Any]:
        return self.arguments

    def notices(self, run: RequestedRun) -> Iterator[str]:
        module, _, name = self.target.rpartition(".")
        looks_at_metric = name == "ReduceLROnPlateau"
        if looks_at_metric and self.interval != "step":
            yield (
                f"schedule.interval={self.interval} has no effect: {name} makes a step after each"
                " evaluation"
            )
        if module == TORCH_SCHEDULERS and not looks_at_metric and self.metric != "auto":
            yield f"schedule.metric={self.metric} has no effect: {name} does not use a metric"

    @property
    def cycles_momentum(self) -> bool:
        """Whether it is one of torch's that change the momentum beside the learning rate."""
        names = {path.rpartition(".")[2] for _, path in self.paths()}
        keeps = self.arguments.get("cycle_momentum") is False
        return bool(names & {"OneCycleLR", "CyclicLR"}) and not keeps


def paths_in_scheduler(arguments: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The dotted paths among the arguments of a scheduler, those of schedulers within it too, each
    after its place."""
    if isinstance(arguments, list):
        for number, item in enumerate(arguments):
            yield from paths_in_scheduler(item, f"{place}[{number}]")
    elif isinstance(arguments, dict):
        for name, value in arguments.items():
            where = f"{place}.{name}".lstrip(".")
            is_path = name == "_target_" or name in FUNCTIONS_OF_SCHEDULERS
            paths = [value] if isinstance(value, str) else value
            if is_path and isinstance(paths, list):
                yield from ((where, path) for path in paths if isinstance(path, str))
            yield from paths_in_scheduler(value, where)


@dataclass
class CustomDataConfig(CustomOption, DataConfig):
    """Your own data set: `_target_=package.Name`, and its arguments beside it."""

    limit: int | None = key(None, "use only this many samples of each split", at_least=1)
    validation: float | None = validation_part()
    mixup: float = mixing_alpha("mixup, the weighted mean of")
    cutmix: float = mixing_alpha("CutMix, which exchanges a box between")
    weights: str | None = sample_weights()
    sampler: dict[str, Any] = sampler()
    batch_sampler: dict[str, Any] = batch_sampler()
    drop_last: bool = drop_last()
    batch_by: str = key(
        "samples",
        "what train.global_batch_size counts; tokens: a batch has samples of similar length, by"
        " the attribute `lengths` of the data set",
        choices=("samples", "tokens"),
    )
    splits: dict[str, Any] = key(
        {},
        "arguments of your class for each split, {train: {...}, test: {...}}; {}: the class is"
        " called with its argument `split` or `train`",
    )
    validation_sets: dict[str, Any] = named_validation_sets(ARGUMENTS)
    test_sets: dict[str, Any] = named_test_sets(ARGUMENTS)
    fields: list[str] = key(
        [],
        "for samples that are dicts: the keys whose values become the sample,"
        " [image,label]; []: the sample stays a dict",
    )
    transform: list[Any] = key(
        [], "transforms of a training sample, in their order: [{_target_: package.Name, ...}]"
    )
    test_transform: list[Any] | None = key(
        None, "transforms of a sample of a validation or test set; null: those of data.transform"
    )
    outputs: int | None = key(
        None,
        "number of outputs of the model, for example of classes; null: by the attribute"
        " `classes` of the data set",
        at_least=1,
    )
    placement: str = key(
        "host",
        "where the data are held; device: all samples on the GPU, by the methods get_batch and"
        " to of your class",
        choices=("host", "device"),
    )
    collate_fn: str | None = key(
        None,
        "package.function that makes a batch of a list of samples; null: the data set's"
        " collate_fn, or torch's default",
    )

    @property
    def download(self) -> bool:
        calls = [self.arguments, *self.splits.values(), *self.named_sets().values()]
        return any(call.get("download") is True for call in calls if isinstance(call, dict))

    def in_memory_bytes(self) -> int | None:
        if self.placement == "device":
            return 0  # as small as any: its owner knows whether it fits
        return None

    def has_validation(self) -> bool | None:
        if "validation" in self.splits or self.validation_sets:
            return True
        if self.validation is None:
            return None
        return self.validation > 0

    def sets(self) -> list[str] | None:
        if "validation" in self.splits:
            return in_order(["validation", "test", *self.named_sets()])
        if self.validation is None:
            return None
        return super().sets()

    def writes_files(self) -> bool:
        return self.download or self.target.startswith("ddp_train.data.shards.")

    def paths(self) -> Iterator[tuple[str, str]]:
        yield from super().paths()
        for name, items in self._transforms().items():
            for place, item in enumerate(items):
                yield from paths_in(item, f"{name}[{place}]")
        for key_of_set, given in self.sets_by_key().items():
            if isinstance(given, dict) and "_target_" in given:
                yield f"{key_of_set.removeprefix('data.')}._target_", str(given["_target_"])
        if self.collate_fn is not None:
            yield "collate_fn", self.collate_fn

    def _transforms(self) -> dict[str, list[Any]]:
        return {"transform": self.transform, "test_transform": self.test_transform or []}

    def values(self) -> dict[str, Any]:
        values = {**self.arguments, "splits": self.splits}
        for key_of_set, given in self.sets_by_key().items():
            if isinstance(given, dict):  # its class may be named, and only there
                given = {name: value for name, value in given.items() if name != "_target_"}
            values[key_of_set.removeprefix("data.")] = given
        return values

    def all_values(self) -> dict[str, Any]:
        return {**self.values(), **self._transforms()}

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from super().problems(run)
        if run.config.mode == "export":  # it reads no data
            return
        wrong = list(self._split_problems())
        yield from wrong
        if self.splits and not wrong:
            yield from self._same_split_problems()
        yield from self._validation_problems()
        for key_of_set, given in self.sets_by_key().items():
            if not isinstance(given, dict):
                found = f"{key_of_set}={shown(given)}"
                rule = "must be the arguments of the set"
                yield Problem(found, rule, f"use {key_of_set}.NAME=VALUE")
        for name, items in self._transforms().items():
            for place, item in enumerate(items):
                if not is_named_code(item):
                    example = "{_target_:torchvision.transforms.v2.RandomCrop,size:28}"
                    yield Problem(
                        f"data.{name}[{place}]={shown(item)}",
                        "must be a class with its arguments",
                        f"use 'data.{name}=[{example}]'",
                    )

    def _split_problems(self) -> Iterator[Problem]:
        for name, part in self.splits.items():
            found = f"data.splits.{name}={shown(part)}"
            if name not in SPLITS:
                guess = did_you_mean(name, list(SPLITS))
                yield Problem(found, f"the splits are {', '.join(SPLITS)}{guess}")
            elif not isinstance(part, dict):
                yield Problem(
                    found, "must be arguments of your class", f"use data.splits.{name}.NAME=VALUE"
                )

    def _same_split_problems(self) -> Iterator[Problem]:
        """A split whose arguments are those of the training set, but for what tells nothing."""

        def telling(name: str) -> dict[str, Any]:
            given = self.splits.get(name, {}).items()
            return {argument: value for argument, value in given if argument not in NOT_TELLING}

        others = dict.fromkeys(("test", *self.splits))
        for name in others:
            if name != "train" and telling(name) == telling("train"):
                yield Problem(
                    f"data.splits={shown(self.splits)}",
                    f"the training and the {name} set would have the same samples",
                    f"use data.splits.train.NAME=VALUE data.splits.{name}.NAME=VALUE with"
                    " different values",
                )
                return

    def _validation_problems(self) -> Iterator[Problem]:
        if "validation" not in self.splits or self.validation is None:
            return
        if self.validation:
            instead = "leave one of them out"
        else:
            instead = "leave out data.splits.validation"
        yield Problem(
            f"data.validation={self.validation:g}",
            "contradicts data.splits.validation, which gives the validation set",
            instead,
        )


def is_named_code(item: Any) -> bool:
    """Tell whether an item is PATH, or {_target_: PATH, ...}."""
    return isinstance(item, str) or (
        isinstance(item, dict) and isinstance(item.get("_target_"), str)
    )


def code_of(item: Any) -> Code:
    """The code that an item of a list names. item: PATH, or {_target_: PATH, ARGUMENT: ...}."""
    if not isinstance(item, dict):
        return Code(str(item))
    arguments = {name: value for name, value in item.items() if name != "_target_"}
    return Code(str(item.get("_target_", "")), arguments)


def hooks_of(items: list[Any]) -> dict[str, Code]:
    """The items of `hooks` by their keys, for messages.

    As `hooks=[my_pkg.Hook]` or `hooks[1]._target_=my_pkg.Hook`.

    items: see `code_of`.
    """
    hooks = {}
    for place, item in enumerate(items):
        code = code_of(item)
        key = f"hooks=[{code.target}]"
        if isinstance(item, dict):
            key = f"hooks[{place}]._target_={code.target}"
        hooks[key] = code
    return hooks


def tracker_key(name: str) -> str:
    """The key of a tracker's class, for messages."""
    return f"tracker.classes.{name}"


def trackers_of(classes: dict[str, Any]) -> dict[str, Code]:
    """The classes of `tracker.classes` by their names, with their arguments."""
    return {name: code_of(item) for name, item in classes.items()}


def paths_in(item: Any, place: str) -> Iterator[tuple[str, str]]:
    """The dotted paths in an item of `data.transform`, each after the place where it stands.

    item: PATH, or {_target_: PATH, ...}; its arguments may have such dicts within them.
    """
    if isinstance(item, str):
        yield place, item
    elif isinstance(item, dict) and "_target_" in item:
        yield f"{place}._target_", str(item["_target_"])
    for inner_place, inner in nested_code(item, place):
        yield from paths_in(inner, inner_place)


def nested_code(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The dicts with `_target_` among the arguments of an item, each after its place."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return
    for name, inner in items:
        where = f"{place}.{name}"
        if isinstance(inner, dict) and "_target_" in inner:
            yield where, inner
        else:
            yield from nested_code(inner, where)
