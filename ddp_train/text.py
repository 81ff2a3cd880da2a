"""How values, counts and errors are put into words. Torch-free."""

from __future__ import annotations

import difflib
from typing import Any


def shown(value: Any) -> str:
    """A value as one would type it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{shown(v)}" for k, v in value.items()) + "}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`, `2 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def did_you_mean(word: str, candidates: list[str]) -> str:
    """'; did you mean X?', or nothing."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def first_line(error: BaseException) -> str:
    """What an error says, without the C++ stack that torch appends."""
    return str(error).strip().partition("\n")[0]
