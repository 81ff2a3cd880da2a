"""Names of the sets that are scored: `validation`, `test`, and further ones, `validation/noisy`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

VALIDATION = "validation"
TEST = "test"
KINDS = (VALIDATION, TEST)
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
"""The name that a user gives a further set."""


def kind_of(name: str) -> str:
    """`validation` of `validation` and `validation/noisy`."""
    return name.partition("/")[0]


def is_set(name: str) -> bool:
    """Tell whether a name is that of a set that is scored."""
    return kind_of(name) in KINDS


def of_kind(kind: str, names: Iterable[str]) -> list[str]:
    """The sets of one kind among some, in their order."""
    return [name for name in names if kind_of(name) == kind]


def full_name(kind: str, name: str) -> str:
    """`validation/noisy` of `validation` and `noisy`."""
    return f"{kind}/{name}"


def key_of_set(name: str) -> str:
    """The key that says what a further set is: data.validation_sets.noisy of validation/noisy."""
    kind, _, own = name.partition("/")
    return f"data.{kind}_sets.{own}"


def is_name(name: Any) -> bool:
    """Tell whether a user may give a further set this name."""
    return isinstance(name, str) and re.fullmatch(NAME, name) is not None


def in_order(names: Collection[str]) -> list[str]:
    """The sets among some names, those of validation first."""
    return [*of_kind(VALIDATION, names), *of_kind(TEST, names)]


def main_set(names: Collection[str]) -> str:
    """The set that selects, unless a key names another: the first of validation, else of test."""
    return next(iter(in_order(names)), TEST)


def sets_of(summary: Mapping[str, Any]) -> list[str]:
    """The sets whose scores a summary.json has."""
    return in_order([name for name in summary if summary[name] and is_set(name)])
