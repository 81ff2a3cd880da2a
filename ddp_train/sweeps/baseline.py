"""`sweep.baseline=true`: one trial of a sweep runs again, alone, after the others. What did sharing
cost it?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_train.sweeps.trial_numbers import Numbers
from ddp_train.text import counted

MARK = "alone"
"""In its row: the trial that it repeats. Among the words of its folder: which are another trial's
too."""

SHORTEST_SECONDS = 2.0
"""Of training, for its speed to tell anything: below, the first steps are most of it."""
MOST = 1.1
"""Times its speed alone, beside others: sharing makes none faster."""


@dataclass
class Baseline:
    """The run alone. Its row is none of the sweep's: it would count as a second seed."""

    asked: bool = False
    number: int | None = None
    row: dict[str, Any] = field(default_factory=dict)

    def choose(
        self, rows: list[dict[str, Any]], before: list[dict[str, Any]], numbers: Numbers
    ) -> Any:
        """The number and the words of the run, once; None if there is nothing to compare, or it is
        known. before: rows of earlier starts too."""
        shared = next(
            (row for row in rows if row.get("samples_per_second") and row.get("at_once", 1) > 1),
            None,
        )
        if not self.asked or self.number is not None or shared is None:
            return None
        words = sorted(shared["words"])
        self.number = numbers.of(1 + max(row["trial"] for row in [*rows, *before]), [*words, MARK])
        for row in before:
            if (
                row.get(MARK) == shared["trial"]
                and row["words"] == words
                and row["status"] == "completed"
            ):
                self.row = row
        self.row = self.row or {MARK: shared["trial"]}
        return None if "status" in self.row else (self.number, words)

    def text(self, rows: list[dict[str, Any]]) -> str:
        """What it found, in a line; "" if it did not run."""
        shared = next((row for row in rows if row["trial"] == self.row.get(MARK)), None)
        if shared is None or "status" not in self.row:
            return ""
        if not (own := self.row.get("samples_per_second")):
            return (
                f"Sharing was not measured: trial {self.row[MARK]} alone has failed,"
                f" {self.row.get('reason')}."
            )
        beside = shared["samples_per_second"]
        others = shared["at_once"] - 1
        speeds = (
            f"trial {self.row[MARK]} has {beside:,.0f} samples/s beside {counted(others, 'other')},"
            f" {own:,.0f} alone"
        )
        if (seconds := shared.get("seconds", SHORTEST_SECONDS)) < SHORTEST_SECONDS:
            return (
                f"Sharing was not measured: {speeds}; {seconds:.1f} s are too short to compare, use"
                " longer trials."
            )
        if beside > MOST * own:
            return f"Sharing was not measured: {speeds}, as if this host had other work by then."
        work = (
            f"{others + 1} at a time do {beside / own * (others + 1):.2f} times the work of one"
            " after the other"
        )
        return f"Sharing: {speeds}, once each: {work}."
