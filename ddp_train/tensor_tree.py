"""Maps and iterates over tensors in nested dicts, lists and tuples: a batch, an optimizer's
state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of the nested dicts, lists and tuples with `change(tensor)` for each tensor; other
    leaves are kept."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(
        value, "_fields"
    ):  # a namedtuple takes its items as separate arguments
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item) for item in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
