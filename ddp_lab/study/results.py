"""Statistics of runs: metrics of one run, medians over repeats, and whether two variants differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ddp_lab.study.trials import Outcome

LEAST_RUNS = 3
"""Fewest runs of each of two variants for a verdict about their difference."""


@dataclass(frozen=True)
class Metric:
    """A metric to compare variants by. read: its value for one run, None if the run has none."""

    label: str
    read: Callable[[Outcome], float | None]
    lower_is_better: bool = True
    is_time: bool = False
    """Times are compared by ratio (speed-up), other metrics by difference."""

    def values(self, outcomes: Sequence[Outcome]) -> list[float]:
        """The values of the completed runs that have one."""
        found = (self.read(outcome) for outcome in outcomes if outcome.completed)
        return [value for value in found if value is not None and math.isfinite(value)]

    def gain(self, before: float, after: float) -> float:
        """The speed-up, or by how much `after` is better than `before`."""
        if self.is_time:
            return before / after if self.lower_is_better else after / before
        return before - after if self.lower_is_better else after - before


def epoch_seconds(outcome: Outcome) -> float | None:
    """Median time of an epoch, without the first if there are several: it includes warm-up,
    compilation, capture."""
    seconds = outcome.summary.get("epoch_seconds") or []
    if seconds:
        return statistics.median(seconds[1:] or seconds)
    return None


def first_epoch(outcome: Outcome) -> float | None:
    """Time of the first epoch if there are several."""
    seconds = outcome.summary.get("epoch_seconds") or []
    return seconds[0] if len(seconds) > 1 else None


def samples_per_second(outcome: Outcome) -> float | None:
    """From the median epoch of `epoch_seconds`."""
    seconds = epoch_seconds(outcome)
    epochs = len(outcome.summary.get("epoch_seconds") or [])
    if seconds:
        return outcome.summary["samples_seen"] / epochs / seconds
    return None


def interval_samples_per_second(outcome: Outcome) -> float:
    """Samples per second: the median over the logging intervals, without the first two
    (warm-up)."""
    lines = [line["samples_per_second"] for line in outcome.metrics if line["kind"] == "train"]
    return statistics.median(lines[2:] or lines)


def accuracy(outcome: Outcome) -> float | None:
    """Test accuracy in percent."""
    found = (outcome.summary.get("test") or {}).get("accuracy")
    return None if found is None else 100 * found


def _test_loss(outcome: Outcome) -> float | None:
    return (outcome.summary.get("test") or {}).get("loss")


METRICS: dict[str, Metric] = {
    "epoch_seconds": Metric("s/epoch", epoch_seconds, is_time=True),
    "samples_per_second": Metric(
        "samples/s", samples_per_second, lower_is_better=False, is_time=True
    ),
    "seconds": Metric("s training", lambda outcome: outcome.summary.get("seconds"), is_time=True),
    "test.accuracy": Metric("test accuracy %", accuracy, lower_is_better=False),
    "test.loss": Metric("test loss", _test_loss),
}


def median(values: Sequence[float]) -> float | None:
    """The median; None for no values."""
    return statistics.median(values) if values else None


def false_positive_rate(runs: int, others: int) -> float:
    """Probability that all values of one of two samples from the same distribution exceed all of
    the other: 2 / C(n + m, n)."""
    return 2 / math.comb(runs + others, runs)


def verdict(metric: Metric, base: Sequence[float], mine: Sequence[float]) -> str:
    """Two variants differ only if every run of one is better than every run of the other."""
    if not base or not mine:
        return ""
    if min(len(base), len(mine)) < LEAST_RUNS:
        return "too few runs"
    better, worse = ("faster", "slower") if metric.is_time else ("better", "worse")
    if max(mine) < min(base):
        return better if metric.lower_is_better else worse
    if min(mine) > max(base):
        return worse if metric.lower_is_better else better
    return "no effect within the noise"


def losses(outcome: Outcome) -> dict[int, float]:
    """The training loss by optimizer step, from metrics.jsonl."""
    return {
        line["step"]: line["loss"]
        for line in outcome.metrics
        if line["kind"] == "train" and line["loss"] is not None
    }


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float | None:
    """Largest absolute difference of two curves at the steps that both have; None without such
    steps."""
    return max((abs(one[step] - other[step]) for step in one.keys() & other.keys()), default=None)


def weights(run_dir: Path) -> dict[str, Any] | None:
    """Parameters and buffers of the newest checkpoint, by name; None if there is none."""
    newest = max(run_dir.glob("checkpoints/step_*[0-9]/model.safetensors"), default=None)
    return load_file(newest) if newest else None


def largest_weight_difference(one: Path, other: Path) -> float | None:
    """Largest absolute difference of the final weights; None if shapes differ or a checkpoint is
    missing."""
    mine = weights(one)
    theirs = weights(other)
    if (
        not mine
        or not theirs
        or {n: w.shape for n, w in mine.items()} != {n: w.shape for n, w in theirs.items()}
    ):
        return None
    return max(
        float(np.abs(mine[name].astype(np.float64) - theirs[name]).max(initial=0.0))
        for name in mine
    )
