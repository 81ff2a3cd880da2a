"""Figures of the GPUs that this process computes on, from NVML and torch.

Nothing here is ever an error: what NVML does not know is NaN.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pynvml
import torch

from ddp_train.telemetry.figures import GIB, GPU_METRICS, RULES, combined

SAMPLE_SECONDS = 0.5
"""Between two samples of a GPU. A sample is half a dozen calls of C that release Python's lock.
NVML's own window for utilisation is between 1/6 and 1 s."""
JOULES_PER_WH = 3600
Sample = dict[str, float]
log = logging.getLogger(__name__)


class GpuSampler:
    """Some GPUs of this host, sampled by a thread."""

    def __init__(self, numbers: Sequence[int], visible: str | None) -> None:
        """Find the GPUs in NVML.

        numbers: CUDA's numbers of them.
        visible: CUDA_VISIBLE_DEVICES.
        """
        self.numbers = numbers
        self.lock = threading.Lock()
        self.has_reported = False
        self.samples: list[list[Sample]] = [[] for _ in numbers]
        """For each GPU the samples since the last `take`."""
        self.latest: list[Sample] = [{} for _ in numbers]
        """For each GPU the last sample before those."""
        self.handles: list[Any] = []
        try:
            pynvml.nvmlInit()
            self.handles = [nvml_device(_uuid(number), number, visible) for number in numbers]
        except pynvml.NVMLError as error:
            self._report(error)

    def start(self) -> None:
        """Sample from now on, in a thread."""
        if self.handles:
            self.sample()
            threading.Thread(target=self._sample_forever, name="figures", daemon=True).start()

    def sample(self) -> None:
        """Ask NVML once."""
        for number, handle in enumerate(self.handles):
            sample = {name: self._answer(question, handle) for name, question in QUESTIONS.items()}
            with self.lock:
                self.samples[number].append(sample)

    def wait(self) -> None:
        """Wait for all work that was given to the GPUs."""
        for number in self.numbers:
            torch.cuda.synchronize(number)

    def take(self) -> list[float]:
        """GPU_METRICS for each GPU, over the samples since the last call, or of the latest one."""
        values: list[float] = []
        for place, number in enumerate(self.numbers):
            figures = self._take(place)
            figures["torch_memory_gib"] = peak_of_torch(number) / GIB
            values += [figures[name] for name in GPU_METRICS]
        return values

    def _take(self, place: int) -> Sample:
        with self.lock:
            samples = self.samples[place]
            self.samples[place] = []
        before = self.latest[place]
        if not samples:
            samples = [before]
        latest = samples[-1]
        self.latest[place] = latest
        figures = {}
        for name in QUESTIONS:
            figures[name] = combined(RULES[name], [sample.get(name) for sample in samples])
        # Counted since the driver was loaded.
        figures["energy_wh"] = latest.get("energy_wh", math.nan) - before.get("energy_wh", math.nan)
        return figures

    def _sample_forever(self) -> None:
        never_set = threading.Event()
        while not never_set.wait(SAMPLE_SECONDS):
            self.sample()

    def _answer(self, question: Callable[[Any], float], handle: Any) -> float:
        try:
            return question(handle)
        # A MIG slice has no power; another pynvml has other names.
        except (pynvml.NVMLError, AttributeError) as error:
            self._report(error)
            return math.nan

    def _report(self, error: Exception) -> None:
        if not self.has_reported:
            self.has_reported = True
            log.info("some measurements of the GPUs are missing, since NVML answered: %s", error)


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def peak_of_torch(number: int) -> int:
    """Most bytes that torch's allocator has given out on a GPU."""
    # torch.cuda.max_memory_allocated flattens 100 names.
    statistics = torch.cuda.memory_stats_as_nested_dict(number)
    return statistics["allocated_bytes"]["all"]["peak"]


def _memory_of_this_process(handle: Any) -> float:
    """NaN where NVML knows processes by other numbers: in most containers."""
    processes: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    for process in processes:
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return process.usedGpuMemory / GIB
    return math.nan


QUESTIONS: dict[str, Callable[[Any], float]] = {
    "gpu_utilisation": lambda handle: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
    "gpu_memory_gib": lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / GIB,
    "process_gpu_memory_gib": _memory_of_this_process,
    "power_watts": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    "temperature_celsius": lambda handle: float(
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    ),
    "energy_wh": lambda handle: (
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000 / JOULES_PER_WH
    ),
}
"""The questions to NVML about a device."""


def nvml_device(uuid: str, number: int, visible: str | None) -> Any:
    """NVML's handle of a GPU. Raises NVMLError if NVML does not know it.

    NVML knows neither CUDA_VISIBLE_DEVICES nor CUDA's order (fastest first), but UUIDs.

    uuid: CUDA's answer. For a MIG slice it may be that of the GPU it is cut from.
    number: CUDA's number of the GPU.
    visible: CUDA_VISIBLE_DEVICES, which has the UUID of a MIG slice.
    """
    names = [f"GPU-{uuid}", f"MIG-{uuid}"]
    entries = [entry.strip() for entry in (visible or "").split(",")]
    if number < len(entries) and entries[number].startswith("MIG-"):
        names.insert(0, entries[number])
    for name in names[:-1]:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError:
            continue
    return pynvml.nvmlDeviceGetHandleByUUID(names[-1])
