"""What a reader must know of the machine that figures come from. Does not import torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

from ddp_train.config.machine import this_machine
from ddp_train.distributed.world import visible_devices

PACKAGES = ("torch", "torchvision", "numpy", "ddp-train")


def load_average() -> float:
    """How busy this machine is: processes that run or want to, over the last minute."""
    return os.getloadavg()[0]


def facts(load_before: float | None = None) -> dict[str, str]:
    """Hardware, versions, date. load_before: the load average when the work began, to be told beside that of now."""
    known = {"Hardware": hardware()}
    if load_before is not None:
        known["Other work"] = f"load average {load_before:.1f} at the start, {load_average():.1f} at the end"
    known["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
    known["System"] = f"{platform.system()} {platform.release()}"
    known["Date"] = str(datetime.date.today())
    return known


def hardware() -> str:
    """GPUs, if there are any; cores, processor and memory."""
    machine, info = this_machine(visible_devices()), Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if info.exists():
        found = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = found[0] if found else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{machine.cpus} cores {model}, {memory:.0f} GiB"
    gpus = f"{machine.gpus} x {machine.gpu_name}, {machine.gpu_bytes / 2**30:.0f} GiB; " if machine.gpus else ""
    return gpus + host


def versions() -> dict[str, str]:
    """Of Python and of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # ddp_train itself, run from its folder
            continue
    return found
