"""The parts of a step of training, and which of them is a bottleneck."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_train.text import counted

PARTS = ("data", "compute", "exposed", "host")
"""Names of the parts in the files of `step_times`."""
SIGNIFICANT_SHARE = 0.1
"""Fraction of a step from which a part is reported as a bottleneck."""


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step by part: means over ranks and over the middle half of the steps."""

    data: float
    compute: float
    exchange: float
    """Gradient exchange that does not overlap with the backward pass: the wait of the last rank."""
    waiting: float
    """Wait for slower ranks, before the exchange begins."""
    host: float
    slowest: int
    """The rank that was last most often."""
    slowest_share: float
    """Fraction of the steps in which this rank was last."""
    gpu_waits_for_host: float | None
    """Fraction of the steps at whose end the GPU was idle; None on the CPU."""

    @property
    def step(self) -> float:
        return self.data + self.compute + self.exchange + self.waiting + self.host


def read_breakdown(run_dir: Path) -> StepBreakdown:
    """The breakdown of a run with `hooks=[ddp_lab.study.step_times.StepTimes]`, over all ranks."""
    files = sorted(run_dir.glob("probe/step_times_rank_*.json"), key=_rank_of)
    ranks = [json.loads(path.read_text()) for path in files]
    seconds = _middle_half(
        np.array([[[step[part] for part in PARTS] for step in rank["steps"]] for rank in ranks])
    )
    exposed = seconds[:, :, PARTS.index("exposed")]
    # the rank that is last begins the exchange, and waits for nobody
    exchange = exposed.min(axis=0)
    times_last = np.bincount(exposed.argmin(axis=0), minlength=len(ranks))
    means = dict(zip(PARTS, seconds.mean(axis=(0, 1)), strict=True))
    waits = [rank["gpu_waits_for_host"] for rank in ranks]
    known_waits = [wait for wait in waits if wait is not None]
    return StepBreakdown(
        data=float(means["data"]),
        compute=float(means["compute"]),
        exchange=float(exchange.mean()),
        waiting=float((exposed - exchange).mean()),
        host=float(means["host"]),
        slowest=int(times_last.argmax()),
        slowest_share=float(times_last.max() / times_last.sum()),
        gpu_waits_for_host=statistics.mean(known_waits) if known_waits else None,
    )


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _middle_half(seconds: np.ndarray) -> np.ndarray:
    """The steps without the first quarter, and of the others the middle half by duration.

    seconds: by rank, step and part.
    """
    # warm-up: choice of kernels, layout of buckets, allocation
    steps = seconds[:, seconds.shape[1] // 4 :]
    # All ranks have steps of the same length, since they wait for each other.
    durations = steps.sum(axis=2).mean(axis=0)
    order = durations.argsort()
    cut = len(order) // 4
    return steps[:, order[cut : len(order) - cut]]


def verdict(breakdown: StepBreakdown, processes: int, cores: int | None) -> str:
    """The bottlenecks of a run, and the keys that may help.

    cores: number of cores of a host without GPUs, else None.
    """
    seconds = {
        "data": breakdown.data,
        "exchange": breakdown.exchange,
        "waiting": breakdown.waiting,
        "host": breakdown.host,
    }
    advice = {
        "data": (
            "data-bound: raise tuning.num_workers, or keep the data on the device"
            " (data.placement=device)"
        ),
        "exchange": (
            "communication-bound: use more samples per process (train.global_batch_size,"
            " train.accumulation_steps), or send fewer bytes (strategy.comm_hook=bf16)"
        ),
        "waiting": _imbalance(breakdown, processes, cores),
        "host": (
            "host-bound: log less often (train.log_every_steps), or find the work between the steps"
        ),
    }
    by_size = sorted(seconds, key=lambda part: -seconds[part])
    shares = {part: seconds[part] / breakdown.step for part in by_size}
    bottlenecks = [
        f"{advice[part]} ({100 * share:.0f} % of a step)"
        for part, share in shares.items()
        if share > SIGNIFICANT_SHARE
    ]
    if breakdown.gpu_waits_for_host is not None and breakdown.gpu_waits_for_host > 0.5:
        bottlenecks.append(
            "launch-bound: the GPU waits for kernel launches; try tuning.cuda_graph=true or"
            " tuning.compile=true"
        )
    if bottlenecks:
        return "; ".join(bottlenecks)
    if sum(shares.values()) > SIGNIFICANT_SHARE:
        parts = [f"{part} {100 * share:.0f} %" for part, share in shares.items() if share >= 0.01]
        return f"compute-bound; smaller parts: {', '.join(parts)}"
    return "compute-bound: little overhead"


def _imbalance(breakdown: StepBreakdown, processes: int, cores: int | None) -> str:
    """Why ranks wait for each other."""
    if cores is not None and processes > cores:
        return (
            f"imbalanced: {processes} processes share {counted(cores, 'core')} and wait for each"
            " other"
        )
    if breakdown.slowest_share > max(0.6, 1.5 / processes):
        return (
            f"imbalanced: the others wait for rank {breakdown.slowest}; check its GPU, its data and"
            " other processes there"
        )
    return "imbalanced: different ranks are late; check for other work on this machine"
