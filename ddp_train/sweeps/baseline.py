"""The cost of sharing the host for a trial: `sweep.baseline=true` runs one again, alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_train.sweeps.results import ALONE
from ddp_train.sweeps.trial_numbers import TrialNumbers
from ddp_train.text import counted

SHORTEST_SECONDS = 2.0
"""Least training time for a comparison of speeds: below, the first steps are most of it."""
MOST = 1.1
"""Greatest speed beside others, times the speed alone: sharing makes no trial faster."""


@dataclass
class Baseline:
    """The baseline run.

    Its row is not among those of the sweep, where it would count as another seed.
    """

    is_wanted: bool = False
    number: int | None = None
    row: dict[str, Any] = field(default_factory=dict)

    def choose(
        self, rows: list[dict[str, Any]], earlier: list[dict[str, Any]], numbers: TrialNumbers
    ) -> tuple[int, list[str]] | None:
        """Choose the number and the overrides of the baseline run. Returns them.

        None if there is nothing to compare, or the run is known, or was chosen before.

        rows: of this start.
        earlier: of earlier starts too.
        """
        if not self.is_wanted or self.number is not None:
            return None
        shared = _first_shared(rows)
        if shared is None:
            return None
        overrides = sorted(shared["words"])
        next_number = 1 + max(row["trial"] for row in [*rows, *earlier])
        # with the mark, as the overrides are those of another trial too
        self.number = numbers.number_of(next_number, [*overrides, ALONE])
        self.row = {ALONE: shared["trial"]}
        for row in earlier:
            is_repetition = row.get(ALONE) == shared["trial"] and row["words"] == overrides
            if is_repetition and row["status"] == "completed":
                self.row = row
        if "status" in self.row:
            return None
        return self.number, overrides

    def text(self, rows: list[dict[str, Any]]) -> str:
        """The comparison in a line; empty if the run did not take place."""
        if "status" not in self.row:
            return ""
        trial = self.row[ALONE]
        shared = next((row for row in rows if row["trial"] == trial), None)
        if shared is None:
            return ""
        alone = self.row.get("samples_per_second")
        if not alone:
            reason = self.row.get("reason")
            return (
                f"The cost of sharing this host was not measured: the run of trial {trial} alone"
                f" failed ({reason})."
            )
        beside = shared["samples_per_second"]
        others = shared["at_once"] - 1
        speeds = (
            f"trial {trial} had {beside:,.0f} samples/s beside {counted(others, 'other trial')},"
            f" and {alone:,.0f} alone"
        )
        seconds = shared.get("seconds", SHORTEST_SECONDS)
        if seconds < SHORTEST_SECONDS:
            return (
                f"The cost of sharing this host was not measured: {speeds}, but trials of"
                f" {seconds:.1f} s are too short to compare. Use longer trials."
            )
        if beside > MOST * alone:
            return (
                f"The cost of sharing this host was not measured: {speeds}. The trial was slower"
                " alone, so this host probably had other work."
            )
        work = beside / alone * (others + 1)
        return (
            f"Cost of sharing this host: {speeds}, in one run each. So {others + 1} trials at a"
            f" time do {work:.2f} times the work of trials one after the other."
        )


def _first_shared(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row of a trial that was completed beside others."""
    for row in rows:
        if row.get("samples_per_second") and row.get("at_once", 1) > 1:
            return row
    return None
