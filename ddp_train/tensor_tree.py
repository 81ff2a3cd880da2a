"""Tensors in what code of users hands on: a batch, the outputs of a model, an optimizer's state.

They lie in dicts, lists and tuples, in other containers of these kinds, and in attributes of
objects: dataclasses, the batches of libraries, classes of a user's own.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (tuple, list, dict)
SEQUENCES = (list, tuple, deque, set, frozenset)
LEAVES = (
    *(str, bytes, bytearray, int, float, complex, type(None), np.ndarray, np.generic, Enum),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module),
    *(torch.device, torch.dtype, torch.Generator),
)
"""Types that are not searched: they hold no tensors of a batch."""

Change = Callable[[Tensor], Any]
ChangeObject = Callable[[Any, Callable[[Any], Any]], Any]
"""An object, and the function that changes what it holds -> the changed object."""


def tensors(value: Any, in_objects: bool = True) -> Iterator[Tensor]:
    """All tensors, in order.

    in_objects: those in attributes too, not those in dicts, lists and tuples alone.
    """
    if isinstance(value, Tensor):
        yield value
    elif type(value) in PLAIN:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item, in_objects)
    else:
        for _, tensor in named_tensors(value, in_objects):
            yield tensor


def named_tensors(value: Any, in_objects: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All tensors, in order, each with where it lies, as code would have it: `.x`, `[0]['ids']`."""
    yield from _tensors_in("", value, in_objects, {})


def holds_tensors(value: Any) -> bool:
    """True if a value is a tensor or holds one."""
    return any(True for _ in tensors(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return attributes


def set_attribute(value: Any, name: str, part: Any) -> None:
    """Set an attribute past what the class says: it may be frozen, or note what is set."""
    own = getattr(value, "__dict__", {})
    if name in own:
        own[name] = part
    else:
        object.__setattr__(value, name, part)


def has_items(value: Any) -> bool:
    """True for a mapping that holds its items itself; others have them in an attribute."""
    return isinstance(value, dict) or (isinstance(value, Mapping) and not attributes_of(value))


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A copy of a mapping of any type whose values are others."""
    if type(mapping) is dict:
        return items
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]
    clone = copy.copy(mapping)
    for key, item in items.items():
        clone[key] = item
    return clone


def with_members(sequence: Any, members: list[Any]) -> Any:
    """A list, tuple or set of the type of another one."""
    make = getattr(type(sequence), "_make", type(sequence))  # that of a namedtuple
    return make(members)


def with_changed_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of an object of any type with `change(part)` for each of its parts; without tensors
    in it the object itself."""
    if not holds_tensors(value):
        return value
    if has_items(value):
        clone = with_items(value, {key: change(item) for key, item in value.items()})
    elif isinstance(value, SEQUENCES):
        clone = with_members(value, [change(item) for item in value])
    else:
        clone = copy.copy(value)
    # Those of the copy: an object may have its own way to be copied.
    for name, part in attributes_of(clone).items():
        changed = change(part)
        if changed is not part:
            set_attribute(clone, name, changed)
    return clone


def map_tensors(
    change: Change, value: Any, change_object: ChangeObject = with_changed_parts
) -> Any:
    """A copy with `change(tensor)` for each tensor; objects that hold none stay the same.

    change_object: what becomes of an object that is not a plain dict, list or tuple;
        `with_changed_parts` makes a copy of it.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(change, item, change_object) for item in value])
    if kind is dict:
        return {key: map_tensors(change, item, change_object) for key, item in value.items()}
    if isinstance(value, LEAVES):
        return value
    return _ObjectWalk(change, change_object)(value)


class _ObjectWalk:
    """The part of `map_tensors` in one object, where what comes twice is changed once."""

    def __init__(self, change: Change, change_object: ChangeObject) -> None:
        self.change = change
        self.change_object = change_object
        self.done: dict[int, tuple[Any, Any]] = {}
        """By the ids of objects: each, so that its id does not come again, and what it became."""

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._once(value, self.change)
        if kind is tuple or kind is list:
            return kind([self(item) for item in value])
        if kind is dict:
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, LEAVES):
            return value
        return self._once(value, lambda value: self.change_object(value, self))

    def _once(self, value: Any, change: Callable[[Any], Any]) -> Any:
        known = self.done.get(id(value))
        if known is not None:
            return known[1]
        self.done[id(value)] = value, value  # for an object that holds itself
        changed = change(value)
        self.done[id(value)] = value, changed
        self.done[id(changed)] = changed, changed
        return changed


def _tensors_in(
    path: str, value: Any, in_objects: bool, seen: dict[int, Any]
) -> Iterator[tuple[str, Tensor]]:
    """See `named_tensors`. seen: the objects that were met, by their ids."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, LEAVES):
        return
    is_plain = type(value) in PLAIN
    if not is_plain:
        if id(value) in seen:
            return
        seen[id(value)] = value
    met: set[int] = set()  # a container may have its tensors as attributes too
    for suffix, item in _items_of(value):
        for place, tensor in _tensors_in(path + suffix, item, in_objects, seen):
            met.add(id(tensor))
            yield place, tensor
    if is_plain or not in_objects:
        return
    for name, part in attributes_of(value).items():
        for place, tensor in _tensors_in(f"{path}.{name}", part, in_objects, seen):
            if id(tensor) not in met:
                yield place, tensor


def _items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, each with the way to it; none of another object."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            # Numbers of a tensor are not printed: each would be fetched from its GPU.
            shown = type(key).__name__ if isinstance(key, Tensor) else repr(key)
            yield f"[{shown}]", item
    elif isinstance(value, SEQUENCES):
        for place, item in enumerate(value):
            yield f"[{place}]", item
