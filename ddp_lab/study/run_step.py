"""The step of a run of one process, from what the run left."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_lab.study.cost_model import Step
from ddp_train.errors import ConfigError

LEAST_INTERVALS = 3
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norm, which are stored with the weights of a checkpoint but have no gradient."""


def measured_step(run_dir: Path) -> Step:
    """The step of a run of one process, from its metrics: the median of its logging intervals
    without the first one and without those in which an epoch ended with a smaller batch.

    Raises ConfigError if the run had several processes, or too few intervals, or no checkpoint to
    know the model by.
    """
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise _unsuited(
            run_dir, f"not a completed run ({error}); use the run_dir of a completed run"
        ) from None
    if summary["world_size"] != 1:
        raise _unsuited(
            run_dir,
            f"a run of {summary['world_size']} processes, whose steps include communication; use a"
            " run with launch.nproc_per_node=1",
        )
    intervals = whole_intervals(lines, summary["global_batch_size"])
    if len(intervals) < LEAST_INTERVALS:
        raise _unsuited(
            run_dir,
            f"{len(intervals)} logging intervals of whole batches after the first, at least"
            f" {LEAST_INTERVALS} are needed; use a longer run, or a lower train.log_every_steps",
        )
    seconds = statistics.median(mean for _, mean in intervals)
    return Step(seconds, gradient_bytes(run_dir), deviation_seconds=deviation(intervals))


def _unsuited(run_dir: Path, reason: str) -> ConfigError:
    return ConfigError([f"study.from_run={run_dir}: {reason}"])


def whole_intervals(lines: Sequence[dict[str, Any]], batch: int) -> list[tuple[int, float]]:
    """Number of steps, and mean seconds of a step, of each logging interval in which all batches
    were whole, except the first interval.

    lines: those of metrics.jsonl. Intervals differ in length, since they also end at the end of an
    epoch.
    """
    train_lines = [line for line in lines if line["kind"] == "train"]
    intervals = []
    for before, line in itertools.pairwise(train_lines):
        steps = line["step"] - before["step"]
        if line["samples_seen"] - before["samples_seen"] == steps * batch:
            intervals.append((steps, batch / line["samples_per_second"]))
    return intervals


def deviation(intervals: Sequence[tuple[int, float]]) -> float:
    """The standard deviation of one step, from means over k steps, whose variance is 1 / k of that
    of a step."""
    steps = sum(count for count, _ in intervals)
    mean = sum(count * seconds for count, seconds in intervals) / steps
    squares = sum(count * (seconds - mean) ** 2 for count, seconds in intervals)
    return math.sqrt(squares / (len(intervals) - 1))


def gradient_bytes(run_dir: Path) -> float:
    """Bytes of all parameters, from the header of the newest checkpoint (safetensors: its length,
    then JSON).

    Raises ConfigError if there is no checkpoint.
    """
    weights = sorted(run_dir.glob("checkpoints/step_????????/model.safetensors"))
    if not weights:
        raise _unsuited(
            run_dir, "has no checkpoint, which holds the size of the model; use a run with one"
        )
    with weights[-1].open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__" and name.rpartition(".")[2] not in STATISTICS:
            start, end = entry["data_offsets"]
            total += end - start
    return float(total)
