"""What makes code give something else the second time: numbers that nobody has seeded."""

from __future__ import annotations

import datetime
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ddp_train.models.python_state import is_users

_OUTSIDE: dict[Any, str] = {
    **{
        getattr(time, name): f"the clock (time.{name})"
        for name in ("time", "time_ns", "perf_counter", "monotonic")
    },
    id: "the address of an object (id)",
    hash: "hash(), which for texts is another in each process",
    os.getpid: "the process number (os.getpid)",
    os.urandom: "random numbers of the operating system",
    threading.get_ident: "the thread number",
}
_ANYWHERE = (os.urandom,)
"""Reported also if a library calls them for the user's code."""


def unseeded(function: Callable[[], Any]) -> list[str]:
    """What the user's code asks, while `function` runs, that is another in each process: with its
    line. Two calls may agree all the same: a clock need not have moved."""
    found: dict[str, None] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        what = ""
        caller = frame
        if event == "c_call":
            what = _asked(argument)
        elif event == "call" and frame.f_code in _reseeding() and frame.f_back and _reseeds(frame):
            what = "random numbers without a seed"
            caller = frame.f_back
        if not what:
            return
        near = argument in _ANYWHERE if event == "c_call" else True
        if near:
            line = next((one for one in _stack(caller) if is_users(one.f_code.co_filename)), None)
        else:
            line = caller
        if line and is_users(line.f_code.co_filename):
            file = Path(line.f_code.co_filename).name
            found[f"{what}, {file}:{line.f_lineno} in {line.f_code.co_name}()"] = None

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return list(found)


def _asked(function: Any) -> str:
    try:
        if function in _OUTSIDE:
            return _OUTSIDE[function]
    except TypeError:  # a method of something that cannot be hashed
        return ""
    owner = getattr(function, "__self__", None)
    if (
        function.__name__ in ("now", "utcnow", "today")
        and isinstance(owner, type)
        and issubclass(owner, datetime.date)
    ):
        return f"the clock (datetime.{function.__name__})"
    if function.__name__ == "seed" and isinstance(owner, torch.Generator):
        return "random numbers without a seed"
    return ""


@functools.cache
def _reseeding() -> frozenset[CodeType]:
    return frozenset(
        (random.Random.__init__.__code__, random.Random.seed.__code__, torch.random.seed.__code__)
    )


def _reseeds(frame: FrameType) -> bool:
    if frame.f_code is torch.random.seed.__code__:
        return True
    given = frame.f_locals.get("x" if frame.f_code is random.Random.__init__.__code__ else "a")
    return given is None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back
