"""GPUs and CPU cores of this host, detected by NVML in a few milliseconds: importing torch takes a
second."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from ddp_train.distributed.environment import c_compiler
from ddp_train.text import counted

PACKAGES = ("torch", "torchvision", "numpy", "ddp-train")
"""Whose versions results depend on."""
LINKS = 6
"""NVLinks of a GPU of a server, at least: V100 has 6 at 25 GB/s each way, H100 18. The bridge of
two RTX 3090 has 4 at 14 GB/s, by which half a GB of gradients takes 9 ms."""


@dataclass(frozen=True)
class Hardware:
    """GPUs that this process may use, and CPU cores."""

    cpus: int
    gpus: int = 0
    gpu_name: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    gpu_bytes: int = 0
    """Memory of the first GPU that answers; `gpu_name` and `compute_capability` are of the same
    one."""
    lost: tuple[str, ...] = ()
    """Visible GPUs that the driver cannot reach, and why. `gpus` counts them."""
    nvlink: bool = False
    """Whether the visible GPUs reach each other over several NVLinks. Where fewer than two are
    named by their indices: whether all GPUs of this host do."""


def detect_hardware(visible_devices: str | None) -> Hardware:
    """Queries NVML. visible_devices: CUDA_VISIBLE_DEVICES, indices or UUIDs; CUDA stops at the
    first invalid one."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Hardware(cpus)
    try:
        present = pynvml.nvmlDeviceGetCount()
        if visible_devices is None:
            visible = list(range(present))
        else:
            visible = _visible(visible_devices, present)
        if not visible:
            return Hardware(cpus)
        indices = [entry for entry in visible if isinstance(entry, int)]
        found = []
        lost = []
        for index in indices or range(present):
            try:
                found.append(_read(index))
            except pynvml.NVMLError as error:  # for example fallen off the bus (Xid 79)
                lost.append(f"GPU {index}: {error}")
        name, capability, memory = found[0] if found else ("", (0, 0), 0)
        known = bool(indices) or not found  # a GPU that is lost cannot be matched with a UUID
        parts = any(str(one).startswith("MIG-") for one in visible)  # of GPUs; they have no links
        named = (
            indices if len(indices) > 1 else list(range(present))
        )  # a process may see its own GPU alone
        nvlink = not parts and _linked(named)
        return Hardware(
            cpus, len(visible), name, capability, memory, tuple(lost) if known else (), nvlink
        )
    except pynvml.NVMLError:  # it cannot even count them
        return Hardware(cpus)
    finally:
        pynvml.nvmlShutdown()


def gpu_names(visible_devices: str | None) -> list[str]:
    """The visible GPUs as CUDA_VISIBLE_DEVICES may name them: by UUID where NVML knows it, since
    the numbers of the others change when one falls off the bus."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        present = pynvml.nvmlDeviceGetCount()
        if visible_devices is None:
            visible = list(range(present))
        else:
            visible = _visible(visible_devices, present)
        return [
            pynvml.nvmlDeviceGetUUID(_handle(one)) if isinstance(one, int) else one
            for one in visible
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def unreachable_gpus(names: list[str]) -> set[str]:
    """Those of `gpu_names` that the driver does not reach, or list, any more. A part of one (MIG)
    counts as reached."""
    whole = [name for name in names if name.startswith("GPU-")]
    if not whole:
        return set()
    gone = set()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return set()  # nothing is known then: all would be gone
    try:
        for name in whole:
            try:
                pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(name))
            except pynvml.NVMLError:  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_FOUND
                gone.add(name)
    finally:
        pynvml.nvmlShutdown()
    return gone


def _handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _read(index: int) -> tuple[str, tuple[int, int], int]:
    """Name, compute capability, bytes of memory."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return (
        pynvml.nvmlDeviceGetName(handle),
        capability,
        int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _linked(indices: list[int]) -> bool:
    """Whether each of several GPUs reaches each other one over NVLink, and has at least `LINKS` of
    them."""
    try:
        ways = [
            pynvml.nvmlDeviceGetP2PStatus(
                _handle(one), _handle(other), pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
            for one, other in itertools.combinations(indices, 2)
        ]
        active = [pynvml.nvmlDeviceGetNvLinkState(_handle(one), LINKS - 1) for one in indices]
    except pynvml.NVMLError:  # no such link among others
        return False
    return bool(ways) and all(way == pynvml.NVML_P2P_STATUS_OK for way in ways) and all(active)


def _visible(visible_devices: str, present: int) -> list[int | str]:
    """Indices and UUIDs."""
    found: list[int | str] = []
    for entry in filter(None, (entry.strip() for entry in visible_devices.split(","))):
        is_index = entry.lstrip("-").isdigit()
        if is_index and not 0 <= int(entry) < present:
            break
        found.append(int(entry) if is_index else entry)
    return found


def hardware_description(machine: Hardware) -> str:
    """GPUs, if there are any; cores, processor and memory."""
    info = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if info.exists():
        found = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        model = found[0] if found else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{counted(machine.cpus, 'core')} {model}, {memory:.0f} GiB"
    if machine.gpus:
        gpus = f"{machine.gpus} x {machine.gpu_name}, {machine.gpu_bytes / 2**30:.0f} GiB; "
    else:
        gpus = ""
    return gpus + host


def why_no_triton() -> str:
    """Why Triton, by which torch.compile makes kernels for GPUs, cannot make any here; "" if it
    can."""
    if not importlib.util.find_spec("triton"):
        return "no Triton"
    if not c_compiler():
        return "no C compiler"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_path(
        "include", "posix_prefix" if scheme == "posix_local" else scheme
    )  # as Triton does
    if Path(headers, "Python.h").exists():
        return ""
    return "no Python.h (python3-dev)"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # ddp_train itself, if it is not installed
            continue
    return found
