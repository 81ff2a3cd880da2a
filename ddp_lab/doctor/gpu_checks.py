"""Checks of the GPUs by what NVML reports: number, models, memory, ECC errors, clocks, links.
Torch-free."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_lab.doctor.findings import Finding, failure, ok, run_check, skipped, warning
from ddp_lab.doctor.nvml import Gpu, Gpus, NoDriverError
from ddp_train.text import counted

GIB = 2**30
USED_SHARE = 0.05
"""Share of a GPU's memory that may be in use before a run: the driver itself takes less than 1
%."""
SLOWER_SHARE = 0.9
"""A clock below this share of the median is slow, under the same load."""


def no_driver(error: NoDriverError, device_folder: Path = Path("/sys/bus/pci/devices")) -> Finding:
    """The finding without NVML: skipped if there is no GPU, a failure if there is one whose driver
    does not work."""
    cards = []
    for vendor in device_folder.glob("*/vendor"):
        display = vendor.with_name("class").read_text().startswith("0x03")
        if display and vendor.read_text().strip() == "0x10de":
            cards.append(vendor.parent.name)
    if not cards:
        return skipped("this host has no NVIDIA GPU")
    detail = (
        f"{counted(len(cards), 'NVIDIA GPU')} on the PCI bus, but the driver does not respond:"
        f" {error}"
    )
    remedy = (
        "install or load the NVIDIA driver (nvidia-smi says more). After an update of the"
        " driver, reboot. Start a container with --gpus all"
    )
    return failure(detail, remedy)


def count(found: Gpus, wanted: int) -> Finding:
    """Find too few GPUs, and those that the driver does not reach.

    wanted: processes on this host that need one each, 0 on the CPU.
    """
    alive = found.alive
    lost = [f"GPU {gpu.index}: {gpu.error}" for gpu in found.gpus if gpu.error]
    if lost:
        return failure(
            "; ".join(lost), "see `dmesg | grep -i xid`; reset the GPU or reboot the host"
        )
    if not alive:
        return skipped("CUDA_VISIBLE_DEVICES hides all GPUs of this host")
    if len(alive) < wanted:
        detail = f"{counted(len(alive), 'GPU')} visible, {counted(wanted, 'process')} need one each"
        return failure(
            detail, f"use launch.nproc_per_node={len(alive)}, or check CUDA_VISIBLE_DEVICES"
        )
    names = dict(Counter(gpu.name for gpu in alive))
    detail = ", ".join(f"{number} x {name}" for name, number in names.items())
    return ok(f"{detail}, driver {found.driver}", names=names, driver=found.driver)


def models(gpus: Sequence[Gpu]) -> Finding:
    """Find GPUs of different kinds: all ranks get micro-batches of the same size, and wait for the
    slowest GPU."""
    kinds = dict.fromkeys((gpu.name, round(gpu.total_bytes / GIB)) for gpu in gpus)
    detail = ", ".join(f"{name} of {gib} GiB" for name, gib in kinds)
    if len(kinds) > 1:
        remedy = "choose GPUs of one kind with CUDA_VISIBLE_DEVICES: all ranks wait for the slowest"
        return warning(f"{len(kinds)} kinds: {detail}", remedy)
    return ok(detail)


def memory(gpus: Sequence[Gpu]) -> Finding:
    """Find memory in use before a run starts."""
    occupied = [
        f"GPU {gpu.index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB are in use"
        for gpu in gpus
        if gpu.used_bytes > USED_SHARE * gpu.total_bytes
    ]
    numbers = {"used_bytes": [gpu.used_bytes for gpu in gpus]}
    if occupied:
        remedy = (
            "end the processes that use this memory: nvidia-smi lists them, `fuser -v"
            " /dev/nvidia*` also those without a name"
        )
        return warning("; ".join(occupied), remedy, **numbers)
    free = min(gpu.total_bytes - gpu.used_bytes for gpu in gpus)
    return ok(f"at least {free / GIB:.1f} GiB free on each", **numbers)


def other_processes(gpus: Sequence[Gpu]) -> Finding:
    """Find processes that already compute on the GPUs: they take memory and time."""
    busy = [
        f"GPU {gpu.index}: process {pid} ({used / GIB:.1f} GiB)"
        for gpu in gpus
        for pid, used in gpu.processes
    ]
    if busy:
        return warning(
            "; ".join(busy),
            "wait until these processes end, end them, or choose other GPUs by"
            " CUDA_VISIBLE_DEVICES",
        )
    return ok("no other process")


def ecc(gpus: Sequence[Gpu]) -> Finding:
    """Find memory errors that ECC could not correct, and memory rows that must be replaced."""
    failed = [
        f"GPU {gpu.index}: a memory row could not be replaced" for gpu in gpus if gpu.remap_failed
    ]
    failed += [
        f"GPU {gpu.index}: {counted(gpu.uncorrected_errors, 'uncorrected error')} since the driver"
        " was loaded"
        for gpu in gpus
        if gpu.uncorrected_errors
    ]
    numbers: dict[str, Any] = {"uncorrected": [gpu.uncorrected_errors for gpu in gpus]}
    if failed:
        remedy = (
            "reset the GPU (nvidia-smi -r) or reboot; if errors come again, have the GPU replaced"
        )
        return failure("; ".join(failed), remedy, **numbers)
    pending = [str(gpu.index) for gpu in gpus if gpu.remap_pending]
    if pending:
        detail = f"GPU {', '.join(pending)}: a memory row is due for replacement"
        return warning(
            detail, "reset the GPU (nvidia-smi -r) or reboot before a long run", **numbers
        )
    without = [str(gpu.index) for gpu in gpus if gpu.uncorrected_errors is None]
    if without:
        return skipped(f"GPU {', '.join(without)}: no ECC, or it is off")
    return ok("no uncorrected error", **numbers)


def links(gpus: Sequence[Gpu]) -> Finding:
    """Find PCIe with unused lanes, and GPUs with fewer NVLinks than others."""
    narrow = [
        f"GPU {gpu.index}: PCIe x{gpu.pcie_width} of x{gpu.pcie_full_width}"
        for gpu in gpus
        if 0 < gpu.pcie_width < gpu.pcie_full_width
    ]
    most = max(gpu.nvlinks for gpu in gpus)
    narrow += [
        f"GPU {gpu.index}: {gpu.nvlinks} of {most} NVLinks" for gpu in gpus if gpu.nvlinks < most
    ]
    numbers = {"bytes_per_second": [gpu.link[0] for gpu in gpus]}
    if narrow:
        remedy = (
            "reseat the card, check its slot and `nvidia-smi nvlink -s`; a virtual machine may hide"
            " lanes"
        )
        return warning("; ".join(narrow), remedy, **numbers)
    speeds = dict.fromkeys(
        f"{name}, {speed / 1e9:.0f} GB/s each way" for speed, name in (gpu.link for gpu in gpus)
    )
    return ok("; ".join(speeds), **numbers)


def clocks(loads: dict[str, dict[str, Any]]) -> Finding:
    """Find slow clocks during the matrix products of the straggler test.

    loads: results of `nvml.read_load`, by rank; {} where it is unknown.
    """
    known = {rank: load for rank, load in loads.items() if load}
    if not known:
        return skipped("the driver does not report clocks")
    clock_mhz = {rank: load["clock_mhz"] for rank, load in known.items()}
    median = statistics.median(clock_mhz.values())
    slowed = [
        f"{rank}: {', '.join(load['slowdowns'])}"
        for rank, load in known.items()
        if load["slowdowns"]
    ]
    slowed += [
        f"{rank}: {clock} MHz, the others {median:.0f}"
        for rank, clock in clock_mhz.items()
        if clock < SLOWER_SHARE * median and not known[rank]["slowdowns"]
    ]
    if slowed:
        remedy = (
            "check fans, inlets and power (nvidia-smi -q -d PERFORMANCE,CLOCK); reset locked"
            " clocks: nvidia-smi -rgc"
        )
        return warning("; ".join(slowed), remedy, clock_mhz=clock_mhz)
    full = max(load["full_clock_mhz"] for load in known.values())
    return ok(f"{median:.0f} of {full} MHz under load", clock_mhz=clock_mhz)


def throttling(gpus: Sequence[Gpu]) -> Finding:
    """Find slow-downs of an idle GPU, which the power cap cannot cause."""
    slowed = [f"GPU {gpu.index}: {', '.join(gpu.slowdowns)}" for gpu in gpus if gpu.slowdowns]
    if slowed:
        remedy = "check fans, inlets and power supplies (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return warning("; ".join(slowed), remedy)
    return ok("none while idle")


CHECKS: dict[str, Callable[[Sequence[Gpu]], Finding]] = {
    "gpu models": models,
    "gpu memory": memory,
    "gpu processes": other_processes,
    "gpu ecc": ecc,
    "gpu throttling": throttling,
    "gpu links": links,
}
"""Checks of idle GPUs, in the order of the table."""


def check_gpus(found: Gpus, wanted: int) -> list[Finding]:
    """The findings about idle GPUs. wanted: see `count`."""
    findings = [run_check("gpus", count, found, wanted)]
    if found.alive:
        findings += [run_check(name, check, found.alive) for name, check in CHECKS.items()]
    return findings
