"""Settings of a sweep that ran with several seeds: what of their differences is noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ddp_train.telemetry.pages.noise import Welch, welch
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.pages.trials import Row, number_or_text, overrides_of
from ddp_train.telemetry.score_lines import in_column, is_percent, shown_metric
from ddp_train.text import counted

SEED = "seed"
ONE_OF_EACH = (
    "There is one run of each setting, so it is not known which differences are noise; add"
    " seed=0,1,2 to the sweep."
)
NOT_REPEATED = "The settings with the best mean were not repeated often enough to compare them."
MOST_NAMES = 5


class SeedGroups:
    """Values of the objective by the settings of their runs, without the seed."""

    def __init__(self, rows: Sequence[Row], objective: str, better: str | None) -> None:
        """Group the trials.

        rows: trials; those without a value of the objective are left out, and those that repeat
            settings and seed of another one, which say nothing of noise.
        objective: `test.accuracy`.
        better: max or min.
        """
        self.objective = objective
        self.is_max = better == "max"
        values: dict[str, list[float]] = {}
        seen = set()
        for row in rows:
            settings = _settings(row)
            run = settings, _seed(row)
            if row.get("objective") is not None and run not in seen:
                seen.add(run)
                values.setdefault(settings, []).append(row["objective"])
        order = sorted(values, key=lambda name: statistics.fmean(values[name]), reverse=self.is_max)
        self.values = {settings: values[settings] for settings in order}
        """By settings, those with the best mean first."""
        self.best = next(iter(self.values), "")
        """The settings with the best mean."""
        self.repeated = [settings for settings in order if len(values[settings]) > 1]
        """The settings of more than one run."""

    def table(self) -> Table:
        """A row for each setting, compared with the best one."""
        rows = []
        for settings, values in self.values.items():
            shown = [in_column(self.objective, value) for value in values]
            deviation = statistics.stdev(shown) if len(shown) > 1 else None
            test = self._against_best(settings)
            row = [settings, statistics.fmean(shown), deviation, min(shown), max(shown)]
            rows.append([*row, len(shown), test and test.p])
        mean = "mean %" if is_percent(self.objective) else "mean"
        return Table(
            f"{self.objective} over seeds",
            ["settings", mean, "deviation", "lowest", "highest", "runs", "p"],
            rows,
            "p: Welch's t-test against the settings with the best mean; below 0.05 it is more than"
            " noise.",
            best=0,
        )

    def findings(self) -> list[str]:
        """Sentences: how large noise is, and which settings differ by more."""
        if not self.repeated:
            return [ONE_OF_EACH] if len(self.values) > 1 else []
        if len(self.values) == 1:
            return [self._spread()]
        compared = [settings for settings in self.repeated if settings != self.best]
        if self.best not in self.repeated or not compared:
            return [self._spread(), NOT_REPEATED]
        return [self._spread(), *self._comparison(compared)]

    def _spread(self) -> str:
        # Not their mean: a setting that diverges scatters more than all others.
        deviations = [statistics.stdev(self.values[settings]) for settings in self.repeated]
        low = self._shown(min(deviations))
        high = self._shown(max(deviations))
        spread = low if low == high else f"{low} to {high}"
        runs = sum(len(self.values[settings]) for settings in self.repeated)
        return (
            f"The same settings with other seeds differ by {spread} (standard deviation of one"
            f" run; {counted(len(self.repeated), 'setting')}, {runs} runs)."
        )

    def _shown(self, value: float) -> str:
        return shown_metric(self.objective.rpartition(".")[2], value)

    def _comparison(self, compared: Sequence[str]) -> list[str]:
        """The best setting against others.

        compared: settings of more than one run.
        """
        best = self.best
        once = len(self.values) - 1 - len(compared)
        rest = f" {counted(once, 'other')} ran once and cannot be compared." if once else ""
        alike = [settings for settings in compared if self._may_be_noise(settings)]
        worse = [settings for settings in compared if settings not in alike]
        apart = [settings for settings in alike if self._is_always_worse(settings)]
        close = [settings for settings in alike if settings not in apart]
        sentences = []
        if close:
            sentences.append(
                f"{best} has the best mean, but its difference from {_named(close)} is within the"
                " noise."
            )
        if apart:
            sentences.append(
                f"Each run of {best} is better than each of {_named(apart)}. With so few runs that"
                " may be chance; add more seeds."
            )
        if worse:
            than = _named(worse)
            if len(worse) == len(self.values) - 1 > 1:
                than = "all others"
            sentences.append(
                f"{best} is better than {than} by more than noise (Welch's t-test, p < 0.05 for"
                " each)."
            )
        sentences[-1] += rest
        return sentences

    def _against_best(self, settings: str) -> Welch | None:
        """The difference from the best setting; None if one of them ran once."""
        if settings == self.best:
            return None
        return welch(self.values[self.best], self.values[settings])

    def _may_be_noise(self, settings: str) -> bool:
        test = self._against_best(settings)
        return test is not None and not test.is_more_than_noise

    def _is_always_worse(self, settings: str) -> bool:
        """Tell whether each run of a setting is worse than all of the best one."""
        if self.is_max:
            return max(self.values[settings]) < min(self.values[self.best])
        return min(self.values[settings]) > max(self.values[self.best])


def _settings(row: Row) -> str:
    """The overrides of a trial without its seed, unless that changes other keys too."""
    overrides = overrides_of(row)
    if not row.get("tied_to_seed"):
        overrides.pop(SEED, None)
    return " ".join(f"{key}={value}" for key, value in overrides.items()) or "all"


def _seed(row: Row) -> int | float | str:
    """The seed of a trial; empty if the sweep does not vary it."""
    return number_or_text(overrides_of(row).get(SEED, ""))


def _named(settings: Sequence[str]) -> str:
    """`optimizer.lr=0.1`, or `2 others (optimizer.lr=0.1; optimizer.lr=0.2)`."""
    if len(settings) == 1:
        return settings[0]
    names = "; ".join(settings[:MOST_NAMES])
    if len(settings) > MOST_NAMES:
        names += "; ..."
    return f"{counted(len(settings), 'other')} ({names})"
