"""What the driver knows about the GPUs: how many, which, in what state, joined by which links. Asks NVML, not torch."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from ddp_train.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.text import counted

GIB = 2**30
USED_SHARE = 0.05
"""Of a GPU's memory, before we use it: the driver itself takes less than 1 %."""
SLOWER_SHARE = 0.9
"""Of the median clock of the GPUs under the same load."""
PCIE_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""In one direction, by generation."""
SLOWDOWNS = {
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot (hardware)",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "too hot (driver)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake of the server",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slow-down",
}
"""Reasons for a low clock that somebody should look at. The power cap is none: matrix products reach it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. What NVML does not tell of it is None."""

    index: int
    name: str = ""
    total_bytes: int = 0
    used_bytes: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    """Of others: process id and bytes. Inside a container those outside are not shown."""
    uncorrected_errors: int | None = None
    """Of memory, since the driver was loaded; None without ECC."""
    remap_pending: bool = False
    remap_failed: bool = False
    slowdowns: tuple[str, ...] = ()
    pcie_width: int = 0
    pcie_full_width: int = 0
    pcie_generation: int = 0
    """That of GPU and slot together, not the present one: an idle link is slowed down."""
    nvlinks: int = 0
    """Active ones."""
    nvlink_bytes_per_second: float = 0.0
    """Of one link in one direction."""
    error: str = ""
    """Why the driver cannot reach it; then nothing else is known."""

    @property
    def link(self) -> tuple[float, str]:
        """Bytes per second to other GPUs of this host in one direction, and what it is called."""
        if self.nvlinks and self.nvlink_bytes_per_second:
            return self.nvlinks * self.nvlink_bytes_per_second, f"NVLink, {self.nvlinks} links"
        lane = PCIE_LANE_BYTES_PER_SECOND.get(self.pcie_generation, 0.0)
        return lane * self.pcie_width, f"PCIe {self.pcie_generation} x{self.pcie_width}"


@dataclass(frozen=True)
class Gpus:
    """Those that this process may use, and their driver."""

    driver: str
    cuda: tuple[int, int]
    """The newest CUDA that the driver supports."""
    gpus: tuple[Gpu, ...]


def from_values(values: dict[str, Any]) -> Gpus:
    """Those of `dataclasses.asdict`, also after they were JSON."""
    return Gpus(values["driver"], tuple(values["cuda"]), tuple(Gpu(**gpu) for gpu in values["gpus"]))


class NoDriverError(Exception):
    """NVML does not answer. `str(error)` says why."""


def read_gpus(visible_devices: str | None) -> Gpus:
    """visible_devices: CUDA_VISIBLE_DEVICES, indices or UUIDs. Raises NoDriverError."""
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetCudaDriverVersion()
            gpus = tuple(_read(index) for index in _visible(visible_devices, pynvml.nvmlDeviceGetCount()))
            return Gpus(pynvml.nvmlSystemGetDriverVersion(), (version // 1000, version % 1000 // 10), gpus)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoDriverError(str(error)) from None


def _visible(visible_devices: str | None, present: int) -> list[int]:
    """Indices; CUDA stops at the first entry that is none. A UUID that no other GPU has is a lost one's."""
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
    """None of a GPU that does not answer."""
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
    """The answer, None if this GPU or driver has none."""
    unknown = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in unknown:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        raise


def slowdowns(handle: Any) -> tuple[str, ...]:
    """Why a GPU is slowed down at this moment, in words."""
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return tuple(argv for bit, argv in SLOWDOWNS.items() if reasons & bit)


def load_of(uuid: str) -> dict[str, Any]:
    """Clock in MHz, its maximum and the slow-downs of a GPU at this moment; {} where the driver does not tell.

    uuid: as torch gives it, without NVML's prefix.
    """
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        clocks = [get(handle, pynvml.NVML_CLOCK_SM) for get in (pynvml.nvmlDeviceGetClockInfo,
                                                                pynvml.nvmlDeviceGetMaxClockInfo)]  # fmt: skip
        return {"clock_mhz": clocks[0], "full_clock_mhz": clocks[1], "slowdowns": slowdowns(handle)}
    return {}


def _nvlinks(handle: Any) -> tuple[int, float]:
    """Active links, and the bytes per second of one in one direction."""
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


def absent(error: NoDriverError, device_folder: Path = Path("/sys/bus/pci/devices")) -> Finding:
    """No answer from NVML: is there no GPU, or a GPU without a driver that works?"""
    check, cards = "gpus", []
    for vendor in device_folder.glob("*/vendor"):
        display = vendor.with_name("class").read_text().startswith("0x03")
        if display and vendor.read_text().strip() == "0x10de":
            cards.append(vendor.parent.name)
    if not cards:
        return skipped(check, "this host has no NVIDIA GPU")
    said = f"{counted(len(cards), 'NVIDIA GPU')} on the PCI bus, but the driver gives no answer: {error}"
    return failure(
        check,
        said,
        "install the driver, or load it (nvidia-smi says more); after an update of it, reboot; in a container, start "
        "it with --gpus all",
    )


def count(found: Gpus, wanted: int) -> Finding:
    """wanted: processes on this host that need one each; 0 on a run that uses none."""
    check, alive = "gpus", [gpu for gpu in found.gpus if not gpu.error]
    lost = [f"GPU {gpu.index}: {gpu.error}" for gpu in found.gpus if gpu.error]
    if lost:
        return failure(check, "; ".join(lost), "see `dmesg | grep -i xid`; reset the GPU or reboot the host")
    if not alive:
        return skipped(check, "CUDA_VISIBLE_DEVICES hides all of them")
    if len(alive) < wanted:
        said = f"{counted(len(alive), 'GPU')} visible, {counted(wanted, 'process')} need one each"
        return failure(check, said, f"use launch.nproc_per_node={len(alive)}, or look at CUDA_VISIBLE_DEVICES")
    names = {gpu.name: sum(other.name == gpu.name for other in alive) for gpu in alive}
    said = ", ".join(f"{number} x {name}" for name, number in names.items())
    return ok(check, f"{said}, driver {found.driver}", names=names, driver=found.driver)


def models(found: Gpus) -> Finding:
    """Each rank gets the same share of a batch: unlike GPUs wait for the slowest."""
    kinds = dict.fromkeys((gpu.name, round(gpu.total_bytes / GIB)) for gpu in found.gpus if not gpu.error)
    said = ", ".join(f"{name} of {gib} GiB" for name, gib in kinds)
    if len(kinds) > 1:
        remedy = "choose those of one kind with CUDA_VISIBLE_DEVICES: the slowest sets the pace"
        return warning("gpu models", f"of {len(kinds)} kinds: {said}", remedy)
    return ok("gpu models", said)


def memory(found: Gpus) -> Finding:
    """What is taken before a run starts."""
    used = {gpu.index: (gpu.used_bytes, gpu.total_bytes) for gpu in found.gpus if not gpu.error}
    taken = [f"GPU {index}: {part / GIB:.1f} of {whole / GIB:.1f} GiB are in use"
             for index, (part, whole) in used.items() if part > USED_SHARE * whole]  # fmt: skip
    numbers = {"used_bytes": [part for part, _ in used.values()]}
    if taken:
        remedy = "end what uses it (nvidia-smi, or `fuser -v /dev/nvidia*` for processes without a name)"
        return warning("gpu memory", "; ".join(taken), remedy, **numbers)
    free = min((whole - part for part, whole in used.values()), default=0)
    return ok("gpu memory", f"{free / GIB:.1f} GiB free on each, at least", **numbers)


def other_processes(found: Gpus) -> Finding:
    """Whoever computes there too takes memory and time."""
    busy = [f"GPU {gpu.index}: process {pid} ({used / GIB:.1f} GiB)"
            for gpu in found.gpus for pid, used in gpu.processes]  # fmt: skip
    if busy:
        return warning("gpu processes", "; ".join(busy), "wait for them, end them, or use other GPUs")
    return ok("gpu processes", "none but ours")


def ecc(found: Gpus) -> Finding:
    """Errors that ECC could not correct, and memory rows that it gave up."""
    check, gpus = "gpu ecc", [gpu for gpu in found.gpus if not gpu.error]
    failed = [f"GPU {gpu.index}: a memory row could not be replaced" for gpu in gpus if gpu.remap_failed]
    failed += [f"GPU {gpu.index}: {counted(gpu.uncorrected_errors, 'uncorrected error')} since the driver was loaded"
               for gpu in gpus if gpu.uncorrected_errors]  # fmt: skip
    numbers: dict[str, Any] = {"uncorrected": [gpu.uncorrected_errors for gpu in gpus]}
    if failed:
        remedy = "reset the GPU (nvidia-smi -r) or reboot; if it comes again, have the GPU replaced"
        return failure(check, "; ".join(failed), remedy, **numbers)
    pending = [str(gpu.index) for gpu in gpus if gpu.remap_pending]
    if pending:
        said = f"GPU {', '.join(pending)}: a memory row waits to be replaced"
        return warning(check, said, "reset the GPU (nvidia-smi -r) or reboot before a long run", **numbers)
    without = [str(gpu.index) for gpu in gpus if gpu.uncorrected_errors is None]
    if without:
        return skipped(check, f"GPU {', '.join(without)}: no ECC, or it is off")
    return ok(check, "no uncorrected error", **numbers)


def links(found: Gpus) -> Finding:
    """PCIe with all its lanes, NVLink with all its links."""
    check, gpus = "gpu links", [gpu for gpu in found.gpus if not gpu.error]
    narrow = [f"GPU {gpu.index}: PCIe x{gpu.pcie_width} of x{gpu.pcie_full_width}"
              for gpu in gpus if 0 < gpu.pcie_width < gpu.pcie_full_width]  # fmt: skip
    most = max((gpu.nvlinks for gpu in gpus), default=0)
    narrow += [f"GPU {gpu.index}: {gpu.nvlinks} of {most} NVLinks" for gpu in gpus if gpu.nvlinks < most]
    numbers = {"bytes_per_second": [gpu.link[0] for gpu in gpus]}
    if narrow:
        remedy = "reseat the card, look at its slot and at `nvidia-smi nvlink -s`; a virtual machine may hide lanes"
        return warning(check, "; ".join(narrow), remedy, **numbers)
    speeds = dict.fromkeys(f"{name}, {speed / 1e9:.0f} GB/s each way" for speed, name in (gpu.link for gpu in gpus))
    return ok(check, "; ".join(speeds), **numbers)


def clocks(loads: dict[str, dict[str, Any]]) -> Finding:
    """Under the load of the straggler test. loads: `load_of`, by the name of the GPU and its rank; {} if unknown."""
    check = "gpu clocks"
    known = {who: load for who, load in loads.items() if load}
    if not known:
        return skipped(check, "the driver does not tell the clocks of a GPU under load")
    slowed = [f"{who}: {', '.join(load['slowdowns'])}" for who, load in known.items() if load["slowdowns"]]
    median = statistics.median(load["clock_mhz"] for load in known.values())
    slowed += [f"{who}: {load['clock_mhz']} MHz, the others {median:.0f}" for who, load in known.items()
               if load["clock_mhz"] < SLOWER_SHARE * median and not load["slowdowns"]]  # fmt: skip
    numbers = {"clock_mhz": {who: load["clock_mhz"] for who, load in known.items()}}
    if slowed:
        remedy = "look at fans, inlets and power (nvidia-smi -q -d PERFORMANCE,CLOCK); reset locked clocks: -rgc"
        return warning(check, "; ".join(slowed), remedy, **numbers)
    full = max(load["full_clock_mhz"] for load in known.values())
    return ok(check, f"{median:.0f} of {full} MHz under load", **numbers)


def throttling(found: Gpus) -> Finding:
    """Slowed down while it is idle: that is no power cap."""
    slowed = [f"GPU {gpu.index}: {', '.join(gpu.slowdowns)}" for gpu in found.gpus if gpu.slowdowns]
    if slowed:
        remedy = "look at fans, inlets and power supplies (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return warning("gpu throttling", "; ".join(slowed), remedy)
    return ok("gpu throttling", "none at rest")


def gpu_findings(found: Gpus, wanted: int) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """All checks of GPUs at rest, in the order of the table: name, function, arguments."""
    checks: list[tuple[str, Any, tuple[Any, ...]]] = [("gpus", count, (found, wanted))]
    if any(not gpu.error for gpu in found.gpus):
        checks += [
            (name, look, (found,))
            for name, look in (
                ("gpu models", models),
                ("gpu memory", memory),
                ("gpu processes", other_processes),
                ("gpu ecc", ecc),
                ("gpu throttling", throttling),
                ("gpu links", links),
            )
        ]
    return checks
