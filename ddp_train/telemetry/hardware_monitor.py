"""What training takes from the machine: utilisation, memory, power and temperature of GPUs,
processor time, memory.

Each process measures what it alone knows: itself, and the GPUs that it computes on. The numbers
travel with the losses, in the one exchange of a logging interval, so that rank 0 has those of all
ranks, on other hosts too. What cannot be known is NaN on the way, and null or absent in files: NVML
that is missing or fails is never an error.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pynvml
import torch

from ddp_train.distributed.environment import visible_devices
from ddp_train.linux import resident_bytes

SAMPLE_SECONDS = 0.5
"""Between two looks at a GPU. A look is half a dozen calls of C that release Python's lock; NVML's
own window for utilisation is between 1/6 and 1 s."""
PROCESS_METRICS = {"cpu_cores": "mean", "resident_gib": "max"}
GPU_METRICS = {
    "gpu_utilisation": "mean",
    "gpu_memory_gib": "max",
    "process_gpu_memory_gib": "max",
    "power_watts": "mean",
    "temperature_celsius": "max",
    "energy_wh": "sum",
    "torch_memory_gib": "max",
}
RULES = PROCESS_METRICS | GPU_METRICS
"""Each figure, and how several of it become one: over the samples of an interval, over GPUs, over a
run. Utilisation is the share of time in which a kernel ran, in percent; GPU memory is that in use
on the device, by this process, and the peak of what torch's allocator gave out."""
GIB = 2**30
JOULES_PER_WH = 3600
log = logging.getLogger(__name__)


def combined(rule: str, values: Iterable[float | None]) -> float:
    """Several numbers as one: mean, max or sum of those that are known; NaN if none is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return math.nan
    if rule == "max":
        return max(known)
    return math.fsum(known) / (len(known) if rule == "mean" else 1)


class HardwareMonitor:
    """Of this process at each logging interval; on rank 0, of all processes and of the whole
    run."""

    def __init__(self, gpus: GpuSampler | None = None) -> None:
        """gpus: those that this process computes on; on all ranks the same number of them."""
        self.gpus = gpus
        self.of_ranks: list[list[float]] = []
        self.latest: dict[str, float] = {}
        """Of the last interval, over all ranks; NaN where nothing is known."""
        self.totals: dict[str, tuple[float, float]] = {}
        """For each figure what stands for the run so far, and the seconds it stands for."""
        self.wall = time.perf_counter()
        self.processor = time.process_time()

    def collect(self) -> list[float]:
        """This process's numbers since the last call: PROCESS_METRICS, then GPU_METRICS for each of
        its GPUs. Waits for these: an interval of metrics ends with work that is done."""
        if self.gpus:
            self.gpus.wait()
        wall = time.perf_counter()
        processor = time.process_time()
        cores = (processor - self.processor) / max(wall - self.wall, 1e-9)
        self.wall = wall
        self.processor = processor
        return [cores, resident_bytes() / GIB, *(self.gpus.take() if self.gpus else ())]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """What all ranks gave."""
        self.of_ranks = of_ranks

    def interval(self, seconds: float) -> dict[str, list[float | None]]:
        """For metrics.jsonl: a number for each process, or for each GPU. Counts them in for the
        run."""
        first = len(PROCESS_METRICS)
        width = len(GPU_METRICS)
        lists = {
            name: [row[at] for row in self.of_ranks] for at, name in enumerate(PROCESS_METRICS)
        }
        for at, name in enumerate(GPU_METRICS, start=first):
            lists[name] = [value for row in self.of_ranks for value in row[at::width]]
        self.latest = {name: combined(RULES[name], values) for name, values in lists.items()}
        for name, value in self.latest.items():
            if not math.isnan(value):
                self._count(name, value, seconds)
        known = {
            name: values for name, values in lists.items() if not math.isnan(self.latest[name])
        }
        return {
            name: [None if math.isnan(v) else round(v, 3) for v in values]
            for name, values in known.items()
        }

    def _count(self, name: str, value: float, seconds: float) -> None:
        before, weight = self.totals.get(name, (0.0, 0.0))  # no figure is negative
        whole = weight + seconds
        after = {
            "sum": before + value,
            "max": max(before, value),
            "mean": (before * weight + value * seconds) / whole,
        }
        self.totals[name] = after[RULES[name]], whole

    def short(self) -> str:
        """Of the latest interval, for the progress bar: that of GPUs, or `1.9 cores 0.6 GiB`."""
        return self.short_of_gpus() or "{cpu_cores:.1f} cores {resident_gib:.1f} GiB".format_map(
            self.latest
        )

    def short_of_gpus(self) -> str:
        """`GPU 97% 61.2 GiB 640 W`; empty without a GPU."""
        known = {name: value for name, value in self.latest.items() if not math.isnan(value)}
        return _in_words(known) if "gpu_memory_gib" in known else ""

    def summary(self) -> dict[str, float]:
        """For summary.json: means over processes, GPUs and time; peaks; the sum of all energy."""
        return {name: round(value, 3) for name, (value, _) in self.totals.items()}

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to tell of the whole of it."""
        return {name: list(total) for name, total in self.totals.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.totals = {
            name: (value, seconds) for name, (value, seconds) in state.items() if name in RULES
        }


def _in_words(found: dict[str, float]) -> str:
    """`GPU 97% 61.2 GiB 640 W`: what is known of it."""
    formats = (
        ("gpu_utilisation", "{:.0f}%"),
        ("gpu_memory_gib", "{:.1f} GiB"),
        ("power_watts", "{:.0f} W"),
    )
    return " ".join(
        ["GPU", *(words.format(found[name]) for name, words in formats if name in found)]
    )


def summary_line(figures: dict[str, float]) -> str:
    """`GPU 97% 61.2 GiB 640 W, at most 71 C, 12.3 Wh in all`; empty without a GPU."""
    if "gpu_memory_gib" not in figures:
        return ""
    parts = [_in_words(figures)]
    if "temperature_celsius" in figures:
        parts.append(f"at most {figures['temperature_celsius']:.0f} C")
    if "energy_wh" in figures:
        parts.append(f"{figures['energy_wh']:,.1f} Wh in all")
    return ", ".join(parts)


def hardware_monitor_for(device: str, all_gpus: bool) -> HardwareMonitor:
    """The monitor of a process that computes on `device`, or, if that is a GPU and `all_gpus`, on
    all visible GPUs."""
    if torch.device(device).type == "cpu":
        return HardwareMonitor()
    own = torch.device(device).index
    gpus = GpuSampler(range(torch.cuda.device_count()) if all_gpus else [own], visible_devices())
    gpus.keep_sampling()
    return HardwareMonitor(gpus)


class GpuSampler:
    """The GPUs that this process computes on, as NVML and torch see them; NVML is asked by a
    thread."""

    def __init__(self, numbers: Sequence[int], visible: str | None) -> None:
        """numbers: CUDA's. visible: CUDA_VISIBLE_DEVICES."""
        self.numbers = numbers
        self.lock = threading.Lock()
        self.told = False
        self.seen: list[list[dict[str, float]]] = [[] for _ in numbers]
        """For each GPU the samples since the last `take`."""
        self.taken: list[dict[str, float]] = [{} for _ in numbers]
        """The latest before."""
        self.handles: list[Any] = []
        try:
            pynvml.nvmlInit()
            uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in numbers]
            self.handles = [
                nvml_device(uuid, number, visible)
                for number, uuid in zip(numbers, uuids, strict=True)
            ]
        except pynvml.NVMLError as error:
            self._tell(error)

    def keep_sampling(self) -> None:
        """From now on, in a thread."""

        def go_on() -> None:
            pause = threading.Event()  # never set
            while not pause.wait(SAMPLE_SECONDS):
                self.sample()

        if self.handles:
            self.sample()
            threading.Thread(target=go_on, name="figures", daemon=True).start()

    def sample(self) -> None:
        """Asks NVML once."""
        for at, handle in enumerate(self.handles):
            found = {name: self._ask(question, handle) for name, question in QUESTIONS.items()}
            with self.lock:
                self.seen[at].append(found)

    def _ask(self, question: Callable[[Any], float], handle: Any) -> float:
        try:
            return question(handle)
        except (
            pynvml.NVMLError,
            AttributeError,
        ) as error:  # a MIG slice has no power; another pynvml, other names
            self._tell(error)
            return math.nan

    def _tell(self, error: Exception) -> None:
        if not self.told:
            self.told = True
            log.info("not all figures of GPUs are known: NVML says %s", error)

    def wait(self) -> None:
        """Until all is done that was given to the GPUs."""
        for number in self.numbers:
            torch.cuda.synchronize(number)

    def take(self) -> list[float]:
        """GPU_METRICS for each GPU, over the samples since the last call; without any, the
        latest."""
        numbers: list[float] = []
        for at, number in enumerate(self.numbers):
            with self.lock:
                samples, self.seen[at] = self.seen[at], []
            before = self.taken[at]
            latest = self.taken[at] = samples[-1] if samples else before
            found = {
                name: combined(
                    RULES[name], [one[name] for one in samples or [latest] if name in one]
                )
                for name in QUESTIONS
            }
            # Counted since the driver was loaded.
            found["energy_wh"] = latest.get("energy_wh", math.nan) - before.get(
                "energy_wh", math.nan
            )
            found["torch_memory_gib"] = _peak_of_torch(number) / GIB
            numbers += [found[name] for name in GPU_METRICS]
        return numbers


def _peak_of_torch(number: int) -> int:
    """Bytes that its allocator has given out at most. Not torch.cuda.max_memory_allocated: that
    flattens 100 names."""
    return torch.cuda.memory_stats_as_nested_dict(number)["allocated_bytes"]["all"]["peak"]


def _memory_of_this_process(handle: Any) -> float:
    """NaN where processes have other numbers for NVML than for themselves: in most containers."""
    processes: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    mine: list[Any] = [one.usedGpuMemory for one in processes if one.pid == os.getpid()]
    return mine[0] / GIB if mine and mine[0] is not None else math.nan


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
"""What NVML is asked about a device."""


def nvml_device(uuid: str, number: int, visible: str | None) -> Any:
    """NVML's handle of the GPU that CUDA calls `number`. Raises NVMLError if NVML does not know it.

    NVML knows nothing of CUDA_VISIBLE_DEVICES, nor of CUDA's order (fastest first), but of UUIDs.
    uuid: as CUDA says. Of a MIG slice that may be the UUID of the GPU it is cut from: its own
    stands in `visible`, by which it was chosen.
    """
    entries = [entry.strip() for entry in (visible or "").split(",")]
    chosen = entries[number] if number < len(entries) else ""
    names = [*([chosen] if chosen.startswith("MIG-") else []), f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError:
            if name == names[-1]:
                raise
    raise AssertionError("there is always a name")
