"""The report of a study of named variants, from the outcomes of its runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ddp_lab.study import results
from ddp_lab.study.provenance import provenance
from ddp_lab.study.request import Request
from ddp_lab.study.results import METRICS, Metric, median
from ddp_lab.study.trials import Outcome
from ddp_lab.study.variants import NEEDS_GPU, Study, Variant
from ddp_train.telemetry.pages.charts import Axis, Bar, Curve, bars, curves
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table
from ddp_train.text import counted

Outcomes = dict[str, list[Outcome]]
PARTS = {
    "variants": "Variants",
    "ladder": "One tip added in each row",
    "leave_one_out": "One tip left out",
}
NOT_RUN_YET = "not run yet"
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


def build_report(request: Request, study: Study, outcomes: Outcomes, load_before: float) -> Report:
    """The report of the runs made so far."""
    config = study.config
    metric = METRICS[study.config.metric]
    sections: list[Table | Plot] = []
    if config.layout == "runs":
        sections.append(_runs(study, outcomes))
    else:
        parts = {variant.part for variant in study.variants}
        sections += [_comparison(study, outcomes, metric, part) for part in PARTS if part in parts]
        sections += [_agreement(study, outcomes)] if config.agreement else []
    failed = [
        [v.name, o.reason]
        for v in study.variants
        for o in outcomes.get(v.name, [])
        if not o.completed
    ]
    sections += [Table("Failed", ["variant", "reason"], failed)] if failed else []
    sections += _published(config.published)
    sections += _plots(study, outcomes, metric)
    known = {
        "Data": str(study.first.data.name),
        "Device": study.first.device,
        "Repeats": str(config.repeats),
    }
    return Report(
        config.title or f"Study: {request.name}",
        f"{config.about.strip()}\n\n{_method(study)}",
        sections,
        known | provenance(load_before),
        [
            request.command,
            *(
                f"{request.program.command(v.overrides)}  # {v.name}"
                for v in study.variants
                if not v.reason
            ),
        ],
    )


def _method(study: Study) -> str:
    """The text on how runs were measured, and what the verdicts mean."""
    repeats = study.config.repeats
    epochs = "epoch: the median epoch" + (
        ", the first left out" if study.first.train.epochs > 1 else ""
    )
    rounds = (
        ", in rounds of alternating order; the tables show the median, the lowest and the"
        " highest run"
    )
    text = (
        f"Each run is a separate command, {counted(repeats, 'run')} of each"
        f" variant{rounds if repeats > 1 else ''}. "
    )
    text += f"s/{epochs}, without evaluation. "
    if repeats < results.LEAST_RUNS:
        return text + f"A verdict needs at least {results.LEAST_RUNS} runs of each variant."
    chance = results.false_positive_rate(repeats, repeats)
    compared = sum(
        1 for variant in study.variants if variant.name != study.baseline and not variant.reason
    )
    return (
        text
        + "A variant is faster, slower, better or worse only if this holds for each of its runs"
        " against each run of the variant that it is compared with. For two equal variants this"
        f" happens by chance in {chance:.1%} of cases, so about {chance * compared:.1f} of the"
        f" {compared} verdicts here may be false. Otherwise the verdict is 'no effect within the"
        " noise'."
    )


def result(variant: Variant, outcomes: Sequence[Outcome]) -> str:
    """The text in the column `result` of a variant."""
    failed = next((_kind(outcome) for outcome in outcomes if not outcome.completed), "")
    done = sum(outcome.completed for outcome in outcomes)
    if failed and done:
        return f"{done} completed; then {failed}"
    return variant.reason or failed or ("completed" if done else NOT_RUN_YET)


def _kind(outcome: Outcome) -> str:
    """Of a failure, whose reason is as long as an error message."""
    return f"{re.findall('[^:;]*', outcome.reason)[0]}: see below"


def _comparison(study: Study, outcomes: Outcomes, metric: Metric, part: str) -> Table:
    """A row for each variant of a part: the metric, its gain over the baseline, and all other
    measurements."""
    rows_of = [variant for variant in study.variants if variant.part == part]
    leading = {"ladder": study.baseline, "leave_one_out": study.config.reference}.get(part)
    rows_of = [variant for variant in study.variants if variant.name == leading] + rows_of
    effect = "speed-up" if metric.is_time else "difference"
    effects = {
        "variants": [effect],
        "ladder": [f"total {effect}", f"{effect} of this tip"],
        "leave_one_out": [effect],
    }
    others = {label: read for label, read in _OTHERS.items() if label != metric.label}
    if study.config.layout != "growth":
        others.pop("steps")
    spread = {"lowest": min, "highest": max} if study.config.repeats > 1 else {}
    figures = [
        name
        for name in HARDWARE_COLUMNS
        if any(name in _figures(o) for of in outcomes.values() for o in of)
    ]
    columns = [
        "variant" if part == "variants" else "tip",
        metric.label,
        "result",
        *spread,
        *effects[part],
        "verdict",
    ]
    columns += ["compared with"] * bool(part == "variants" and study.config.against)
    columns += [*others, *(HARDWARE_COLUMNS[name] for name in figures), "s/command", "runs"]
    rows = []
    for variant in rows_of:
        done = [outcome for outcome in outcomes.get(variant.name, []) if outcome.completed]
        values = metric.values(done)
        is_first = variant.name in (leading, study.baseline)
        bases = [study.baseline, variant.against] if part == "ladder" else [variant.against]
        gains = [_gain(metric, outcomes, base, values) if not is_first else None for base in bases]
        if not is_first:
            verdict = results.verdict(
                metric, metric.values(outcomes.get(variant.against, [])), values
            )
        else:
            verdict = ""
        if part != "variants" and variant.adds and variant.name != leading:
            adds = f" ({' '.join(variant.adds)})"
        else:
            adds = ""
        rows.append(
            [
                variant.name + adds,
                median(values),
                result(variant, outcomes.get(variant.name, [])),
                *(pick(values, default=None) for pick in spread.values()),
                *gains,
                verdict or None,
                *([None if is_first else variant.against] if "compared with" in columns else []),
                *(median(_all(read, done)) for read in others.values()),
                *(
                    median([_figures(o)[name] for o in done if name in _figures(o)])
                    for name in figures
                ),
                median([outcome.seconds for outcome in done]),
                len(done),
            ]
        )
    elsewhere = ", unless the column says otherwise" if study.config.against else ""
    against = {
        "variants": f"Compared with {study.baseline}{elsewhere}.",
        "ladder": (
            f"Each row includes the tips of the rows above. Total {effect}: compared with"
            f" {study.baseline}; of this tip, and the verdict: compared with the nearest row above"
            " that was run."
        ),
        "leave_one_out": (
            f"Each row is {study.config.reference} without one tip, compared with"
            f" {study.config.reference}: a speed-up below 1 means that the tip helps."
        ),
    }
    if not figures:
        against[part] += " These runs recorded no utilisation or memory."
    first = [
        *columns[:3],
        *effects[part],
        "verdict",
        "compared with",
        "test accuracy %",
        "s/epoch",
        "runs",
    ]
    return Table(
        PARTS[part], columns, rows, against[part], first, kept=(metric.label, "result", "verdict")
    )


_OTHERS: dict[str, Any] = {
    "s/epoch": results.epoch_seconds,
    "first epoch s": results.first_epoch,
    "samples/s": results.samples_per_second,
    "test accuracy %": results.accuracy,
    "test loss": METRICS["test.loss"].read,
    "steps": lambda outcome: outcome.summary.get("steps"),
}


def _all(read: Any, outcomes: Sequence[Outcome]) -> list[float]:
    return [value for outcome in outcomes if (value := read(outcome)) is not None]


def _figures(outcome: Outcome) -> dict[str, float]:
    """The hardware metrics of a run, {} if it recorded none."""
    return {
        name: value
        for name, value in (outcome.summary.get("figures") or {}).items()
        if value is not None
    }


def _gain(metric: Metric, outcomes: Outcomes, base: str, mine: list[float]) -> float | None:
    before = median(metric.values(outcomes.get(base, [])))
    after = median(mine)
    return metric.gain(before, after) if before and after else None


def _agreement(study: Study, outcomes: Outcomes) -> Table:
    """The differences of losses and weights between variants that must agree."""
    rows = []
    kept = {variant.name for variant in study.variants}
    for name, other in study.config.agreement.items():
        if not {name, other} <= kept:
            continue
        mine, theirs = (
            next((o for o in outcomes.get(n, []) if o.completed), None) for n in (name, other)
        )
        loss = weight = None
        if mine and theirs:
            loss = results.largest_difference(results.losses(mine), results.losses(theirs))
            weight = results.largest_weight_difference(mine.run_dir, theirs.run_dir)
        rows.append([name, other, loss, weight])
    return Table(
        "Agreement",
        [
            "variant",
            "compared with",
            "largest difference of the training loss",
            "largest difference of the weights",
        ],
        rows,
        "Losses at every step that both logged; weights at the end. 0: equal bit for bit. Rounding"
        " differences grow with the number of steps, and jump where they change which side of a"
        " maximum or a ReLU is taken; with tuning.precision=fp64 they are below 1e-12. Batch norm"
        " over each process's own samples is a different computation, which differs in any"
        " precision.",
    )


def _runs(study: Study, outcomes: Outcomes) -> Table:
    """A row for each run with its values of the grid, sorted by the time of an epoch."""
    keys = list(dict.fromkeys(key for variant in study.variants for key in variant.values))
    columns = [
        "run",
        "result",
        "epochs",
        "loss",
        "test accuracy %",
        "s/epoch",
        "s/run",
        *(key.rpartition(".")[2] for key in keys),
    ]
    rows: list[tuple[float, list[Any]]] = []
    for variant in study.variants:
        values = [_number(variant.values.get(key)) for key in keys]
        found = outcomes.get(variant.name, [])
        for number, outcome in enumerate(found if any(o.completed for o in found) else found[:1]):
            run = f"{variant.name}, {number + 1}" if len(found) > 1 else variant.name
            if outcome.completed:
                seconds = results.epoch_seconds(outcome)
                loss = list(results.losses(outcome).values())[-1:]
                rows.append(
                    (
                        seconds or 0.0,
                        [
                            run,
                            "completed",
                            outcome.summary.get("epochs"),
                            *(loss or [None]),
                            results.accuracy(outcome),
                            seconds,
                            outcome.summary.get("seconds"),
                            *values,
                        ],
                    )
                )
            else:
                rows.append((float("inf"), [run, _kind(outcome), *[None] * 5, *values]))
        if not found:
            rows.append((float("inf"), [variant.name, result(variant, []), *[None] * 5, *values]))
    ordered = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    note = "Sorted by seconds per epoch. loss: mean of the last logging interval of training."
    return Table("Runs", columns, ordered, note)


def _number(text: str | None) -> Any:
    return int(text) if text and text.isdigit() else text


def _published(table: dict[str, Any]) -> list[Table]:
    """The published table in the study's file, if there is one."""
    if not table:
        return []
    return [
        Table(
            table["title"],
            list(table["columns"]),
            [list(row) for row in table["rows"]],
            table.get("note", ""),
        )
    ]


def _plots(study: Study, outcomes: Outcomes, metric: Metric) -> list[Plot]:
    if study.config.layout == "growth":
        return [
            _growth(study, outcomes, metric),
            _growth(study, outcomes, METRICS["epoch_seconds"]),
        ]
    shown = []
    for variant in study.variants:
        values = metric.values(outcomes.get(variant.name, []))
        if variant.reason:
            why = NEEDS_GPU if variant.reason == NEEDS_GPU else "not run"
        else:
            why = ""
        if values:
            text = ""
        else:
            text = why or ("failed" if outcomes.get(variant.name) else NOT_RUN_YET)
        shown.append(
            Bar(
                variant.name,
                median(values),
                min(values, default=None),
                max(values, default=None),
                text,
            )
        )
    base = median(metric.values(outcomes.get(study.baseline, [])))
    caption = f"Dotted line: {study.baseline}. Whiskers: lowest and highest run."
    plots = [
        Plot(metric.label, bars(shown, Axis(metric.label, whole=metric.is_time), base), caption)
    ]
    if study.config.agreement:
        plots.append(_losses(study, outcomes))
    return plots


def _losses(study: Study, outcomes: Outcomes) -> Plot:
    """A plot of the training loss of all variants."""
    lines = []
    for variant in study.variants:
        found = [
            results.losses(outcome)
            for outcome in outcomes.get(variant.name, [])
            if outcome.completed
        ]
        if found:
            steps = sorted(set.intersection(*(set(one) for one in found)))
            of = [[one[step] for one in found] for step in steps]
            low = [min(values) for values in of]
            high = [max(values) for values in of]
            lines.append(
                Curve(variant.name, steps, [median(values) or 0.0 for values in of], low, high)
            )
    caption = "Curves that agree cover each other; the table above has their differences."
    return Plot(
        "Training loss", curves(lines, Axis("optimizer step"), Axis("loss", log=True)), caption
    )


def _growth(study: Study, outcomes: Outcomes, metric: Metric) -> Plot:
    """A plot of the metric over the first key of the grid, a line for each variant."""
    along = study.config.grid[0].partition("=")[0]
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for variant in study.variants:
        values = metric.values(outcomes.get(variant.name, []))
        if values:
            lines.setdefault(variant.group, []).append((float(variant.values[along]), values))
    drawn = []
    for name, points in lines.items():
        points.sort()
        x = [at for at, _ in points]
        of = [values for _, values in points]
        low = [min(values) for values in of]
        high = [max(values) for values in of]
        drawn.append(Curve(name, x, [median(values) or 0.0 for values in of], low, high))
    ticks = sorted({at for points in lines.values() for at, _ in points})
    axis = Axis(along.rpartition(".")[2].replace("_", " "), log=True, ticks=ticks)
    return Plot(
        metric.label, curves(drawn, axis, Axis(metric.label)), "Bands: lowest to highest run."
    )
