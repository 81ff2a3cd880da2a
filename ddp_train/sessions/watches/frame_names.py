"""The code and the variables of a frame of the user's code."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddp_train.models.loop_variables import locals_of
from ddp_train.sessions.wrapped import OWN_ATTRIBUTES, Wrapped
from ddp_train.tensor_tree import attributes_of

MODULE_OF_RUN = "ddp_train.sessions.run"


def code_of(frame: types.FrameType) -> str:
    """The code of the file that a frame is in; "" if there is none."""
    return "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))


def run_names(frame: types.FrameType) -> set[str]:
    """How the code of a frame calls the run: `run`, `self.run`."""
    variables = dict(frame.f_globals) | locals_of(frame, lambda _: True)
    names = {name for name, value in variables.items() if _is_run(value)}
    attributes = attributes_of(variables.get("self"))
    return names | {f"self.{name}" for name, value in attributes.items() if _is_run(value)}


def _is_run(value: Any) -> bool:
    return type(value).__module__ == MODULE_OF_RUN


def variable_of(name: str, frame: types.FrameType) -> Any:
    """The value of a variable; None if there is none."""
    return locals_of(frame, name.__eq__).get(name, frame.f_globals.get(name))


def part_of(value: Any, name: str) -> Any:
    """An attribute, or an item of a dict: `['q']`; None if there is none. No property is called."""
    if name.startswith("["):
        key = ast.literal_eval(name[1:-1])
        return value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Wrapped) and name not in OWN_ATTRIBUTES:
        value = value.module
    parts = attributes_of(value)
    if isinstance(value, nn.Module):
        parts |= value._buffers
    return parts.get(name)
