"""Statistics of runs: metrics of one run, medians over repeats, and whether two variants differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ddp_lab.study.trials import Outcome
from ddp_train.telemetry.pages.run_files import RunFiles
from ddp_train.telemetry.score_lines import column_of, in_column, users_metrics

LEAST_RUNS = 3
"""Fewest runs of each of two variants for a verdict about their difference."""


@dataclass(frozen=True)
class Metric:
    """A metric to compare variants by."""

    label: str
    read: Callable[[Outcome], float | None]
    """A function that gives the value of one run, None if the run has none."""
    better: str | None = "min"
    """The better direction, max or min; None: nobody says which."""
    is_time: bool = False
    """Times are compared by ratio (speed-up), other metrics by difference."""

    def values(self, outcomes: Sequence[Outcome]) -> list[float]:
        """The values of the completed runs that have one."""
        found = (self.read(outcome) for outcome in outcomes if outcome.completed)
        return [value for value in found if value is not None and math.isfinite(value)]

    def gain(self, before: float, after: float) -> float:
        """The speed-up, or by how much `after` is better than `before`; without a better direction
        by how much it is higher."""
        if self.better == "min":
            better = before
            worse = after
        else:
            better = after
            worse = before
        return better / worse if self.is_time else better - worse


def epoch_seconds(outcome: Outcome) -> float | None:
    """Median seconds of an epoch.

    Leaves out the first of several, which includes warm-up, compilation and capture.
    """
    seconds = outcome.summary.get("epoch_seconds") or []
    return median(seconds[1:] or seconds)


def first_epoch(outcome: Outcome) -> float | None:
    """Seconds of the first epoch; None if it is the only one."""
    seconds = outcome.summary.get("epoch_seconds") or []
    return seconds[0] if len(seconds) > 1 else None


def samples_per_second(outcome: Outcome) -> float | None:
    """Samples per second of the epoch that `epoch_seconds` measures."""
    seconds = epoch_seconds(outcome)
    if not seconds:
        return None
    epochs = len(outcome.summary["epoch_seconds"])
    return outcome.summary["samples_seen"] / epochs / seconds


def interval_samples_per_second(outcome: Outcome) -> float:
    """Median samples per second of the logging intervals, without the first two (warm-up)."""
    speeds = [line["samples_per_second"] for line in outcome.train_lines]
    return statistics.median(speeds[2:] or speeds)


def accuracy(outcome: Outcome) -> float | None:
    """Test accuracy in percent."""
    fraction = _test_score(outcome, "accuracy")
    return None if fraction is None else 100 * fraction


def test_loss(outcome: Outcome) -> float | None:
    return _test_score(outcome, "loss")


def _test_score(outcome: Outcome, name: str) -> float | None:
    scores = outcome.summary.get("test") or {}
    return scores.get(name)


def own_metric(name: str, outcome: Outcome) -> float | None:
    """A metric of the user's, of the test set."""
    return _test_score(outcome, name)


def own_metrics(outcomes: Sequence[Outcome]) -> list[str]:
    """The names of the user's metrics that at least one run has."""
    names: dict[str, None] = {}
    for outcome in outcomes:
        names |= dict.fromkeys(users_metrics(outcome.summary.get("test") or {}))
    return list(names)


def figures(outcome: Outcome) -> dict[str, float]:
    """The hardware metrics that the run recorded, by name."""
    recorded = outcome.summary.get("figures") or {}
    return {name: value for name, value in recorded.items() if value is not None}


def figure(name: str, outcome: Outcome) -> float | None:
    """One hardware metric of a run."""
    return figures(outcome).get(name)


METRICS: dict[str, Metric] = {
    "epoch_seconds": Metric("s/epoch", epoch_seconds, is_time=True),
    "samples_per_second": Metric("samples/s", samples_per_second, better="max", is_time=True),
    "seconds": Metric("s training", lambda outcome: outcome.summary.get("seconds"), is_time=True),
    "test.accuracy": Metric("test accuracy %", accuracy, better="max"),
    "test.loss": Metric("test loss", test_loss),
}
"""Metrics that every study has. `metric_named` knows all others."""


def metric_named(name: str, outcomes: Iterable[Outcome]) -> Metric:
    """A metric that a study names.

    name: one of METRICS, or a number at the end of a run in the words of `RunFiles.numbers`.
    outcomes: of all runs. The first one that has the number says which direction is better.
    """
    if name in METRICS:
        return METRICS[name]
    for outcome in outcomes:
        run = files_of(outcome)
        if name in run.numbers:
            kind, metric = run.numbers[name]
            label = f"{kind} {column_of(metric)}"
            return Metric(label, partial(_last, kind, metric), run.better(metric))
    return Metric(name, lambda outcome: None)


def files_of(outcome: Outcome) -> RunFiles:
    """The files of a run, as far as numbers are concerned."""
    return RunFiles(outcome.run_dir, metrics=outcome.metrics, summary=outcome.summary)


def _last(kind: str, metric: str, outcome: Outcome) -> float | None:
    """A number at the end of a run, as it stands in its column."""
    return in_column(metric, files_of(outcome).last(kind, metric))


def median(values: Sequence[float]) -> float | None:
    """The median; None for no values."""
    return statistics.median(values) if values else None


def false_positive_rate(runs: int, others: int) -> float:
    """Probability that two equal variants get a verdict: 2 / C(n + m, n).

    That is, all values of one of two samples from the same distribution exceed all of the other.
    """
    return 2 / math.comb(runs + others, runs)


def verdict(metric: Metric, base: Sequence[float], mine: Sequence[float]) -> str:
    """The verdict on a variant that is compared with another one; empty if one has no values.

    They differ only if every run of one is better than every run of the other.

    base: values of the variant compared with.
    mine: values of the variant itself.
    """
    if not base or not mine:
        return ""
    if min(len(base), len(mine)) < LEAST_RUNS:
        return "too few runs"
    all_lower = max(mine) < min(base)
    all_higher = min(mine) > max(base)
    if not all_lower and not all_higher:
        return "no effect within the noise"
    if metric.better is None:
        return "lower" if all_lower else "higher"
    if all_lower == (metric.better == "min"):
        return "faster" if metric.is_time else "better"
    return "slower" if metric.is_time else "worse"


def losses(outcome: Outcome) -> dict[int, float]:
    """The training loss by optimizer step, from metrics.jsonl."""
    return {line["step"]: line["loss"] for line in outcome.train_lines if line["loss"] is not None}


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float | None:
    """Largest absolute difference of two curves at the steps that both have; None without any."""
    common_steps = one.keys() & other.keys()
    return max((abs(one[step] - other[step]) for step in common_steps), default=None)


def weights(run_dir: Path) -> dict[str, Any] | None:
    """Parameters and buffers of the newest checkpoint, by name; None if there is none."""
    newest = max(run_dir.glob("checkpoints/step_*[0-9]/model.safetensors"), default=None)
    return load_file(newest) if newest else None


def largest_weight_difference(one: Path, other: Path) -> float | None:
    """Largest absolute difference of the final weights of two run directories.

    None if shapes differ or a checkpoint is missing.
    """
    mine = weights(one)
    theirs = weights(other)
    if not mine or not theirs or _shapes(mine) != _shapes(theirs):
        return None
    return max(
        float(np.abs(mine[name].astype(np.float64) - theirs[name]).max(initial=0.0))
        for name in mine
    )


def _shapes(arrays: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}
