"""States as checkpoints have them: plain data, which is read again without running code."""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pickle import PicklingError, UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.errors import StateError

PLAIN_DATA = (
    "use only tensors, numbers and texts, in dicts and lists, for no code runs when a checkpoint"
    " is read; convert arrays by torch.as_tensor, and keep functions out of the state"
)
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device, torch.layout),
}
"""Types that a checkpoint gives back as they are; of others it is tried."""
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)


def plain_state(state: Any, owner: str) -> Any:
    """A state as a checkpoint takes it: numbers of numpy become Python's, of the same value.

    The state itself if all is plain in it.

    owner: what has it, for the message: `the state_dict of best`.

    Raises StateError for what no checkpoint could give back.
    """
    if _way_to_other(state) is None:
        return state
    plain = _with_python_numbers(state)
    problem = _problem_of(plain)
    if problem:
        raise StateError(f"{owner} is not plain data: {problem}", PLAIN_DATA)
    return plain


def plain_extra_state(name: str, value: Any) -> Any:
    """A value of a model's state_dict: a tensor, or what `get_extra_state` of a module returned,
    see `plain_state`.

    name: its name there.
    """
    if isinstance(value, Tensor):
        return value
    return plain_state(value, f"the result of get_extra_state for {name}")


def problem_of_state(state: Any) -> str:
    """Why no checkpoint could be read with a state: the place of what is no plain data, and its
    type; "" if one could."""
    return _problem_of(_with_python_numbers(state))


def problem_of_extra_state(model: nn.Module) -> str:
    """Check what `get_extra_state` of a model's modules returns.

    Returns why a checkpoint with it could not be read again; "" if it could.
    """
    for name, value in model.state_dict().items():
        try:
            plain_extra_state(name, value)
        except StateError as error:
            return str(error)
    return ""


def _problem_of(state: Any) -> str:
    way = _way_to_other(state)
    if way is None:
        return ""
    *keys, other = way
    place = "".join(f"[{key!r}]" for key in keys)
    return f"{place or 'it'} is a {type(other).__name__}"


def _way_to_other(value: Any) -> list[Any] | None:
    """The keys that lead to the first part that is no plain data, and that part; None without."""
    kind = type(value)
    if kind in _LEAVES:
        return None
    if kind in _MAPPINGS:
        return _way_in_mapping(value)
    if kind in _SEQUENCES:
        for place, item in enumerate(value):
            way = _way_to_other(item)
            if way is not None:
                return [place, *way]
        return None
    if _can_be_read(value):
        return None
    return [value]


def _way_in_mapping(mapping: Mapping[Any, Any]) -> list[Any] | None:
    for key, item in mapping.items():
        if _way_to_other(key) is not None:
            return [key, key]
        way = _way_to_other(item)
        if way is not None:
            return [key, *way]
    return None


def _can_be_read(value: Any) -> bool:
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True, map_location="cpu")
    except (UnpicklingError, PicklingError, AttributeError, TypeError):  # the last two: by pickle
        return False
    return True


def _with_python_numbers(value: Any) -> Any:
    """A copy with Python's numbers and texts in the places of numpy's."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in _SEQUENCES:
        return kind([_with_python_numbers(item) for item in value])
    if kind in _MAPPINGS:
        items = {
            _with_python_numbers(key): _with_python_numbers(item) for key, item in value.items()
        }
        return items if kind is dict else _with_items(value, items)
    if isinstance(value, np.number | np.bool | np.str_ | np.bytes_):
        return value.item()  # a long double stays what it is
    return value


def _with_items(mapping: Any, items: dict[Any, Any]) -> Any:
    """A mapping with other items, and the attributes that it has: a module's state_dict has one."""
    clone = copy.copy(mapping)
    clone.clear()
    clone.update(items)
    return clone
