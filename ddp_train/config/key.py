"""How a key of the configuration is declared: `lr: float = key(0.05, "learning rate", above=0)`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO: dict[str, Any] = {"literals": ("auto",)}
"""The rule of keys whose value may also be auto."""


def key(default: Any, meaning: str, **rules: Any) -> Any:
    """A field with its meaning and its rules.

    Rules: `at_least`, `above`, `at_most`, `below` (numbers; of a list, each item), `choices` (all values allowed),
    `literals` (strings allowed beside numbers or booleans, "auto" for example), `may_be_range` (two numbers, as 2:8),
    `may_be_empty` and `is_path` (strings).
    """
    metadata = {"meaning": meaning, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)
