"""A problem of a run, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake. Its text is the message: `KEY=VALUE: RULE; REMEDY`."""

    key: str
    """The key and the value found, as an override; "" where no key is to blame."""
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        found = f"{self.key}: " if self.key else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{found}{self.rule}{remedy}"
