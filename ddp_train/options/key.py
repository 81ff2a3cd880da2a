"""Declarations of keys, `lr: float = key(0.05, "learning rate", above=0)`, and their rules."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_train.text import did_you_mean

LONGEST_NAME = 255
LONGEST_PATH = 4095
"""In bytes (linux/limits.h)."""
LARGEST = 2**63
"""Bound of the whole numbers that libraries take; nothing that a key counts comes near it."""

AUTO: dict[str, Any] = {"literals": ("auto",)}
"""The rule of keys whose value may also be auto."""


def key(default: Any, meaning: str, **rules: Any) -> Any:
    """A field with its meaning and its rules.

    Rules, which hold for each item of a list:
    `at_least`, `above`, `at_most`, `below`: bounds of a number.
    `choices`: all values that are allowed.
    `literals`: strings that are allowed beside numbers or booleans, ("auto",) for one.
    `may_be_range`: a range LOW:HIGH is allowed beside a number, as 2:8.
    `is_span`: the value is a string FIRST:LAST, two numbers from 2 on.
    `may_be_empty`: the empty string is allowed.
    `is_path`: the value is a path, no longer than a file system takes.
    `example`: no rule, but a value for messages.
    """
    metadata = {"meaning": meaning, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def broken_rule(value: Any, rules: Mapping[str, Any], name: str = "") -> str:
    """The rule that a value, or an item of a list, breaks, as `must be ...`; "" if it breaks none.

    rules: see `key`. The type of the value is not checked, unless it may be a range.
    name: of the key, for the remedy.
    """
    if isinstance(value, list):
        broken = (broken_rule(item, rules) for item in value)
        return next(filter(None, broken), "")
    if rules.get("may_be_range"):
        return _broken_count(value, name, may_be_auto="auto" in rules.get("literals", ()))
    if value == "" and not rules.get("may_be_empty"):
        return "must not be empty"
    if isinstance(value, str):
        return _broken_by_text(value, rules)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _broken_by_number(value, rules)
    return ""


def _broken_by_text(value: str, rules: Mapping[str, Any]) -> str:
    choices = list(rules.get("choices", ()))
    if choices and value not in choices:
        return f"must be one of {', '.join(choices)}{did_you_mean(value, choices)}"
    literals = rules.get("literals", ())
    if rules.get("is_span") and not _is_span(value):
        return "must be FIRST:LAST, two numbers from 2 on, as 100:105 (in a YAML file in quotes)"
    if literals and value not in literals:
        kind = "a whole number" if "at_least" in rules else "true, false"
        return f"must be {kind} or {' or '.join(literals)}"
    if rules.get("is_path") and _is_too_long(value):
        return f"is too long: a name may have {LONGEST_NAME} bytes, a path {LONGEST_PATH:,}"
    return ""


def _broken_by_number(value: float, rules: Mapping[str, Any]) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    broken = []
    if "at_least" in rules and value < rules["at_least"]:
        broken.append(f"at least {rules['at_least']}")
    if "above" in rules and value <= rules["above"]:
        broken.append(f"above {rules['above']}")
    if "at_most" in rules and value > rules["at_most"]:
        broken.append(f"at most {rules['at_most']}")
    if "below" in rules and value >= rules["below"]:
        broken.append(f"below {rules['below']}")
    if not broken and isinstance(value, int) and value >= LARGEST:
        broken.append(f"below {LARGEST}")
    return f"must be {' and '.join(broken)}" if broken else ""


def _is_too_long(path: str) -> bool:
    encoded = os.fsencode(path)
    longest_name = max(len(name) for name in encoded.split(b"/"))
    return longest_name > LONGEST_NAME or len(encoded) > LONGEST_PATH


PATTERN = re.compile(r"(\d{1,9}):(\d{1,9}|auto)")


@dataclass(frozen=True)
class Range:
    """LOW:HIGH."""

    low: int
    high: int | None
    """None: as many as there are devices."""


def range_of(value: Any) -> Range | None:
    """The range that a value of the key is; None if it is not a range."""
    match = PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    return Range(int(match[1]), None if match[2] == "auto" else int(match[2]))


def _is_span(value: str) -> bool:
    span = range_of(value)
    return span is not None and span.high is not None and 2 <= span.low <= span.high


def _broken_count(value: Any, name: str, may_be_auto: bool) -> str:
    """The rule that a number, or a range of numbers, breaks.

    may_be_auto: for the key itself, and as the end of a range.
    """
    if may_be_auto and value == "auto":
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < LARGEST:
        return ""
    span = range_of(value)
    if span is None or (span.high is None and not may_be_auto):
        kinds = "a range LOW:HIGH, as 2:3"
        if may_be_auto:
            kinds = "auto, or a range LOW:HIGH, as 2:8 or 2:auto"
        fitting = _fitting_count(value, may_be_auto)
        return f"must be a whole number of at least 1, or {kinds}; use {name}={fitting}"
    high = span.high or 1
    is_ascending = span.high is None or span.low <= span.high
    if not span.low or not is_ascending:
        low = max(1, min(span.low, high))
        rule = "must be a range LOW:HIGH with 1 <= LOW <= HIGH"
        return f"{rule}; use {name}={low}:{max(span.low, high)}"
    return ""


def _fitting_count(value: Any, may_be_auto: bool) -> int | str:
    """The number that was probably meant by a value that is none of processes or hosts."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return max(1, round(value))
    if isinstance(value, str) and value.isdecimal() and 1 <= int(value) < LARGEST:
        return int(value)
    return "auto" if may_be_auto else 1
