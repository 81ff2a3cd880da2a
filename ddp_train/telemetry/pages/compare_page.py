"""Runs side by side: what differs, scores and curves, and whether a difference is noise."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from ddp_train.scored_sets import TEST, VALIDATION, in_order, of_kind
from ddp_train.telemetry.metrics_log import Line
from ddp_train.telemetry.pages.noise import welch
from ddp_train.telemetry.pages.report import Report
from ddp_train.telemetry.pages.run_files import (
    COMPLETED,
    RunFiles,
    as_typed,
    main_metric,
)
from ddp_train.telemetry.pages.run_page import duration
from ddp_train.telemetry.pages.run_plots import own_plots, score_plots
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import (
    column_of,
    in_column,
    is_percent,
    shown_metric,
    users_metrics,
)
from ddp_train.text import counted, did_you_mean, shown

SEED = "seed"
OF_THE_RUN = ("run_dir", "name", "reasons", "chosen_keys", "process_counts", "process_range")
"""Keys that differ between any two runs, or say what others say."""
VERSIONS = ("python", "torch", "torchvision", "numpy", "ddp-train")
NOT_SET = "(not set)"
UNKNOWN = "unknown"
SIGMAS = 2.0
"""Standard errors of a difference that another test set of that size would make by chance."""
MOST_NAMED = 4
"""Most runs of a group that a sentence names."""
MOST_OWN = 12
"""Most columns of numbers that the user's code logged."""
Runs = dict[str, RunFiles]
"""Runs by the names that tell them apart."""


def compare_page(runs: Sequence[RunFiles], command: str, metric: str = "") -> Report:
    """The comparison of two or more runs; the others are compared with the first.

    command: that prints it.
    metric: that the findings are about, `validation.f1`, or the name of a number that was logged;
        "": the objective that all runs name, or else the one of most interest that all have.

    Raises LookupError if not all runs have the metric.
    """
    named = dict(zip(names_of(runs), runs, strict=True))
    unequal = differences(named)
    findings = verdicts(named, metric)
    data_keys = [row[0] for row in unequal.rows if row[0].startswith("data.")]
    if data_keys:
        keys = ", ".join(data_keys)
        findings.append(f"The data differ ({keys}), so the scores may not be of the same samples.")
    unfinished = [name for name, run in named.items() if run.state != COMPLETED]
    if unfinished:
        findings.append(f"Not completed: {', '.join(unfinished)}.")
    sections = [scores(named), *score_plots(named), *own_plots(named), unequal]
    return Report("Comparison", "", sections, commands=[command], findings=findings)


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """The last parts of their paths, as many as tell them apart."""
    paths = [run.run_dir.absolute().parts for run in runs]
    names: list[str] = []
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


# --- tables ---------------------------------------------------------------------------------------


def differences(runs: Runs) -> Table:
    """A row for each setting, version and so on that is not the same in all runs."""
    settings = []
    for run in runs.values():
        texts = {key: text.replace("\n", "\\n") for key, text in _settings(run).items()}
        settings.append(texts)
    facts = [_facts(run) for run in runs.values()]
    rows = [*_unequal(settings, NOT_SET), *_unequal(facts, None)]
    note = ""
    if not rows:
        note = "Config, code, versions and hardware are the same, as far as they were recorded."
    return Table("What differs", ["", *runs], rows, note)


def _unequal(runs: Sequence[dict[str, str]], absent: str | None) -> list[list[str]]:
    """A row for each key whose values differ.

    absent: the value where a run does not have the key; None: an unknown one, which may be equal.
    """
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run.get(key, absent) for run in runs]
        if len({*values} - {None}) > 1:
            rows.append([key, *(UNKNOWN if value is None else value for value in values)])
    return rows


def _settings(run: RunFiles) -> dict[str, str]:
    """The config, as it is typed, without what belongs to one run."""
    settings = {}
    for key, value in as_typed(run.config).items():
        if key.partition(".")[0] not in OF_THE_RUN:
            settings[key] = shown(value)
    return settings


def _facts(run: RunFiles) -> dict[str, str]:
    """Code, hardware and events, as far as they are known."""
    last = run.last_start
    machine = str(last.get("hardware") or "")
    # Trials that share a host have a part of its cores each; its hardware is the same.
    cores = re.search(r"(\d+) cores? ", machine)
    versions = (last.get("versions") or {}) | {"torch": run.summary.get("torch")}
    facts = {
        "code (git revision)": last.get("git_revision"),
        "hardware": machine.replace(cores[0], "") if cores else machine,
        "CPU cores that it could use": cores and cores[1],
        "host": last.get("host"),
        **{f"{name} (version)": versions.get(name) for name in VERSIONS},
        "restarts after a failure": str(len(run.summary.get("recoveries") or [])),
        "changes of the number of processes": str(len(run.summary.get("resizes") or [])),
    }
    return {name: value for name, value in facts.items() if value}


def scores(runs: Runs) -> Table:
    """A row for each run: its metrics at the end and at their best, its speed and its time.

    Each set has columns of its own: one number of the test set and one of the validation set do
    not compare.
    """
    columns = ["run"]
    rows: list[list[Any]] = [[name] for name in runs]
    for metric in _tabled_metrics(runs):
        for split in _sets(runs.values()):
            _add_scores(split, metric, runs, columns, rows)
    own = list(dict.fromkeys(number for run in runs.values() for number in run.own_numbers))
    for number in own[:MOST_OWN]:
        columns.append(f"{number}, last")
        for run, row in zip(runs.values(), rows, strict=True):
            row.append(run.last_own(number))
    columns += ["steps", "samples/s", "training time", "state"]
    for run, row in zip(runs.values(), rows, strict=True):
        seconds = run.summary.get("seconds")
        row += [run.summary.get("steps"), run.summary.get("samples_per_second")]
        row += [seconds and duration(seconds), run.state]
    note = "last: at the end. best: of all evaluations of that set, by that metric."
    if len(own) > MOST_OWN:
        note += f" The first {MOST_OWN} of {len(own)} logged numbers are shown."
    return Table("Runs", columns, rows, note)


def _tabled_metrics(runs: Runs) -> list[str]:
    """The metrics of the table: that of most interest, the loss, then those of the user."""
    names = dict.fromkeys([_shared_metric(runs.values())])
    for run in runs.values():
        if "loss" in run.scores:
            names["loss"] = None
    for run in runs.values():
        names |= dict.fromkeys(users_metrics(run.scores))
    return list(names)


def _add_scores(
    split: str, metric: str, runs: Runs, columns: list[str], rows: list[list[Any]]
) -> None:
    """Add the columns of a metric of one set, if a run has it: last, and best with its step."""
    ends = [run.last(split, metric) for run in runs.values()]
    if not any(end is not None for end in ends):
        return
    name = f"{split}.{column_of(metric)}"
    columns.append(f"{name}, last")
    for row, end in zip(rows, ends, strict=True):
        row.append(in_column(metric, end))
    if not any(split in run.scored_sets for run in runs.values()):
        return  # scored at the end only
    bests: list[Line] = []
    for run in runs.values():
        best = run.best_by(metric, split) if split in run.scored_sets else None
        bests.append(best or {})
    if not any(bests):
        return  # nobody knows which direction is better
    columns += [f"{name}, best", f"best {split}.{metric} at step"]
    for best, row in zip(bests, rows, strict=True):
        row += [in_column(metric, best.get(metric)), best.get("step")]


def _sets(runs: Collection[RunFiles]) -> list[str]:
    """All sets that one of the runs was scored on."""
    return in_order(dict.fromkeys(name for run in runs for name in run.sets))


def _shared_split(runs: Collection[RunFiles], metric: str) -> str | None:
    """The set of which all runs have the metric: the first of test, else that of validation."""
    sets = _sets(runs)
    for split in (*of_kind(TEST, sets), *of_kind(VALIDATION, sets)):
        if all(run.last(split, metric) is not None for run in runs):
            return split
    return None


def _shared_metric(runs: Collection[RunFiles]) -> str:
    """The metric of most interest that all runs have, or that of the user that all select by."""
    shared = set.intersection(*(set(run.scores) for run in runs))
    selected = {run.selected_by for run in runs}
    for name in users_metrics(shared):
        if selected == {name}:
            return name
    return main_metric(shared)


def _common_objective(runs: Collection[RunFiles]) -> str:
    """The objective that the runs were made for, if it is one and all have its value; else ""."""
    objectives = {str(run.config.get("objective")) for run in runs}
    objective = objectives.pop()
    if objectives or not all(objective in run.numbers for run in runs):
        return ""
    return objective


def _asked_metric(runs: Collection[RunFiles], asked: str) -> tuple[str, str]:
    """Kind and name of the number that the user asks for. Raises LookupError if a run has none."""
    first, *others = [run.numbers for run in runs]
    shared = [words for words in first if all(words in numbers for numbers in others)]
    if asked not in shared:
        guess = did_you_mean(asked, shared)
        raise LookupError(
            f"{asked}: not all runs have this number; all of them have {', '.join(shared)}{guess}"
        )
    return first[asked]


# --- sentences ------------------------------------------------------------------------------------


def verdicts(runs: Runs, asked: str = "") -> list[str]:
    """Sentences: whether each group differs from the first by more than noise.

    asked: see `compare_page`.
    """
    asked = asked or _common_objective(runs.values())
    if asked:
        split, metric = _asked_metric(runs.values(), asked)
    else:
        metric = _shared_metric(runs.values())
        split = _shared_split(runs.values(), metric)
    if split is None:
        return [f"The runs cannot be compared: no data set has the metric {metric} in all of them."]
    (_, ground), *others = groups_of(runs).items()
    if others:
        return [
            f"{_named(group, runs)} against {_named(ground, runs)}"
            f"{_verdict(ground, group, split, metric)}"
            for _, group in others
        ]
    values = _last_scores(ground, split, metric)
    spread = shown_metric(metric, statistics.stdev(values))
    return [
        f"The runs have the same settings, except for the seed. The standard deviation of {split}"
        f" {metric} over the runs is {spread}."
    ]


def _named(group: Sequence[RunFiles], runs: Runs) -> str:
    """The names of the runs of a group, the first ones where there are many."""
    names = [name for name, run in runs.items() if run in group]
    if len(names) > MOST_NAMED:
        names[MOST_NAMED:] = ["..."]
    return ", ".join(names)


def groups_of(runs: Runs) -> dict[str, list[RunFiles]]:
    """Groups of runs that differ in their seed alone, by the names of their first."""
    names: dict[str, str] = {}
    groups: dict[str, list[RunFiles]] = {}
    for name, run in runs.items():
        settings = {key: text for key, text in _settings(run).items() if key != SEED}
        first = names.setdefault(str(sorted(settings.items())), name)
        groups.setdefault(first, []).append(run)
    return groups


def _verdict(ground: Sequence[RunFiles], group: Sequence[RunFiles], split: str, metric: str) -> str:
    values = _last_scores(ground, split, metric)
    others = _last_scores(group, split, metric)
    difference = statistics.fmean(others) - statistics.fmean(values)
    text = f": {split} {metric} {_signed(metric, difference)}"
    test = welch(values, others)
    if test is None:
        runs = counted(min(len(values), len(others)), "run")
        text += (
            f". Whether that is more than noise cannot be told from {runs} of each; repeat both"
            " with other seeds (seed=0,1,2)."
        )
        if metric == "accuracy":
            text += _error_of_size(ground[0], group[0], split, difference)
        return text
    verdict = "more than noise" if test.is_more_than_noise else "within the noise"
    interval = f"{_signed(metric, test.low)} to {_signed(metric, test.high)}"
    return (
        f"{text}, {verdict} (95 % interval {interval}, p = {test.p:.2g}, Welch's t-test of"
        f" {len(values)} and {len(others)} runs)."
    )


def _signed(metric: str, value: float) -> str:
    if is_percent(metric):
        return f"{100 * value:+.2f} points"
    return f"{value:+.4g}"


def _error_of_size(run: RunFiles, other: RunFiles, split: str, difference: float) -> str:
    """A sentence on what the size of the scored set alone makes of an accuracy."""
    errors = [_standard_error(run, split), _standard_error(other, split)]
    if None in errors:
        return ""
    error = math.hypot(*filter(None, errors))
    size = "smaller" if abs(difference) < SIGMAS * error else "larger"
    return (
        " From the number of scored samples alone, the difference of two independent scores has"
        f" a standard error of {100 * error:.2f} points; this difference is {size} than twice"
        " that error."
    )


def _standard_error(run: RunFiles, split: str) -> float | None:
    """Standard error of an accuracy: that of a share of so many samples."""
    lines = run.lines(split)
    last = lines[-1] if lines else {}
    scored = run.summary.get(split) or last
    accuracy = scored.get("accuracy")
    if accuracy is None or not scored.get("samples"):
        return None
    return math.sqrt(accuracy * (1 - accuracy) / scored["samples"])


def _last_scores(runs: Sequence[RunFiles], split: str, metric: str) -> list[float]:
    values = [run.last(split, metric) for run in runs]
    return [value for value in values if value is not None]
