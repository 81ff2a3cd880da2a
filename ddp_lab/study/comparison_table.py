"""The table that compares the variants in one part of a study."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp_lab.study import results
from ddp_lab.study.results import METRICS, Metric, median, metric_named
from ddp_lab.study.trials import Outcome
from ddp_lab.study.variants import Study, Variant
from ddp_train.telemetry.pages.tables import Table

Outcomes = dict[str, list[Outcome]]
"""The runs of each variant, by its name."""
PARTS = {
    "variants": "Variants",
    "ladder": "One tip added in each row",
    "leave_one_out": "One tip left out",
}
"""Titles of the tables."""
NOT_RUN_YET = "not run yet"
MEASUREMENTS: dict[str, Callable[[Outcome], float | None]] = {
    "s/epoch": results.epoch_seconds,
    "first epoch s": results.first_epoch,
    "samples/s": results.samples_per_second,
    "test accuracy %": results.accuracy,
    "test loss": METRICS["test.loss"].read,
    "steps": lambda outcome: outcome.summary.get("steps"),
}
"""Column headings of what is shown besides the metric of the study."""
HARDWARE_COLUMNS = {
    "gpu_utilisation": "GPU %",
    "gpu_memory_gib": "GPU memory GiB",
    "process_gpu_memory_gib": "process GPU memory GiB",
    "torch_memory_gib": "torch peak memory GiB",
    "power_watts": "power W",
    "temperature_celsius": "max temperature C",
    "energy_wh": "energy Wh",
    "cpu_cores": "CPU cores",
    "resident_gib": "memory GiB",
}
"""Column headings of the metrics in `figures` of summary.json."""


def metric_of(study: Study, outcomes: Outcomes) -> Metric:
    """The metric that the variants of a study are compared by."""
    runs = [outcome for of_variant in outcomes.values() for outcome in of_variant]
    return metric_named(study.config.metric, runs)


def result_text(variant: Variant, outcomes: Sequence[Outcome]) -> str:
    """The text in the column `result` of a variant."""
    completed = sum(outcome.completed for outcome in outcomes)
    failed = [outcome for outcome in outcomes if not outcome.completed]
    if failed and completed:
        return f"{completed} completed; then {failure_kind(failed[0])}"
    if variant.reason:
        return variant.reason
    if failed:
        return failure_kind(failed[0])
    return "completed" if completed else NOT_RUN_YET


def failure_kind(outcome: Outcome) -> str:
    """The beginning of the reason, which is as long as an error message."""
    kind = re.split("[:;]", outcome.reason)[0]
    return f"{kind}: see below"


@dataclass(frozen=True)
class Row:
    """One variant with what was measured of it."""

    variant: Variant
    outcomes: list[Outcome]
    values: list[float]
    """The metric of the study, for each completed run that has one."""
    is_reference: bool
    """Others are compared with it, and it with none."""

    @property
    def completed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.completed]


@dataclass(frozen=True)
class Column:
    """A column of the table, and what it shows of a row."""

    heading: str
    cell: Callable[[Row], Any]


class Comparison:
    """The variants in one part of a study, each compared with another one."""

    def __init__(self, study: Study, outcomes: Outcomes, part: str) -> None:
        """part: a key of PARTS."""
        self.study = study
        self.outcomes = outcomes
        self.part = part
        self.metric = metric_of(study, outcomes)
        self.effect = "speed-up" if self.metric.is_time else "difference"
        self.figures = self._recorded_figures()
        leading = {"ladder": study.baseline, "leave_one_out": study.config.reference}
        self.leading = leading.get(part)
        """The variant in the first row, to which the others add, or from which they take."""

    def table(self) -> Table:
        columns = self._columns()
        rows = [[column.cell(row) for column in columns] for row in self._rows()]
        shown_first = [
            *(column.heading for column in columns[:3]),
            *(column.heading for column in self._effect_columns()),
            "verdict",
            "compared with",
            "test accuracy %",
            "s/epoch",
            "runs",
        ]
        return Table(
            PARTS[self.part],
            [column.heading for column in columns],
            rows,
            self._note(),
            shown_first,
            kept=(self.metric.label, "result", "verdict"),
        )

    # --- rows -------------------------------------------------------------------------------------

    def _rows(self) -> list[Row]:
        variants = self.study.variants
        leading = [variant for variant in variants if variant.name == self.leading]
        members = [variant for variant in variants if variant.part == self.part]
        return [self._row(variant) for variant in leading + members]

    def _row(self, variant: Variant) -> Row:
        return Row(
            variant=variant,
            outcomes=self.outcomes.get(variant.name, []),
            values=self._values(variant.name),
            is_reference=variant.name in (self.leading, self.study.baseline),
        )

    def _values(self, name: str) -> list[float]:
        return self.metric.values(self.outcomes.get(name, []))

    def _recorded_figures(self) -> list[str]:
        """The hardware metrics that at least one run of the study recorded."""
        recorded: set[str] = set()
        for outcomes in self.outcomes.values():
            for outcome in outcomes:
                recorded |= results.figures(outcome).keys()
        return [name for name in HARDWARE_COLUMNS if name in recorded]

    # --- columns ----------------------------------------------------------------------------------

    def _columns(self) -> list[Column]:
        return [
            Column("variant" if self.part == "variants" else "tip", self._name),
            Column(self.metric.label, lambda row: median(row.values)),
            Column("result", lambda row: result_text(row.variant, row.outcomes)),
            *self._spread_columns(),
            *self._effect_columns(),
            Column("verdict", self._verdict),
            *self._against_columns(),
            *self._measurement_columns(),
            *self._hardware_columns(),
            Column("s/command", lambda row: median([run.seconds for run in row.completed])),
            Column("runs", lambda row: len(row.completed)),
        ]

    def _name(self, row: Row) -> str:
        variant = row.variant
        if self.part == "variants" or not variant.adds or variant.name == self.leading:
            return variant.name
        return f"{variant.name} ({' '.join(variant.adds)})"

    def _spread_columns(self) -> list[Column]:
        if self.study.config.repeats == 1:
            return []
        return [
            Column("lowest", lambda row: min(row.values, default=None)),
            Column("highest", lambda row: max(row.values, default=None)),
        ]

    def _effect_columns(self) -> list[Column]:
        if self.part == "ladder":
            baseline = self.study.baseline
            return [
                Column(f"total {self.effect}", lambda row: self._gain(row, baseline)),
                Column(
                    f"{self.effect} of this tip", lambda row: self._gain(row, row.variant.against)
                ),
            ]
        return [Column(self.effect, lambda row: self._gain(row, row.variant.against))]

    def _gain(self, row: Row, base: str) -> float | None:
        """The gain of a row over the variant named `base`; None if one of them has no value."""
        before = median(self._values(base))
        after = median(row.values)
        if row.is_reference or not before or not after:
            return None
        return self.metric.gain(before, after)

    def _verdict(self, row: Row) -> str | None:
        if row.is_reference:
            return None
        base = self._values(row.variant.against)
        return results.verdict(self.metric, base, row.values) or None

    def _against_columns(self) -> list[Column]:
        """Names of the variants compared with, where they are not all the baseline."""
        if self.part != "variants" or not self.study.config.against:
            return []
        return [
            Column("compared with", lambda row: None if row.is_reference else row.variant.against)
        ]

    def _measurement_columns(self) -> list[Column]:
        columns = []
        for heading, read in MEASUREMENTS.items():
            is_constant = heading == "steps" and self.study.config.layout != "growth"
            if heading != self.metric.label and not is_constant:
                columns.append(_median_column(heading, read))
        all_outcomes = [outcome for outcomes in self.outcomes.values() for outcome in outcomes]
        for name in results.own_metrics(all_outcomes):
            heading = f"test {name}"
            if heading != self.metric.label:
                columns.append(_median_column(heading, partial(results.own_metric, name)))
        return columns

    def _hardware_columns(self) -> list[Column]:
        columns = []
        for name in self.figures:
            read = partial(results.figure, name)
            columns.append(_median_column(HARDWARE_COLUMNS[name], read))
        return columns

    # --- the text below ---------------------------------------------------------------------------

    def _note(self) -> str:
        config = self.study.config
        match self.part:
            case "ladder":
                note = (
                    f"Each row includes the tips of the rows above. 'total {self.effect}'"
                    f" compares with {self.study.baseline}. '{self.effect} of this tip' and the"
                    " verdict compare with the nearest row above that was run."
                )
            case "leave_one_out":
                note = (
                    f"Each row compares {config.reference} without one tip to {config.reference}"
                    " itself: a speed-up below 1 means that the tip helps."
                )
            case _:
                elsewhere = ", unless the column says otherwise" if config.against else ""
                note = f"Compared with {self.study.baseline}{elsewhere}."
        if not self.figures:
            note += " These runs recorded no utilisation or memory."
        return note


def _median_column(heading: str, read: Callable[[Outcome], float | None]) -> Column:
    """The median over the completed runs that have the measurement."""

    def cell(row: Row) -> float | None:
        measured = [read(outcome) for outcome in row.completed]
        return median([value for value in measured if value is not None])

    return Column(heading, cell)
