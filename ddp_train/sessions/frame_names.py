"""The code and the variables of a frame of the user's code."""

from __future__ import annotations

import linecache
import types
from typing import Any

from torch import nn

from ddp_train.models.loop_variables import locals_of
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


def value_of(name: str, frame: types.FrameType) -> Any:
    """The value of `q` or `self.q`; None if there is none. No property is called."""
    first, *attributes = name.split(".")
    variables = locals_of(frame, first.__eq__)
    value = variables.get(first, frame.f_globals.get(first))
    for attribute in attributes:
        parts = attributes_of(value)
        if isinstance(value, nn.Module):
            parts |= value._buffers
        value = parts.get(attribute)
    return value
