"""What this host has, found out without torch: importing it takes a second, NVML a few milliseconds."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pynvml


@dataclass(frozen=True)
class Machine:
    """GPUs that this process may use, and CPU cores."""

    cpus: int
    gpus: int = 0
    gpu_name: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    gpu_bytes: int = 0
    """Memory of the first GPU."""


def this_machine(visible_devices: str | None) -> Machine:
    """Asks NVML. `visible_devices` is CUDA_VISIBLE_DEVICES: indices or UUIDs; CUDA stops at the first invalid one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Machine(cpus)
    try:
        present = pynvml.nvmlDeviceGetCount()
        gpus = present if visible_devices is None else _count_visible(visible_devices, present)
        if not gpus:
            return Machine(cpus)
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Machine(cpus, gpus, pynvml.nvmlDeviceGetName(handle), capability, memory)
    finally:
        pynvml.nvmlShutdown()


def _count_visible(visible_devices: str, present: int) -> int:
    count = 0
    for entry in filter(None, (entry.strip() for entry in visible_devices.split(","))):
        if entry.lstrip("-").isdigit() and not 0 <= int(entry) < present:
            break
        count += 1
    return count
