"""The variables of the user's code that is on the stack: of a loop, and of what calls it."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ddp_train.resilience.failure_report import is_foreign


def loop_variables(is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """The variables with wanted names, of the innermost function first, globals after locals."""
    for frame in user_frames():
        yield from locals_of(frame, is_wanted).items()
        for name, value in list(frame.f_globals.items()):
            if is_wanted(name):
                yield name, value


def user_frames() -> Iterator[types.FrameType]:
    """The frames of the user's code on the stack, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def locals_of(frame: types.FrameType, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The local variables of a frame with wanted names, by name. The frame keeps no copy."""
    code = frame.f_code
    names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    if not any(map(is_wanted, names)):
        return {}
    values = frame.f_locals
    found = {name: value for name, value in list(values.items()) if is_wanted(name)}
    # Before Python 3.13 a function's are copied into a dict that its frame keeps: what a loop has
    # let go of, its iterators and batches, would stay.
    if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()
    return found
