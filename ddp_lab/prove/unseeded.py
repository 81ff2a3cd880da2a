"""Numbers that nobody has seeded, and the code that asks for them."""

from __future__ import annotations

import datetime
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ddp_train.models.python_state import is_users

_OUTSIDE: dict[Any, str] = {
    time.time: "the clock (time.time)",
    time.time_ns: "the clock (time.time_ns)",
    time.perf_counter: "the clock (time.perf_counter)",
    time.monotonic: "the clock (time.monotonic)",
    id: "the address of an object (id)",
    hash: "hash(), which for texts differs between processes",
    os.getpid: "the process number (os.getpid)",
    os.urandom: "random numbers of the operating system",
    threading.get_ident: "the thread number",
}
"""Functions in C whose results are others in each process, and what they are."""
_NO_SEED = "random numbers without a seed"
_SEED_ARGUMENTS = {
    random.Random.__init__.__code__: "x",
    random.Random.seed.__code__: "a",
    torch.random.seed.__code__: "",
}
"""Functions in Python that seed a generator anew, and the argument with the seed, without which
they take an unknown one; empty: they always do."""


def unseeded(function: Callable[[], Any]) -> list[str]:
    """Call a function, and name what the user's code asks meanwhile that is another in each
    process, each with its line.

    Two calls may agree all the same: a clock need not have moved.
    """
    found: dict[str, None] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            question = _question_to_c(argument)
            # reported also if a library calls it for the user's code
            is_indirect = argument is os.urandom
            caller: FrameType | None = frame
        elif event == "call":
            question = _NO_SEED if _takes_unknown_seed(frame) else ""
            is_indirect = True
            caller = frame.f_back
        else:
            return
        if not question or not caller:
            return
        callers = _stack(caller) if is_indirect else [caller]
        for line in callers:
            code = line.f_code
            if is_users(code.co_filename):
                file = Path(code.co_filename).name
                found[f"{question}, {file}:{line.f_lineno} in {code.co_name}()"] = None
                return

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return list(found)


def _question_to_c(function: Any) -> str:
    """The result of a function in C that is another in each process, in words; empty for others."""
    try:
        if function in _OUTSIDE:
            return _OUTSIDE[function]
    except TypeError:  # a method of something that cannot be hashed
        return ""
    name = function.__name__
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        if name in ("now", "utcnow", "today"):
            return f"the clock (datetime.{name})"
    elif isinstance(owner, torch.Generator) and name == "seed":
        return _NO_SEED
    return ""


def _takes_unknown_seed(frame: FrameType) -> bool:
    """Tell whether a call seeds a generator with a number that nobody gave."""
    argument = _SEED_ARGUMENTS.get(frame.f_code)
    if argument is None:
        return False
    return not argument or frame.f_locals.get(argument) is None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back
