"""Classes of your own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.data import DataFacts, mixing_alpha, sample_weights, validation_part
from ddp_train.options.key import key
from ddp_train.options.model import FineTuning, ModelFacts
from ddp_train.options.optimizer import Groups, OptimizerFacts

NOT_TELLING = ("download", "augment", "transform", "transforms", "target_transform")
"""Arguments of data sets that do not say which samples they have."""


@dataclass
class CustomConfig(ModelFacts, DataFacts, OptimizerFacts):
    """Your own class or function: `_target_=package.Name`, and its arguments beside it."""

    name: str = "custom"
    target: str = key(
        "", "dotted path of your own class or function (see SECURITY.md)", may_be_empty=True
    )
    arguments: dict[str, Any] = key({}, "its keyword arguments, plain values")
    metrics: ClassVar[dict[str, str]] = {}

    def code(self) -> Iterator[tuple[str, str]]:
        """The code that it names: each key, and the dotted path there."""
        yield "_target_", self.target

    def values(self) -> dict[str, Any]:
        """The values that this code is called with, by the first part of their keys."""
        return self.arguments

    def all_values(self) -> dict[str, Any]:
        """And those that other code of the section is called with."""
        return self.values()


@dataclass
class CustomModelConfig(FineTuning, CustomConfig):
    """Your own model: `_target_=package.Name`, and its arguments beside it."""


@dataclass
class CustomOptimizerConfig(Groups, CustomConfig):
    """Your own optimizer: `_target_=package.Name`, any class of torch.optim for one, and its
    arguments beside it."""


@dataclass
class CustomDataConfig(CustomConfig):
    """Your own data set: `_target_=package.Name`, and its arguments beside it."""

    limit: int | None = key(None, "use only this many samples of each split", at_least=1)
    validation: float | None = validation_part()
    mixup: float = mixing_alpha("mixup, the weighted mean of")
    cutmix: float = mixing_alpha("CutMix, which exchanges a box between")
    weights: str | None = sample_weights()
    batch_by: str = key(
        "samples",
        "what the global batch counts; tokens: samples of about one length together, by the data's"
        " `lengths`",
        choices=("samples", "tokens"),
    )
    splits: dict[str, Any] = key(
        {},
        "arguments of one split each, {train: {...}, test: {...}}; {}: by `split` or `train` of the"
        " class's signature",
    )
    fields: list[str] = key(
        [], "of samples that are dicts: these become the sample, [image,label]; []: the dict"
    )
    transform: list[Any] = key(
        [], "classes that change a training sample in turn: [{_target_: package.Name, ...}]"
    )
    test_transform: list[Any] | None = key(
        None, "the same for samples that are scored; null: those of data.transform"
    )
    outputs: int | None = key(
        None,
        "outputs that a model needs, the number of classes; null: the data set's own `classes`",
        at_least=1,
    )
    placement: str = key(
        "host",
        "where the data are held; device: whole, by get_batch and to of your class",
        choices=("host", "device"),
    )
    collate_fn: str | None = key(
        None, "package.function from samples to a batch; null: the data set's, or torch's own"
    )

    @property
    def download(self) -> bool:
        arguments = (
            self.arguments,
            *(part for part in self.splits.values() if isinstance(part, dict)),
        )
        return any(part.get("download") is True for part in arguments)

    def in_memory_bytes(self) -> int | None:
        return (
            0 if self.placement == "device" else None
        )  # as small as any; whether it fits, its owner knows

    def writes_files(self) -> bool:
        return self.download or self.target.startswith("ddp_train.data.shards.")

    def code(self) -> Iterator[tuple[str, str]]:
        yield from super().code()
        for name in ("transform", "test_transform"):
            for place, item in enumerate(getattr(self, name) or ()):
                yield from named_code(item, f"{name}[{place}]")
        if self.collate_fn is not None:
            yield "collate_fn", self.collate_fn

    def values(self) -> dict[str, Any]:
        return {**self.arguments, "splits": self.splits}

    def all_values(self) -> dict[str, Any]:
        return {**self.values(), "transform": self.transform, "test_transform": self.test_transform}


def hooks_of(items: list[Any]) -> dict[str, CustomConfig]:
    """The items of `hooks` by their keys, for messages: `hooks=[my_pkg.Hook]`,
    `hooks[1]._target_=my_pkg.Hook`. An item is PATH, or {_target_: PATH, ...} with arguments."""
    found = {}
    for place, item in enumerate(items):
        if isinstance(item, dict):
            arguments = {name: value for name, value in item.items() if name != "_target_"}
            target = str(item.get("_target_", ""))
            found[f"hooks[{place}]._target_={target}"] = CustomConfig(
                target=target, arguments=arguments
            )
        else:
            found[f"hooks=[{item}]"] = CustomConfig(target=str(item))
    return found


def tracker_key(name: str) -> str:
    """The key of a tracker's class, for messages."""
    return f"tracker.classes.{name}"


def trackers_of(classes: dict[str, Any]) -> dict[str, CustomConfig]:
    """The classes of `tracker.classes` by their names, with their arguments."""
    trackers = {}
    for name, value in classes.items():
        values = dict(value) if isinstance(value, dict) else {"_target_": value}
        target = str(values.pop("_target_", ""))
        trackers[name] = CustomConfig(target=target, arguments=values)
    return trackers


def named_code(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The dotted paths in an item of `data.transform`, and where they stand. An item is {_target_:
    PATH, ...}, or PATH alone; its arguments may have such dicts within them."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict) and "_target_" in value:
        yield f"{path}._target_", str(value["_target_"])
    for name, one in nested_code(value, path):
        yield from named_code(one, name)


def nested_code(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The dicts with `_target_` among the arguments of an item, and where they stand."""
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) else ()
    for name, one in items:
        where = f"{path}.{name}"
        if isinstance(one, dict) and "_target_" in one:
            yield where, one
        else:
            yield from nested_code(one, where)
