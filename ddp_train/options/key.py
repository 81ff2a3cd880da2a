"""How a key of the configuration is declared, `lr: float = key(0.05, "learning rate", above=0)`,
and its rules."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from ddp_train.text import did_you_mean

LONGEST_NAME = 255
LONGEST_PATH = 4095
"""In bytes (linux/limits.h)."""
LARGEST = 2**63
"""Of what libraries take for a whole number; nothing that a key counts comes near it."""

AUTO: dict[str, Any] = {"literals": ("auto",)}
"""The rule of keys whose value may also be auto."""


def key(default: Any, meaning: str, **rules: Any) -> Any:
    """A field with its meaning and its rules.

    Rules: `at_least`, `above`, `at_most`, `below` (numbers; of a list, each item), `choices` (all
    values allowed), `literals` (strings allowed beside numbers or booleans, "auto" for example),
    `may_be_range` (two numbers, as 2:8), `is_span`, `may_be_empty` and `is_path` (strings).
    `example` is a value, for messages.
    """
    metadata = {"meaning": meaning, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def broken_rule(value: Any, rules: Any) -> str:
    """What a value breaks of the rules beside its type; empty if nothing."""
    if value == "" and not rules.get("may_be_empty"):
        return "must not be empty"
    if isinstance(value, str):
        allowed = rules.get("choices", ())
        if allowed and value not in allowed:
            return f"must be one of {', '.join(allowed)}{did_you_mean(value, list(allowed))}"
        if rules.get("may_be_range") and (":" in value or "literals" not in rules):
            return _broken_range(value, auto="literals" in rules)
        if rules.get("is_span") and (
            not (span := range_of(value)) or not 2 <= span.low <= (span.high or 0)
        ):
            return (
                "must be FIRST:LAST, two numbers from 2 on, as 100:105 (in a YAML file in quotes)"
            )
        if "literals" in rules and value not in rules["literals"]:
            kind = "a whole number" if "at_least" in rules else "true, false"
            return f"must be {kind} or {' or '.join(rules['literals'])}"
        names = os.fsencode(value).split(b"/") if rules.get("is_path") else []
        if max(map(len, names), default=0) > LONGEST_NAME or len(b"/".join(names)) > LONGEST_PATH:
            return f"is too long: a name may have {LONGEST_NAME} bytes, a path {LONGEST_PATH:,}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    bounds = (
        ("at_least", "at least", lambda bound: value >= bound),
        ("above", "above", lambda bound: value > bound),
        ("at_most", "at most", lambda bound: value <= bound),
        ("below", "below", lambda bound: value < bound),
    )
    broken = [
        f"{text} {rules[name]}"
        for name, text, holds in bounds
        if name in rules and not holds(rules[name])
    ]
    broken = broken or [f"below {LARGEST}"] * (isinstance(value, int) and value >= LARGEST)
    return f"must be {' and '.join(broken)}" if broken else ""


PATTERN = re.compile(r"(\d{1,9}):(\d{1,9}|auto)")


@dataclass(frozen=True)
class Range:
    low: int
    high: int | None
    """None: as many as there are devices."""


def range_of(value: Any) -> Range | None:
    """The range that a value of the key is; None if it is none."""
    match = PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match:
        return Range(int(match[1]), None if match[2] == "auto" else int(match[2]))
    return None


def _broken_range(value: str, auto: bool) -> str:
    """auto: whether the key takes that, for itself and as the end of a range."""
    found = range_of(value)
    if found is None or not (found.high or auto):
        also, ends = (", auto,", "2:8 or 2:auto") if auto else (",", "2:3")
        return f"must be a whole number{also} or a range LOW:HIGH, as {ends}"
    if not found.low or (found.high is not None and found.high < found.low):
        low = max(1, min(found.low, found.high or 1))
        high = max(found.low, found.high or 1)
        return f"must be a range LOW:HIGH with LOW at least 1, and at most HIGH; use {low}:{high}"
    return ""
