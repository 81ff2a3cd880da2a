"""Checks of the GPUs by what NVML reports: number, models, memory, ECC errors, clocks, links.
Torch-free."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from ddp_lab.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.text import counted

GIB = 2**30
USED_SHARE = 0.05
"""Share of a GPU's memory that may be in use before a run: the driver itself takes less than 1
%."""
SLOWER_SHARE = 0.9
"""A clock below this share of the median is slow, under the same load."""
PCIE_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""In one direction, by generation."""
SLOWDOWNS = {
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot (hardware)",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "too hot (driver)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake of the server",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slow-down",
}
"""Reasons for a low clock that need attention. The power cap is not one: matrix products reach
it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Values that NVML does not report are None."""

    index: int
    name: str = ""
    total_bytes: int = 0
    used_bytes: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    """Process id and bytes of each process on it. Inside a container, processes outside are not
    shown."""
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded; None without ECC."""
    remap_pending: bool = False
    remap_failed: bool = False
    slowdowns: tuple[str, ...] = ()
    pcie_width: int = 0
    pcie_full_width: int = 0
    pcie_generation: int = 0
    """The highest that GPU and slot support, not the current one: an idle link is slowed down."""
    nvlinks: int = 0
    """Number of active links."""
    nvlink_bytes_per_second: float = 0.0
    """Of one link, in one direction."""
    error: str = ""
    """Why the driver cannot reach the GPU; then all other values are defaults."""

    @property
    def link(self) -> tuple[float, str]:
        """Bandwidth to other GPUs of this host in one direction, in bytes per second, and the name
        of the link."""
        if self.nvlinks and self.nvlink_bytes_per_second:
            return self.nvlinks * self.nvlink_bytes_per_second, f"NVLink, {self.nvlinks} links"
        lane = PCIE_LANE_BYTES_PER_SECOND.get(self.pcie_generation, 0.0)
        return lane * self.pcie_width, f"PCIe {self.pcie_generation} x{self.pcie_width}"


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use, and their driver."""

    driver: str
    cuda: tuple[int, int]
    """The newest CUDA that the driver supports."""
    gpus: tuple[Gpu, ...]


def from_values(values: dict[str, Any]) -> Gpus:
    """From the values of `dataclasses.asdict`, also after a round trip through JSON."""
    return Gpus(
        values["driver"], tuple(values["cuda"]), tuple(Gpu(**gpu) for gpu in values["gpus"])
    )


class NoDriverError(Exception):
    """NVML cannot be used. `str(error)` says why."""


def read_gpus(visible_devices: str | None) -> Gpus:
    """Reads the visible GPUs. visible_devices: CUDA_VISIBLE_DEVICES, indices or UUIDs. Raises
    NoDriverError."""
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetCudaDriverVersion()
            gpus = tuple(
                _read(index) for index in _visible(visible_devices, pynvml.nvmlDeviceGetCount())
            )
            return Gpus(
                pynvml.nvmlSystemGetDriverVersion(), (version // 1000, version % 1000 // 10), gpus
            )
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoDriverError(str(error)) from None


def _visible(visible_devices: str | None, present: int) -> list[int]:
    """Indices of the visible GPUs. Like CUDA it stops at the first invalid entry. A UUID that no
    GPU reports is taken for that of a GPU that does not answer."""
    if visible_devices is None:
        return list(range(present))
    found: list[int] = []
    for entry in filter(None, (entry.strip() for entry in visible_devices.split(","))):
        if entry.isdigit() and int(entry) < present:
            found.append(int(entry))
            continue
        uuids = {index: _uuid(index) for index in range(present) if index not in found}
        same = [index for index, uuid in uuids.items() if uuid and uuid.startswith(entry)]
        same += [index for index, uuid in uuids.items() if uuid is None]
        if entry.lstrip("-").isdigit() or not same:
            break
        found += same[:1]
    return found


def _uuid(index: int) -> str | None:
    """None if the GPU does not answer."""
    try:
        return pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return None


def _read(index: int) -> Gpu:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
        errors = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return Gpu(
            index,
            pynvml.nvmlDeviceGetName(handle),
            int(memory.total),
            int(memory.used),
            tuple((process.pid, process.usedGpuMemory or 0) for process in processes),
            _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
            bool(remapped[2]),
            bool(remapped[3]),
            slowdowns(handle),
            _ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or 0,
            _ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0,
            _ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0,
            *_nvlinks(handle),
        )
    except pynvml.NVMLError as error:
        return Gpu(index, error=str(error))


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of NVML, None if this GPU or driver does not support the question."""
    unknown = (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    )
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in unknown:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        raise


def slowdowns(handle: Any) -> tuple[str, ...]:
    """Why a GPU is slowed down at this moment, as text."""
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return tuple(text for bit, text in SLOWDOWNS.items() if reasons & bit)


def read_load(uuid: str) -> dict[str, Any]:
    """Clock and maximum clock in MHz, and slow-downs of a GPU at this moment; {} if the driver does
    not report them.

    uuid: as torch gives it, without NVML's prefix.
    """
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {
            "clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "full_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "slowdowns": slowdowns(handle),
        }
    return {}


def _nvlinks(handle: Any) -> tuple[int, float]:
    """The number of active links, and the bytes per second of one link in one direction."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError:  # no such link, or no NVLink at all
            break
    if not active:
        return 0, 0.0
    fields = (pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, (pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, 0))
    for value in _ask(pynvml.nvmlDeviceGetFieldValues, handle, fields) or []:
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.value.uiVal:
            return active, value.value.uiVal * 1e6
    return active, 0.0


def no_driver(error: NoDriverError, device_folder: Path = Path("/sys/bus/pci/devices")) -> Finding:
    """The finding without NVML: skipped if there is no GPU, a failure if there is one whose driver
    does not work."""
    check = "gpus"
    cards = []
    for vendor in device_folder.glob("*/vendor"):
        display = vendor.with_name("class").read_text().startswith("0x03")
        if display and vendor.read_text().strip() == "0x10de":
            cards.append(vendor.parent.name)
    if not cards:
        return skipped(check, "this host has no NVIDIA GPU")
    detail = (
        f"{counted(len(cards), 'NVIDIA GPU')} on the PCI bus, but the driver does not respond:"
        f" {error}"
    )
    remedy = (
        "install or load the driver (nvidia-smi says more); after a driver update, reboot; start a"
        " container with "
    )
    return failure(check, detail, remedy + "--gpus all")


def count(found: Gpus, wanted: int) -> Finding:
    """Whether there are enough GPUs, and the driver reaches all.

    wanted: processes on this host that need one each, 0 on the CPU.
    """
    check = "gpus"
    alive = [gpu for gpu in found.gpus if not gpu.error]
    lost = [f"GPU {gpu.index}: {gpu.error}" for gpu in found.gpus if gpu.error]
    if lost:
        return failure(
            check, "; ".join(lost), "see `dmesg | grep -i xid`; reset the GPU or reboot the host"
        )
    if not alive:
        return skipped(check, "CUDA_VISIBLE_DEVICES hides all GPUs of this host")
    if len(alive) < wanted:
        detail = f"{counted(len(alive), 'GPU')} visible, {counted(wanted, 'process')} need one each"
        return failure(
            check, detail, f"use launch.nproc_per_node={len(alive)}, or check CUDA_VISIBLE_DEVICES"
        )
    names = {gpu.name: sum(other.name == gpu.name for other in alive) for gpu in alive}
    detail = ", ".join(f"{number} x {name}" for name, number in names.items())
    return ok(check, f"{detail}, driver {found.driver}", names=names, driver=found.driver)


def models(found: Gpus) -> Finding:
    """Whether all GPUs are of one kind: all ranks get micro-batches of the same size, and wait for
    the slowest GPU."""
    kinds = dict.fromkeys(
        (gpu.name, round(gpu.total_bytes / GIB)) for gpu in found.gpus if not gpu.error
    )
    detail = ", ".join(f"{name} of {gib} GiB" for name, gib in kinds)
    if len(kinds) > 1:
        remedy = "choose GPUs of one kind with CUDA_VISIBLE_DEVICES: all ranks wait for the slowest"
        return warning("gpu models", f"{len(kinds)} kinds: {detail}", remedy)
    return ok("gpu models", detail)


def memory(found: Gpus) -> Finding:
    """Memory in use before a run starts."""
    used = {gpu.index: (gpu.used_bytes, gpu.total_bytes) for gpu in found.gpus if not gpu.error}
    taken = [
        f"GPU {index}: {part / GIB:.1f} of {whole / GIB:.1f} GiB are in use"
        for index, (part, whole) in used.items()
        if part > USED_SHARE * whole
    ]
    numbers = {"used_bytes": [part for part, _ in used.values()]}
    if taken:
        remedy = (
            "end the processes that use it (nvidia-smi; `fuser -v /dev/nvidia*` for processes"
            " without a name)"
        )
        return warning("gpu memory", "; ".join(taken), remedy, **numbers)
    free = min((whole - part for part, whole in used.values()), default=0)
    return ok("gpu memory", f"at least {free / GIB:.1f} GiB free on each", **numbers)


def other_processes(found: Gpus) -> Finding:
    """Processes that already compute on the GPUs: they take memory and time."""
    busy = [
        f"GPU {gpu.index}: process {pid} ({used / GIB:.1f} GiB)"
        for gpu in found.gpus
        for pid, used in gpu.processes
    ]
    if busy:
        return warning(
            "gpu processes", "; ".join(busy), "wait for them, end them, or use other GPUs"
        )
    return ok("gpu processes", "no other process")


def ecc(found: Gpus) -> Finding:
    """Memory errors that ECC could not correct, and memory rows that must be replaced."""
    check = "gpu ecc"
    gpus = [gpu for gpu in found.gpus if not gpu.error]
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
        return failure(check, "; ".join(failed), remedy, **numbers)
    pending = [str(gpu.index) for gpu in gpus if gpu.remap_pending]
    if pending:
        detail = f"GPU {', '.join(pending)}: a memory row is due for replacement"
        return warning(
            check, detail, "reset the GPU (nvidia-smi -r) or reboot before a long run", **numbers
        )
    without = [str(gpu.index) for gpu in gpus if gpu.uncorrected_errors is None]
    if without:
        return skipped(check, f"GPU {', '.join(without)}: no ECC, or it is off")
    return ok(check, "no uncorrected error", **numbers)


def links(found: Gpus) -> Finding:
    """Whether PCIe uses all lanes, and each GPU as many NVLinks as the others."""
    check = "gpu links"
    gpus = [gpu for gpu in found.gpus if not gpu.error]
    narrow = [
        f"GPU {gpu.index}: PCIe x{gpu.pcie_width} of x{gpu.pcie_full_width}"
        for gpu in gpus
        if 0 < gpu.pcie_width < gpu.pcie_full_width
    ]
    most = max((gpu.nvlinks for gpu in gpus), default=0)
    narrow += [
        f"GPU {gpu.index}: {gpu.nvlinks} of {most} NVLinks" for gpu in gpus if gpu.nvlinks < most
    ]
    numbers = {"bytes_per_second": [gpu.link[0] for gpu in gpus]}
    if narrow:
        remedy = (
            "reseat the card, check its slot and `nvidia-smi nvlink -s`; a virtual machine may hide"
            " lanes"
        )
        return warning(check, "; ".join(narrow), remedy, **numbers)
    speeds = dict.fromkeys(
        f"{name}, {speed / 1e9:.0f} GB/s each way" for speed, name in (gpu.link for gpu in gpus)
    )
    return ok(check, "; ".join(speeds), **numbers)


def clocks(loads: dict[str, dict[str, Any]]) -> Finding:
    """Clocks during the matrix products of the straggler test. loads: of `read_load`, by rank; {}
    if unknown."""
    check = "gpu clocks"
    known = {who: load for who, load in loads.items() if load}
    if not known:
        return skipped(check, "the driver does not report clocks")
    slowed = [
        f"{who}: {', '.join(load['slowdowns'])}" for who, load in known.items() if load["slowdowns"]
    ]
    median = statistics.median(load["clock_mhz"] for load in known.values())
    slowed += [
        f"{who}: {load['clock_mhz']} MHz, the others {median:.0f}"
        for who, load in known.items()
        if load["clock_mhz"] < SLOWER_SHARE * median and not load["slowdowns"]
    ]
    numbers = {"clock_mhz": {who: load["clock_mhz"] for who, load in known.items()}}
    if slowed:
        remedy = (
            "check fans, inlets and power (nvidia-smi -q -d PERFORMANCE,CLOCK); reset locked"
            " clocks: nvidia-smi -rgc"
        )
        return warning(check, "; ".join(slowed), remedy, **numbers)
    full = max(load["full_clock_mhz"] for load in known.values())
    return ok(check, f"{median:.0f} of {full} MHz under load", **numbers)


def throttling(found: Gpus) -> Finding:
    """Slow-downs of an idle GPU, which the power cap cannot cause."""
    slowed = [f"GPU {gpu.index}: {', '.join(gpu.slowdowns)}" for gpu in found.gpus if gpu.slowdowns]
    if slowed:
        remedy = "check fans, inlets and power supplies (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return warning("gpu throttling", "; ".join(slowed), remedy)
    return ok("gpu throttling", "none while idle")


def all_checks(found: Gpus, wanted: int) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """All checks of idle GPUs in the order of the table: name, function, arguments."""
    checks: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("gpus", count, (found, wanted)),
        ("gpu models", models, (found,)),
        ("gpu memory", memory, (found,)),
        ("gpu processes", other_processes, (found,)),
        ("gpu ecc", ecc, (found,)),
        ("gpu throttling", throttling, (found,)),
        ("gpu links", links, (found,)),
    ]
    if any(not gpu.error for gpu in found.gpus):
        return checks
    return checks[:1]
