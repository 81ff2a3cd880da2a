"""Settings of a sweep that ran with several seeds: what of their differences is noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ddp_train.telemetry.pages.noise import welch
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import PERCENT, shown_metric
from ddp_train.text import counted

SEED = "seed"
ONE_OF_EACH = (
    "One run of each: what of the differences is noise cannot be told from them; add seed=0,1,2 to"
    " the sweep."
)
NOT_REPEATED = "The settings with the best mean were not repeated often enough to compare them."
MOST_NAMES = 5
Row = dict[str, Any]
"""A line of results.jsonl."""


class SeedGroups:
    """Values of the objective by the settings of their runs, without the seed."""

    def __init__(self, rows: Sequence[Row], objective: str, better: str | None) -> None:
        """Group the trials.

        rows: trials; those without a value of the objective are left out.
        objective: `test.accuracy`.
        better: max or min.
        """
        self.objective = objective
        self.metric = objective.rpartition(".")[2]
        self.sign = -1 if better == "max" else 1
        """Times a value: the better, the lower."""
        self.values: dict[str, list[float]] = {}
        for row in rows:
            if row.get("objective") is not None:
                self.values.setdefault(_settings(row), []).append(row["objective"])
        self.order = sorted(self.values, key=self._badness)
        """The settings, the best mean first."""

    def _badness(self, settings: str) -> float:
        return self.sign * statistics.fmean(self.values[settings])

    @property
    def repeated(self) -> list[str]:
        """The settings of more than one run."""
        return [settings for settings in self.order if len(self.values[settings]) > 1]

    def table(self) -> Table:
        """A row for each setting, compared with the best one."""
        is_percent = self.metric in PERCENT
        scale = 100.0 if is_percent else 1.0
        best = self.values[self.order[0]]
        rows = []
        for settings in self.order:
            values = [scale * value for value in self.values[settings]]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            p = None
            if settings != self.order[0]:
                compared = welch(best, self.values[settings])
                p = compared and compared.p
            mean = statistics.fmean(values)
            rows.append([settings, mean, deviation, min(values), max(values), len(values), p])
        mean_column = "mean %" if is_percent else "mean"
        return Table(
            f"{self.objective} over seeds",
            ["settings", mean_column, "deviation", "lowest", "highest", "runs", "p"],
            rows,
            "p: Welch's t-test against the settings with the best mean; below 0.05 it is more than"
            " noise.",
            best=0,
        )

    def findings(self) -> list[str]:
        """Sentences: how large noise is, and which settings differ by more."""
        if len(self.values) < 2 and not self.repeated:
            return []
        if not self.repeated:
            return [ONE_OF_EACH]
        if len(self.values) == 1:
            return [self._spread()]
        compared = [settings for settings in self.repeated if settings != self.order[0]]
        if self.order[0] not in self.repeated or not compared:
            return [self._spread(), NOT_REPEATED]
        return [self._spread(), *self._comparison(compared)]

    def _spread(self) -> str:
        repeated = self.repeated
        # No mean of them: a setting that diverges scatters more than all others, and says nothing
        # of theirs.
        deviations = [statistics.stdev(self.values[settings]) for settings in repeated]
        low = shown_metric(self.metric, min(deviations))
        high = shown_metric(self.metric, max(deviations))
        spread = low if low == high else f"{low} to {high}"
        runs = sum(len(self.values[settings]) for settings in repeated)
        return (
            f"Runs that differ in their seed alone differ by {spread} (standard deviation of"
            f" one run; {counted(len(repeated), 'setting')}, {runs} runs)."
        )

    def _comparison(self, compared: Sequence[str]) -> list[str]:
        """The best setting against others.

        compared: settings of more than one run.
        """
        best = self.order[0]
        once = len(self.order) - 1 - len(compared)
        rest = f" {counted(once, 'other')} ran once and cannot be compared." if once else ""
        alike = [settings for settings in compared if not self._differs(settings)]
        if not alike:
            than = counted(len(compared), "other") if once else "all others"
            test = "(Welch's t-test, p < 0.05 for each)"
            return [f"{best} is better than {than} by more than noise {test}.{rest}"]
        apart = [settings for settings in alike if self._is_always_worse(settings)]
        close = [settings for settings in alike if settings not in apart]
        sentences = []
        if close:
            sentences.append(
                f"{best} has the best mean, but cannot be told from noise against {_named(close)}."
            )
        if apart:
            sentences.append(
                f"Each run of {best} is better than all of {_named(apart)}. So few runs may be so"
                " by chance; more values of seed would tell."
            )
        return [*sentences[:-1], sentences[-1] + rest]

    def _differs(self, settings: str) -> bool:
        """Whether a setting differs from the best one by more than noise."""
        compared = welch(self.values[self.order[0]], self.values[settings])
        return compared is None or compared.is_more_than_noise

    def _is_always_worse(self, settings: str) -> bool:
        """Whether each run of a setting is worse than all of the best one."""
        worst_of_best = max(self.sign * value for value in self.values[self.order[0]])
        return min(self.sign * value for value in self.values[settings]) > worst_of_best


def _settings(row: Row) -> str:
    """The overrides of a trial without its seed."""
    overrides = [text for text in row["overrides"] if text.partition("=")[0] != SEED]
    return " ".join(overrides) or "all"


def _named(settings: Sequence[str]) -> str:
    """`2 others: optimizer.lr=0.1; optimizer.lr=0.2`."""
    names = "; ".join(settings[:MOST_NAMES])
    if len(settings) > MOST_NAMES:
        names += "; ..."
    return f"{counted(len(settings), 'other')}: {names}"
