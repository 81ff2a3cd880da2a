"""Objects of the user's that a session must know of, found among all that this process has."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

WORDS_OF_AVERAGES = ("ema", "average", "averaging", "avg", "polyak", "shadow", "swa", "teacher")
"""Parts of the names of classes and variables that keep averages of weights in lists and dicts."""


@dataclass
class LivingObjects:
    """The objects that there are at one moment. Not to be kept: nothing in it could be freed."""

    schedulers: list[Any] = field(default_factory=list)
    """Schedulers of torch's, and those that are like timm's."""
    modules: list[nn.Module] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)
    """Objects that may hold averages of weights, and are no modules."""
    optimizer_like: list[Any] = field(default_factory=list)
    """Optimizers, and other objects with their methods `step` and `zero_grad`."""


def living_objects() -> LivingObjects:
    """Look through all objects that the garbage collector knows: 0.1 s for half a million."""
    living = LivingObjects()
    nothing: list[Any] = []
    lists: dict[type, list[Any]] = {}
    for item in gc.get_objects():
        kind = type(item)
        found = lists.get(kind)
        if found is None:
            found = lists[kind] = _list_of(kind, living, nothing)
        if found is not nothing:
            found.append(item)
    return living


def _list_of(kind: type, living: LivingObjects, nothing: list[Any]) -> list[Any]:
    """The list that objects of a class belong in."""
    if issubclass(kind, nn.Module):
        return living.modules
    if _is_scheduler(kind):
        return living.schedulers
    if hasattr(kind, "step") and hasattr(kind, "zero_grad") and not issubclass(kind, type):
        return living.optimizer_like
    if is_name_of_average(kind.__name__) and not issubclass(kind, type):
        return living.averages
    return nothing


def is_name_of_average(name: str) -> bool:
    """True for the name of a class or a variable that may be that of an average of weights."""
    lower = name.lower()
    return any(word in lower for word in WORDS_OF_AVERAGES)


def _is_scheduler(kind: type) -> bool:
    """True for classes of schedulers: torch's, and those that are like timm's."""
    if issubclass(kind, LRScheduler):
        return True
    has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    return "Scheduler" in kind.__name__ and has_state and hasattr(kind, "step")


def objects_within(items: Iterable[Any], levels: int) -> Iterator[Any]:
    """Objects, and those that they hold in attributes, lists and dicts, so many levels down.

    Modules, optimizers and tensors are among them, and not what these hold.
    """
    for item in items:
        yield item
        if not levels or isinstance(item, Tensor | nn.Module | Optimizer | str | int | float):
            continue
        if isinstance(item, Mapping):
            yield from objects_within(item.values(), levels - 1)
        elif isinstance(item, list | tuple):
            yield from objects_within(item, levels - 1)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            yield from objects_within(vars(item).values(), levels - 1)
