"""The report of a study of named variants, from the outcomes of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_lab.study import results
from ddp_lab.study.comparison_table import (
    NOT_RUN_YET,
    PARTS,
    Comparison,
    Outcomes,
    failure_kind,
    metric_of,
    result_text,
)
from ddp_lab.study.provenance import provenance
from ddp_lab.study.request import Request
from ddp_lab.study.results import METRICS, Metric, median
from ddp_lab.study.trials import Outcome
from ddp_lab.study.variants import NEEDS_GPU, Study, Variant
from ddp_train.telemetry.pages.charts import Axis, Bar, Curve, bars, curves
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table
from ddp_train.text import counted

DATA_PARALLEL = "dp"
"""The variant that runs torch's DataParallel."""
Point = tuple[float, list[float]]
"""x, and the values of all runs there."""


def build_report(request: Request, study: Study, outcomes: Outcomes, load_before: float) -> Report:
    """The report of the runs made so far.

    load_before: load average of the machine before the first run.
    """
    config = study.config
    facts = {
        "Data": str(study.first.data.name),
        "Device": study.first.device,
        "Repeats": str(config.repeats),
    }
    commands = [
        f"{request.program.command(variant.overrides)}  # {variant.name}"
        for variant in study.variants
        if not variant.reason
    ]
    return Report(
        title=config.title or f"Study: {request.name}",
        intro=f"{config.about.strip()}\n\n{_method(study)}",
        sections=[*_tables(study, outcomes), *_plots(study, outcomes)],
        facts=facts | provenance(load_before),
        commands=[request.command, *commands],
        brief=in_short(study, outcomes) if config.agreement else None,
    )


def _method(study: Study) -> str:
    """How runs were measured, and what the verdicts mean."""
    repeats = study.config.repeats
    text = f"Each run is a separate command, {counted(repeats, 'run')} of each variant"
    if repeats > 1:
        text += (
            ", in rounds of alternating order; the tables show the median, the lowest and the"
            " highest run"
        )
    text += ". s/epoch: the median epoch"
    if study.first.train.most_epochs != 1:
        text += ", the first left out"
    return f"{text}, without evaluation. {_meaning_of_verdicts(study)}"


def _meaning_of_verdicts(study: Study) -> str:
    repeats = study.config.repeats
    if repeats < results.LEAST_RUNS:
        return f"A verdict needs at least {results.LEAST_RUNS} runs of each variant."
    chance = results.false_positive_rate(repeats, repeats)
    compared = [
        variant
        for variant in study.variants
        if variant.name != study.baseline and not variant.reason
    ]
    return (
        "A variant is faster, slower, better or worse only if this holds for each of its runs"
        " against each run of the variant that it is compared with. For two equal variants this"
        f" happens by chance in {chance:.1%} of cases, so about {chance * len(compared):.1f} of the"
        f" {len(compared)} verdicts here may be false. Otherwise the verdict is 'no effect within"
        " the noise'."
    )


# --- tables ---------------------------------------------------------------------------------------


def _tables(study: Study, outcomes: Outcomes) -> list[Table]:
    config = study.config
    tables = []
    if config.layout == "runs":
        tables.append(_runs(study, outcomes))
    else:
        parts = {variant.part for variant in study.variants}
        tables += [Comparison(study, outcomes, part).table() for part in PARTS if part in parts]
        if config.agreement:
            tables.append(_agreement(study, outcomes))
    failures = _failures(study, outcomes)
    if failures:
        tables.append(Table("Failed", ["variant", "reason"], failures))
    if config.published:
        tables.append(_published(config.published))
    return tables


def _failures(study: Study, outcomes: Outcomes) -> list[list[str]]:
    rows = []
    for variant in study.variants:
        for outcome in outcomes.get(variant.name, []):
            if not outcome.completed:
                rows.append([variant.name, outcome.reason])
    return rows


def _published(table: dict[str, Any]) -> Table:
    """The published table in the study's file."""
    rows = [list(row) for row in table["rows"]]
    return Table(table["title"], list(table["columns"]), rows, table.get("note", ""))


def _agreement(study: Study, outcomes: Outcomes) -> Table:
    """The differences of losses and weights between variants that must agree."""
    columns = [
        "variant",
        "compared with",
        "largest difference of the training loss",
        "largest difference of the weights",
    ]
    names = {variant.name for variant in study.variants}
    rows: list[list[Any]] = []
    for name, other in study.config.agreement.items():
        if name not in names or other not in names:
            continue
        mine = _first_completed(outcomes, name)
        theirs = _first_completed(outcomes, other)
        loss = None
        weight = None
        if mine and theirs:
            loss = results.largest_difference(results.losses(mine), results.losses(theirs))
            weight = results.largest_weight_difference(mine.run_dir, theirs.run_dir)
        rows.append([name, other, loss, weight])
    note = (
        "Compares the losses of every step that both variants logged, and the weights at the"
        " end. 0 means equal bit for bit. Differences by rounding grow with the number of steps,"
        " and jump where they change the side of a maximum or a ReLU; with tuning.precision=fp64"
        " they are below 1e-12. Batch norm over each process's own samples is a different"
        " computation, whose result differs in any precision."
    )
    return Table("Agreement", columns, rows, note)


def in_short(study: Study, outcomes: Outcomes) -> Table:
    """The numbers of most interest of each variant: a table that fits a terminal."""
    metric = metric_of(study, outcomes)
    medians = {
        variant.name: median(metric.values(outcomes.get(variant.name, [])))
        for variant in study.variants
    }
    base = study.baseline
    base_name = base
    if medians.get(DATA_PARALLEL):
        base = DATA_PARALLEL
        base_name = "DataParallel"
    effect = f"difference from {base_name}"
    if metric.is_time:
        effect = f"times {base_name}"
    rows: list[list[Any]] = []
    for variant in study.variants:
        value = medians[variant.name]
        before = medians.get(base)
        gain = None
        if value and before:
            gain = metric.gain(before, value)
        agreement = _weight_difference(study, outcomes, variant.name)
        result = result_text(variant, outcomes.get(variant.name, []))
        rows.append([variant.name, value, gain, *agreement, result.partition(":")[0]])
    columns = ["variant", metric.label, effect, "agreement", "with", "result"]
    note = (
        f"{effect}: compares the medians. agreement: the largest difference of the weights at the"
        " end; 0 means equal bit for bit."
    )
    return Table("In short", columns, rows, note, kept=columns[1:4])


def _weight_difference(
    study: Study, outcomes: Outcomes, name: str
) -> tuple[float | None, str | None]:
    """The difference of a variant's weights, and the variant with which they should agree.

    None for both if one of the two has not completed.
    """
    other = study.config.agreement.get(name, "")
    run = _first_completed(outcomes, name)
    other_run = _first_completed(outcomes, other)
    if run is None or other_run is None:
        return None, None
    difference = results.largest_weight_difference(run.run_dir, other_run.run_dir)
    if difference is None:
        return None, None
    return difference, other


def _first_completed(outcomes: Outcomes, name: str) -> Outcome | None:
    completed = [outcome for outcome in outcomes.get(name, []) if outcome.completed]
    return completed[0] if completed else None


# --- the table of runs ----------------------------------------------------------------------------

RUN_COLUMNS = ["run", "result", "epochs", "loss", "test accuracy %", "s/epoch", "s/run"]


@dataclass(frozen=True)
class RunRow:
    """A row of the table of runs."""

    name: str
    result: str
    outcome: Outcome | None
    """None if the run did not complete."""
    grid_values: list[Any]

    @property
    def order(self) -> float:
        """Seconds of an epoch; runs that did not complete come last."""
        if self.outcome is None:
            return math.inf
        return results.epoch_seconds(self.outcome) or 0.0

    def cells(self) -> list[Any]:
        if self.outcome is None:
            measured = [None] * 5
        else:
            losses = list(results.losses(self.outcome).values())
            measured = [
                self.outcome.summary.get("epochs"),
                losses[-1] if losses else None,
                results.accuracy(self.outcome),
                results.epoch_seconds(self.outcome),
                self.outcome.summary.get("seconds"),
            ]
        return [self.name, self.result, *measured, *self.grid_values]


def _runs(study: Study, outcomes: Outcomes) -> Table:
    """A row for each run with its values of the grid, sorted by the time of an epoch."""
    keys = list(dict.fromkeys(key for variant in study.variants for key in variant.values))
    rows: list[RunRow] = []
    for variant in study.variants:
        grid_values = [_number(variant.values.get(key)) for key in keys]
        rows += _runs_of(variant, outcomes.get(variant.name, []), grid_values)
    rows.sort(key=lambda row: row.order)
    columns = [*RUN_COLUMNS, *(key.rpartition(".")[2] for key in keys)]
    note = "Sorted by seconds per epoch. loss: mean of the last logging interval of training."
    return Table("Runs", columns, [row.cells() for row in rows], note)


def _runs_of(variant: Variant, outcomes: list[Outcome], grid_values: list[Any]) -> list[RunRow]:
    """The rows of one variant: one row if none of its runs completed."""
    if not outcomes:
        return [RunRow(variant.name, result_text(variant, []), None, grid_values)]
    shown = outcomes
    if not any(outcome.completed for outcome in outcomes):
        shown = outcomes[:1]
    rows = []
    for number, outcome in enumerate(shown, 1):
        name = f"{variant.name}, {number}" if len(outcomes) > 1 else variant.name
        if outcome.completed:
            rows.append(RunRow(name, "completed", outcome, grid_values))
        else:
            rows.append(RunRow(name, failure_kind(outcome), None, grid_values))
    return rows


def _number(text: str | None) -> Any:
    return int(text) if text and text.isdigit() else text


# --- plots ----------------------------------------------------------------------------------------


def _plots(study: Study, outcomes: Outcomes) -> list[Plot]:
    metric = metric_of(study, outcomes)
    if study.config.layout == "growth":
        return [
            _growth(study, outcomes, metric),
            _growth(study, outcomes, METRICS["epoch_seconds"]),
        ]
    plots = [_bars(study, outcomes, metric)]
    if study.config.agreement:
        plots.append(_losses(study, outcomes))
    return plots


def _bars(study: Study, outcomes: Outcomes, metric: Metric) -> Plot:
    """A bar for each variant, those without a value too."""
    drawn = [_bar(variant, outcomes, metric) for variant in study.variants]
    base = median(metric.values(outcomes.get(study.baseline, [])))
    chart = bars(drawn, Axis(metric.label, whole=metric.is_time), base)
    caption = f"Dotted line: {study.baseline}. Whiskers: lowest and highest run."
    return Plot(metric.label, chart, caption)


def _bar(variant: Variant, outcomes: Outcomes, metric: Metric) -> Bar:
    values = metric.values(outcomes.get(variant.name, []))
    if values:
        return Bar(variant.name, median(values), min(values), max(values))
    if variant.reason == NEEDS_GPU:
        text = NEEDS_GPU
    elif variant.reason:
        text = "not run"
    elif outcomes.get(variant.name):
        text = "failed"
    else:
        text = NOT_RUN_YET
    return Bar(variant.name, None, text=text)


def _losses(study: Study, outcomes: Outcomes) -> Plot:
    """The training loss of all variants, at the steps that all runs of a variant logged."""
    lines = []
    for variant in study.variants:
        completed = [outcome for outcome in outcomes.get(variant.name, []) if outcome.completed]
        losses = [results.losses(outcome) for outcome in completed]
        if losses:
            common_steps = set.intersection(*(set(by_step) for by_step in losses))
            points = [(step, [by_step[step] for by_step in losses]) for step in common_steps]
            lines.append(_band(variant.name, points))
    caption = "Curves that agree cover each other; the table above has their differences."
    chart = curves(lines, Axis("optimizer step"), Axis("loss", log=True))
    return Plot("Training loss", chart, caption)


def _growth(study: Study, outcomes: Outcomes, metric: Metric) -> Plot:
    """The metric over the first key of the grid, a line for each variant."""
    key = study.config.grid[0].partition("=")[0]
    points_by_line: dict[str, list[Point]] = {}
    ticks: set[float] = set()
    for variant in study.variants:
        values = metric.values(outcomes.get(variant.name, []))
        if values:
            x = float(variant.values[key])
            ticks.add(x)
            points_by_line.setdefault(variant.group, []).append((x, values))
    lines = [_band(name, points) for name, points in points_by_line.items()]
    heading = key.rpartition(".")[2].replace("_", " ")
    chart = curves(lines, Axis(heading, log=True, ticks=sorted(ticks)), Axis(metric.label))
    return Plot(metric.label, chart, "Bands: lowest to highest run.")


def _band(name: str, points: Sequence[Point]) -> Curve:
    """The median of the values at each x, with a band from the lowest to the highest."""
    points = sorted(points)
    return Curve(
        name,
        [x for x, _ in points],
        [median(values) or 0.0 for _, values in points],
        [min(values) for _, values in points],
        [max(values) for _, values in points],
    )
