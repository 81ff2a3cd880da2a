"""Resources that training takes from the machine: GPUs, processor time, memory.

Each process measures what it alone knows: itself, and the GPUs that it computes on. The numbers
travel with the losses, in the one exchange of a logging interval, so that rank 0 has those of all
ranks, on other hosts too. Unknown values are NaN on the way, and null or absent in files.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ddp_train.distributed.environment import visible_devices
from ddp_train.linux import resident_bytes
from ddp_train.telemetry.figures import (
    GIB,
    GPU_METRICS,
    PROCESS_METRICS,
    RULES,
    combined,
    gpu_line,
)
from ddp_train.telemetry.gpu_sampler import GpuSampler

DECIMALS = 3


class HardwareMonitor:
    """Figures of this process at each logging interval; on rank 0, of all ranks and the run."""

    def __init__(self, gpus: GpuSampler | None = None) -> None:
        """gpus: those that this process computes on; on all ranks the same number of them."""
        self.gpus = gpus
        self.of_ranks: list[list[float]] = []
        self.latest: dict[str, float] = {}
        """Known figures of the last interval, over all ranks."""
        self.totals: dict[str, tuple[float, float]] = {}
        """For each figure its value for the run so far, and the seconds that it stands for."""
        self.wall = time.perf_counter()
        self.processor = time.process_time()

    def collect(self) -> list[float]:
        """PROCESS_METRICS since the last call, then GPU_METRICS for each GPU of this process.

        Waits for the GPUs: an interval of metrics ends with work that is done.
        """
        if self.gpus:
            self.gpus.wait()
        wall = time.perf_counter()
        processor = time.process_time()
        cores = (processor - self.processor) / max(wall - self.wall, 1e-9)
        self.wall = wall
        self.processor = processor
        values = [cores, resident_bytes() / GIB]
        if self.gpus:
            values += self.gpus.take()
        return values

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Take what `collect` gave on all ranks."""
        self.of_ranks = of_ranks

    def take_interval(self, seconds: float) -> dict[str, list[float | None]]:
        """Take an interval into those of the run. Returns its figures for metrics.jsonl.

        A figure has a number for each process or GPU.

        seconds: length of the interval.
        """
        lists = self._lists()
        known = {}
        self.latest = {}
        for name, values in lists.items():
            value = combined(RULES[name], values)
            if math.isnan(value):
                continue
            self.latest[name] = value
            self._count(name, value, seconds)
            known[name] = [None if math.isnan(v) else round(v, DECIMALS) for v in values]
        return known

    def _lists(self) -> dict[str, list[float]]:
        """The values of each figure for all processes or GPUs, in the order of the ranks."""
        lists: dict[str, list[float]] = {}
        for place, name in enumerate(PROCESS_METRICS):
            lists[name] = [row[place] for row in self.of_ranks]
        for place, name in enumerate(GPU_METRICS, start=len(PROCESS_METRICS)):
            lists[name] = []
            for row in self.of_ranks:
                lists[name] += row[place :: len(GPU_METRICS)]
        return lists

    def _count(self, name: str, value: float, seconds: float) -> None:
        before, weight = self.totals.get(name, (0.0, 0.0))  # no figure is negative
        whole = weight + seconds
        rule = RULES[name]
        if rule == "sum":
            total = before + value
        elif rule == "max":
            total = max(before, value)
        else:
            total = (before * weight + value * seconds) / whole
        self.totals[name] = (total, whole)

    def bar_text(self) -> str:
        """The latest figures for the progress bar: those of GPUs, or `1.9 cores 0.6 GiB`."""
        cores_and_memory = "{cpu_cores:.1f} cores {resident_gib:.1f} GiB"
        return self.gpu_text() or cores_and_memory.format_map(self.latest)

    def gpu_text(self) -> str:
        """`GPU 97% 61.2 GiB 640 W`; empty without a GPU."""
        return gpu_line(self.latest)

    def summary(self) -> dict[str, float]:
        """Entries of summary.json: means over processes, GPUs and time, peaks, all energy."""
        return {name: round(value, DECIMALS) for name, (value, _) in self.totals.items()}

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: a resumed run sums up the whole run."""
        return {name: list(total) for name, total in self.totals.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.totals = {name: (value, seconds) for name, (value, seconds) in state.items()}


def hardware_monitor_for(device: str, all_gpus: bool) -> HardwareMonitor:
    """The monitor of a process.

    device: the one that it computes on.
    all_gpus: if that is a GPU, it computes on all visible ones.
    """
    if torch.device(device).type == "cpu":
        return HardwareMonitor()
    if all_gpus:
        numbers = list(range(torch.cuda.device_count()))
    else:
        numbers = [torch.device(device).index]
    gpus = GpuSampler(numbers, visible_devices())
    gpus.start()
    return HardwareMonitor(gpus)
