"""The GPUs of this host, as NVML reports them. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

PCIE_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bandwidth of a PCIe lane in one direction, by generation."""
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
    """The highest generation that GPU and slot support, not the current one: an idle link is slowed
    down."""
    nvlinks: int = 0
    """Number of active links."""
    nvlink_bytes_per_second: float = 0.0
    """Bandwidth of one link in one direction."""
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

    @property
    def alive(self) -> list[Gpu]:
        """The GPUs that the driver reaches."""
        return [gpu for gpu in self.gpus if not gpu.error]


def from_values(values: dict[str, Any]) -> Gpus:
    """GPUs from the values of `dataclasses.asdict`, also after a round trip through JSON."""
    gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
    return Gpus(values["driver"], tuple(values["cuda"]), gpus)


class NoDriverError(Exception):
    """NVML cannot be used. `str(error)` says why."""


def read_gpus(visible_devices: str | None) -> Gpus:
    """Read the visible GPUs. Raises NoDriverError.

    visible_devices: CUDA_VISIBLE_DEVICES, indices or UUIDs.
    """
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetCudaDriverVersion()
            indices = _visible(visible_devices, pynvml.nvmlDeviceGetCount())
            return Gpus(
                driver=pynvml.nvmlSystemGetDriverVersion(),
                cuda=(version // 1000, version % 1000 // 10),
                gpus=tuple(_read(index) for index in indices),
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
    indices: list[int] = []
    for entry in visible_devices.replace(" ", "").split(","):
        if not entry:
            continue
        if entry.isdigit() and int(entry) < present:
            indices.append(int(entry))
            continue
        uuids = {index: _uuid(index) for index in range(present) if index not in indices}
        same = [index for index, uuid in uuids.items() if uuid and uuid.startswith(entry)]
        silent = [index for index, uuid in uuids.items() if uuid is None]
        candidates = same + silent
        if entry.lstrip("-").isdigit() or not candidates:
            break
        indices.append(candidates[0])
    return indices


def _uuid(index: int) -> str | None:
    """The UUID of a GPU; None if it does not answer."""
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
        nvlinks, nvlink_bytes_per_second = _nvlinks(handle)
        return Gpu(
            index,
            name=pynvml.nvmlDeviceGetName(handle),
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            processes=tuple((process.pid, process.usedGpuMemory or 0) for process in processes),
            uncorrected_errors=_ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
            remap_pending=bool(remapped[2]),
            remap_failed=bool(remapped[3]),
            slowdowns=slowdowns(handle),
            pcie_width=_ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or 0,
            pcie_full_width=_ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0,
            pcie_generation=_ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0,
            nvlinks=nvlinks,
            nvlink_bytes_per_second=nvlink_bytes_per_second,
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
