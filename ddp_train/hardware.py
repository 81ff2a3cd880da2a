"""GPUs and CPU cores of this host, detected by NVML in a few milliseconds: importing torch takes a
second."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pynvml

from ddp_train.distributed.environment import c_compiler
from ddp_train.linux import processor_name
from ddp_train.text import counted

PACKAGES = ("torch", "torchvision", "numpy", "ddp-train")
"""Packages that results depend on."""
LINKS = 6
"""Fewest NVLinks of a GPU of a server: V100 has 6 at 25 GB/s each way, H100 18. The bridge of
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


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    """NVML inside. Raises NVMLError where there is none."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def detect_hardware(visible_devices: str | None) -> Hardware:
    """Query NVML.

    visible_devices: CUDA_VISIBLE_DEVICES, indices or UUIDs; CUDA stops at the first invalid one.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    hardware = Hardware(cpus)
    with contextlib.suppress(pynvml.NVMLError), _nvml():
        present = range(pynvml.nvmlDeviceGetCount())
        visible = _visible(visible_devices, present)
        if visible:
            hardware = _with_gpus(hardware, visible, present)
    return hardware


def _with_gpus(
    hardware: Hardware, visible: Sequence[int | str], present: Sequence[int]
) -> Hardware:
    """The hardware with its GPUs.

    visible: indices and UUIDs.
    present: indices of all GPUs of this host.
    """
    indices = [entry for entry in visible if isinstance(entry, int)]
    answers: list[dict[str, Any]] = []
    lost = []
    for index in indices or present:
        try:
            answers.append(_read(index))
        except pynvml.NVMLError as error:  # for example fallen off the bus (Xid 79)
            lost.append(f"GPU {index}: {error}")
    if answers:
        hardware = replace(hardware, **answers[0])
        if not indices:
            lost.clear()  # a GPU that is lost cannot be matched with a UUID
    # A process may see its own GPU alone. Parts of GPUs have no links.
    linked = indices if len(indices) > 1 else present
    has_parts = any(str(entry).startswith("MIG-") for entry in visible)
    nvlink = not has_parts and _are_linked(linked)
    return replace(hardware, gpus=len(visible), lost=tuple(lost), nvlink=nvlink)


def _read(index: int) -> dict[str, Any]:
    """Fields of Hardware for one GPU."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "gpu_name": pynvml.nvmlDeviceGetName(handle),
        "compute_capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
        "gpu_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    }


def _are_linked(indices: Sequence[int]) -> bool:
    """Whether each of several GPUs reaches each other one over NVLink, and has at least `LINKS` of
    them."""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        ways = [
            pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for one, other in itertools.combinations(handles, 2)
        ]
        active = [pynvml.nvmlDeviceGetNvLinkState(handle, LINKS - 1) for handle in handles]
    except pynvml.NVMLError:  # no such link among others
        return False
    return {*ways} == {pynvml.NVML_P2P_STATUS_OK} and all(active)


def _visible(visible_devices: str | None, present: Sequence[int]) -> list[int | str]:
    """The visible GPUs, by index or UUID."""
    if visible_devices is None:
        return [*present]
    visible: list[int | str] = []
    for entry in visible_devices.split(","):
        name = entry.strip()
        if not name.lstrip("-").isdigit():
            visible.append(name)
        elif int(name) in present:
            visible.append(int(name))
        else:
            break
    return [entry for entry in visible if entry != ""]


def gpu_names(visible_devices: str | None) -> list[str]:
    """The visible GPUs as CUDA_VISIBLE_DEVICES may name them: by UUID where NVML knows it, since
    the numbers of the others change when one falls off the bus."""
    names: list[str] = []
    with contextlib.suppress(pynvml.NVMLError), _nvml():
        for entry in _visible(visible_devices, range(pynvml.nvmlDeviceGetCount())):
            if isinstance(entry, int):
                names.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(entry)))
            else:
                names.append(entry)
        return names
    return []


def unreachable_gpus(names: list[str]) -> set[str]:
    """The GPUs of `gpu_names` that the driver does not reach, or list, any more.

    A part of one (MIG) counts as reached, and so do all where NVML does not work.
    """
    gone = set()
    whole = [name for name in names if name.startswith("GPU-")]
    with contextlib.suppress(pynvml.NVMLError), _nvml():
        for name in whole:
            try:
                pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(name))
            except pynvml.NVMLError:  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_FOUND
                gone.add(name)
    return gone


def hardware_description(machine: Hardware) -> str:
    """GPUs, if there are any; cores, processor and memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{counted(machine.cpus, 'core')} {processor_name()}, {memory:.0f} GiB"
    if not machine.gpus:
        return host
    return f"{machine.gpus} x {machine.gpu_name}, {machine.gpu_bytes / 2**30:.0f} GiB; {host}"


def why_no_triton() -> str:
    """Why Triton, by which torch.compile makes kernels for GPUs, cannot make any here; "" if it
    can."""
    if not importlib.util.find_spec("triton"):
        return "no Triton"
    if not c_compiler():
        return "no C compiler"
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # as Triton does
        scheme = "posix_prefix"
    if Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        return ""
    return "no Python.h (python3-dev)"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        # ddp_train itself may not be installed.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
