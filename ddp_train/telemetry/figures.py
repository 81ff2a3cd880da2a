"""Names of the hardware's figures, how several values become one, and how they read. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

GIB = 2**30
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
"""The rule that makes one value of several: over samples of an interval, over GPUs, over a run.

Utilisation is the share of time in which a kernel ran, in percent. GPU memory is that in use on
the device, that of this process, and the peak of torch's allocator.
"""


def combined(rule: str, values: Iterable[float | None]) -> float:
    """Mean, max or sum of the known values; NaN if none is known."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return math.nan
    if rule == "max":
        return max(known)
    total = math.fsum(known)
    if rule == "mean":
        return total / len(known)
    return total


def gpu_line(figures: Mapping[str, float]) -> str:
    """`GPU 97% 61.2 GiB 640 W`, as far as it is known; empty without a GPU."""
    if "gpu_memory_gib" not in figures:
        return ""
    parts = ["GPU"]
    if "gpu_utilisation" in figures:
        parts.append(f"{figures['gpu_utilisation']:.0f}%")
    parts.append(f"{figures['gpu_memory_gib']:.1f} GiB")
    if "power_watts" in figures:
        parts.append(f"{figures['power_watts']:.0f} W")
    return " ".join(parts)


def summary_line(figures: Mapping[str, float]) -> str:
    """`GPU 97% 61.2 GiB 640 W, at most 71 C, 12.3 Wh in all`; empty without a GPU."""
    line = gpu_line(figures)
    if not line:
        return ""
    parts = [line]
    if "temperature_celsius" in figures:
        parts.append(f"at most {figures['temperature_celsius']:.0f} C")
    if "energy_wh" in figures:
        parts.append(f"{figures['energy_wh']:,.1f} Wh in all")
    return ", ".join(parts)
