"""Runs side by side: what differs, metrics and curves, and whether a difference is more than
noise."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from ddp_train.telemetry.pages.noise import Welch, welch
from ddp_train.telemetry.pages.report import Report
from ddp_train.telemetry.pages.run_files import COMPLETED, RunFiles, as_typed, best
from ddp_train.telemetry.pages.run_page import FIRST_SCORES, duration
from ddp_train.telemetry.pages.run_plots import score_plots
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import PERCENT, shown_metric
from ddp_train.text import counted, shown

SEED = "seed"
OF_THE_RUN = ("run_dir", "name", "reasons", "process_counts", "process_range")
"""Keys that differ between any two runs, or say what others say."""
VERSIONS = ("python", "torch", "torchvision", "numpy", "ddp-train")
NOT_SET = "(not set)"
SIGMAS = 2.0
"""A difference below so many standard errors of the scores is what another test set of that size
would make."""


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """The last parts of their paths, as many as tell them apart."""
    parts = [run.run_dir.absolute().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(run.run_dir) for run in runs]


def main_metric(runs: Sequence[RunFiles]) -> str:
    """What they are compared by: the metric of most interest that all have, else the loss."""
    return next((name for name in FIRST_SCORES if all(name in run.scores for run in runs)), "loss")


def last_score(run: RunFiles, metric: str) -> float | None:
    """At the end: of the test set if that was scored, else of the last evaluation."""
    test = run.summary.get("test") or {}
    if isinstance(test.get(metric), int | float):
        return float(test[metric])
    known = [
        line[metric] for line in run.of(run.split) if isinstance(line.get(metric), int | float)
    ]
    return float(known[-1]) if known else None


def differences(runs: Sequence[RunFiles], names: Sequence[str]) -> Table:
    """A row for each setting, version and so on that is not the same in all of them."""
    facts = [_facts(run) for run in runs]
    configs = [as_typed(run.config) for run in runs]
    rows = []
    for key in list(dict.fromkeys(key for config in configs for key in config)):
        values = [
            shown(config[key]).replace("\n", "\\n") if key in config else NOT_SET
            for config in configs
        ]
        if len(set(values)) > 1 and key.partition(".")[0] not in OF_THE_RUN:
            rows.append([key, *values])
    for name in facts[0]:
        values = [fact[name] for fact in facts]
        if len({*values} - {None}) > 1:
            rows.append([name, *("unknown" if value is None else str(value) for value in values)])
    if rows:
        note = ""
    else:
        note = "Config, code, versions and hardware are the same, as far as they were recorded."
    return Table("What differs", ["", *names], rows, note)


def _facts(run: RunFiles) -> dict[str, Any]:
    """None for what was not recorded: earlier versions wrote less."""
    last = (run.commands or [{}])[-1]
    summary = run.summary
    machine = str(last.get("hardware") or "")
    cores = re.search(
        r"(\d+) cores? ", machine
    )  # those of a trial, where trials share a host: no other hardware
    versions = {**(last.get("versions") or {}), "torch": summary.get("torch")}
    return {
        "code (git revision)": last.get("git_revision") or summary.get("git_revision"),
        "hardware": machine.replace(cores[0], "") if cores else machine or None,
        "CPU cores that it could use": cores and cores[1],
        "host": last.get("host"),
        **{f"{name} (version)": versions.get(name) for name in VERSIONS},
        "restarts after a lost rank": len(summary.get("recoveries") or []),
        "changes of the number of processes": len(summary.get("resizes") or []),
    }


def scores(runs: Sequence[RunFiles], names: Sequence[str]) -> Table:
    """A row for each run: its metrics at the end and at their best, its speed and its time."""
    metrics = [main_metric(runs)]
    metrics += ["loss"] if metrics != ["loss"] and any("loss" in run.scores for run in runs) else []
    columns = ["run"]
    for metric in metrics:
        unit = " %" if metric in PERCENT else ""
        columns += [f"{metric}{unit}, last", f"{metric}{unit}, best", f"best {metric} at step"]
    rows = []
    for name, run in zip(names, runs, strict=True):
        row: list[Any] = [name]
        for metric in metrics:
            scale = 100.0 if metric in PERCENT else 1.0
            last = last_score(run, metric)
            top = best(run.of(run.split), metric, run.better(metric))
            row += [last and scale * last, top and scale * top[metric], top and top["step"]]
        seconds = run.summary.get("seconds")
        rows.append(
            [
                *row,
                run.summary.get("steps"),
                run.summary.get("samples_per_second"),
                seconds and duration(seconds),
                run.state,
            ]
        )
    splits = ", ".join(dict.fromkeys(run.split for run in runs))
    note = (
        "last: at the end, of the test set where that was scored. best: of the evaluations"
        f" ({splits})."
    )
    return Table("Runs", [*columns, "steps", "samples/s", "training time", "state"], rows, note)


def groups_of(runs: Sequence[RunFiles], names: Sequence[str]) -> list[tuple[str, list[RunFiles]]]:
    """Runs whose settings differ in the seed alone are one group, under the name of its first."""
    found: dict[tuple[tuple[str, str], ...], tuple[str, list[RunFiles]]] = {}
    for name, run in zip(names, runs, strict=True):
        config = {
            key: value
            for key, value in as_typed(run.config).items()
            if key.partition(".")[0] not in OF_THE_RUN
        }
        config.pop(SEED, None)
        key = tuple(sorted((key, shown(value)) for key, value in config.items()))
        found.setdefault(key, (name, []))[1].append(run)
    return [*found.values()]


def verdicts(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Sentences: whether each group differs from the first by more than noise."""
    groups = groups_of(runs, names)
    metric = main_metric(runs)
    if len(groups) == 1:
        values = _values(runs, metric)
        if len(values) < 2:
            return ["The runs differ in their seed at most."]
        spread = shown_metric(metric, statistics.stdev(values))
        return [
            f"The runs differ in their seed at most; {metric} has a standard deviation of {spread}"
            " among them."
        ]
    (first, ground), *others = groups
    return [_verdict(first, ground, name, group, metric) for name, group in others]


def _verdict(
    first: str, ground: Sequence[RunFiles], name: str, group: Sequence[RunFiles], metric: str
) -> str:
    one = _values(ground, metric)
    other = _values(group, metric)
    pair = f"{name} against {first}"
    if not one or not other:
        return f"{pair}: one of them has no {metric}, and they cannot be compared."
    difference = statistics.fmean(other) - statistics.fmean(one)
    by = f"{metric} {_signed(metric, difference)}"
    test = welch(one, other)
    if test is None:
        return (
            f"{pair}: {by}."
            f" {_from_one(ground, group, difference, metric, min(len(one), len(other)))}"
        )
    return f"{pair}: {by}, {_tested(test, metric, len(one), len(other))}"


def _signed(metric: str, value: float) -> str:
    if metric in PERCENT:
        return f"{100 * value:+.2f} points"
    return f"{value:+.4g}"


def _tested(test: Welch, metric: str, runs: int, others: int) -> str:
    low = _signed(metric, test.low)
    high = _signed(metric, test.high)
    between = (
        f"95 % interval {low} to {high}, p = {test.p:.2g}, Welch's t-test of {runs} and {others}"
        " runs"
    )
    return f"{'more than noise' if test.is_more_than_noise else 'within the noise'} ({between})."


def _from_one(
    ground: Sequence[RunFiles],
    group: Sequence[RunFiles],
    difference: float,
    metric: str,
    fewest: int,
) -> str:
    """Without repeated runs: what the size of the test set alone makes."""
    text = (
        f"Whether that is more than noise cannot be told from {counted(fewest, 'run')} of each;"
        " repeat both with "
    )
    text += "other seeds (seed=0,1,2)."
    if metric != "accuracy":
        return text
    errors = [_standard_error(run) for run in (ground[0], group[0])]
    known = [error for error in errors if error is not None]
    if len(known) < 2:
        return text
    error = math.hypot(*known)
    often = "less" if abs(difference) < SIGMAS * error else "more"
    return (
        f"{text} The number of samples that were scored alone makes {100 * error:.2f} points"
        f" (standard error of the difference of two independent scores); this is {often} than twice"
        " that."
    )


def _standard_error(run: RunFiles) -> float | None:
    """Of an accuracy: that of a share of so many samples."""
    found = run.summary.get("test") or (run.of(run.split) or [{}])[-1]
    accuracy = found.get("accuracy")
    samples = found.get("samples")
    if not isinstance(accuracy, int | float) or not samples:
        return None
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / samples)


def _values(runs: Sequence[RunFiles], metric: str) -> list[float]:
    return [value for run in runs if (value := last_score(run, metric)) is not None]


def compare_page(runs: Sequence[RunFiles], command: str) -> Report:
    """runs: two or more; the others are compared with the first."""
    names = names_of(runs)
    unfinished = [name for name, run in zip(names, runs, strict=True) if run.state != COMPLETED]
    findings = verdicts(runs, names)
    tables = [scores(runs, names), differences(runs, names)]
    if of_data := [row[0] for row in tables[1].rows if row[0].startswith("data.")]:
        findings.append(
            f"The data differ ({', '.join(of_data)}): the scores may be of other samples."
        )
    findings += [f"Not completed: {', '.join(unfinished)}."] if unfinished else []
    plots = score_plots([*zip(names, runs, strict=True)])
    return Report(
        "Comparison", "", [tables[0], *plots, tables[1]], commands=[command], findings=findings
    )
