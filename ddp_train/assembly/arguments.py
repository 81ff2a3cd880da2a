"""The keys of a config section as arguments of what it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def arguments_of(section: Any, *excluded: str) -> dict[str, Any]:
    """All keys of a section but its name and those that are excluded."""
    return {name: value for name, value in vars(section).items() if name not in ("name", *excluded)}


def needs_argument(method: Callable[..., Any]) -> bool:
    """True if a bound method cannot be called without an argument."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.default is inspect.Parameter.empty and parameter.kind in by_place
        for parameter in inspect.signature(method).parameters.values()
    )


def keys_taken_by(function: Callable[..., Any], section: Any) -> dict[str, Any]:
    """The keys of a section that a function takes, by name.

    So a switch reaches the place where it acts without a list.
    """
    return {
        name: vars(section)[name]
        for name in inspect.signature(function).parameters
        if name in vars(section)
    }
