"""Findings from the results of all ranks' test processes: exchange, bandwidth, stragglers, torch.
Torch-free."""

from __future__ import annotations

from typing import Any

from ddp_lab.doctor.collective_runner import RankResult
from ddp_lab.doctor.collective_stages import NEIGHBOURS, Stage
from ddp_lab.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.errors import HangError, LaunchError
from ddp_train.options.schema import Config
from ddp_train.resilience.failure import is_peer_error
from ddp_train.text import counted

SLOWER = {"cpu": 2.0, "cuda": 1.15}
"""A rank is a straggler if it takes this many times as long as the fastest. Cores are shared with
other work, GPUs should not be."""
LINK_SHARE = 0.5
"""Least share of the link's bandwidth. NCCL reached 70 to 90 % of NVLink with 256 MiB on H200s."""
TOO_EARLY = "the test processes did not get that far: see the row exchange"


def exchange(
    results: list[RankResult], backend: str, without_peer_access: list[RankResult] | None = None
) -> Finding:
    """Whether every rank could send to the others, in time and with correct data.

    without_peer_access: results of a second test with NCCL_P2P_DISABLE=1, if there was one.
    """
    if any(result.stage != Stage.DONE or result.code != 0 for result in results):
        return _failed_exchange(results, backend, without_peer_access)
    if len(results) == 1:
        return skipped("one process")
    received = [result.results["exchange"] for result in results]
    wrong = [pair for one in received for pair in one["wrong"]]
    if wrong or not all(one["summed"] for one in received):
        pairs = (
            ", ".join(f"rank {sender} to rank {receiver}" for sender, receiver in wrong)
            or "all-reduce"
        )
        remedy = (
            "try NCCL_P2P_DISABLE=1: if it helps, switch off IOMMU and ACS for the GPUs (NCCL user"
            " guide, Troubleshooting); if not, test memory and cables"
        )
        return failure(f"received data is corrupt: {pairs}", remedy, wrong=wrong)
    no_access = [
        (result.rank, other)
        for result in results
        for other in result.results["compute"].get("no_peer_access", [])
    ]
    if backend == "nccl" and no_access:
        pairs = ", ".join(f"rank {rank} to GPU {other}" for rank, other in no_access)
        detail = f"no peer access: {pairs}; NCCL goes through host memory"
        return warning(
            detail, "`nvidia-smi topo -p2p r` shows why; consumer GPUs have no peer access"
        )
    return ok(
        f"{counted(len(results), 'process')} over {backend}, up to {NEIGHBOURS} neighbours each",
    )


def _failed_exchange(
    results: list[RankResult], backend: str, without_peer_access: list[RankResult] | None
) -> Finding:
    """Names the cause: in this order a process that survives SIGKILL, is stopped, died, or is
    furthest behind."""
    unkillable = [result for result in results if result.unkillable_state]
    if unkillable:
        detail = " and ".join(
            f"{result.where} survives SIGKILL (state {result.unkillable_state})"
            for result in unkillable
        )
        remedy = (
            "it waits in the kernel: see `cat /proc/PID/stack` and `dmesg`; if it waits for the"
            " GPU's driver, reboot the host"
        )
        return failure(detail, remedy, HangError.exit_code)
    stopped = [result for result in results if result.stopped]
    if stopped:
        detail = " and ".join(f"{result.where} is stopped" for result in stopped)
        remedy = (
            "find out what stopped it (SIGSTOP): a debugger, a batch system, a frozen container?"
        )
        return failure(detail, remedy, HangError.exit_code)
    died = [result for result in results if result.code]
    if died:
        first = next(
            (result for result in died if not is_peer_error(RuntimeError(result.error))), died[0]
        )
        code = first.code or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        detail = (
            f"{first.name} died in stage '{first.stage}' ({cause}):"
            f" {first.error or 'no error message'}"
        )
        remedy = "see that message; `dmesg` shows whether the kernel killed the process"
        return failure(detail, remedy, LaunchError.exit_code)
    return _hang(results, backend, without_peer_access)


def _hang(
    results: list[RankResult], backend: str, without_peer_access: list[RankResult] | None
) -> Finding:
    """Names the ranks that are in the earliest stage: the others wait for them."""
    code = HangError.exit_code
    present = {result.stage for result in results}
    stage = next(stage for stage in Stage if stage in present)
    behind = [result for result in results if result.stage == stage]
    seconds = min(result.seconds for result in behind)
    if len(behind) == len(results):
        names = "all ranks"
    else:
        names = " and ".join(result.name for result in behind)
    detail = f"no progress for {seconds:.0f} s in stage '{stage}': {names}"
    if stage in (Stage.IMPORT, Stage.RENDEZVOUS):
        return failure(detail, "check the load and the disk of that host", code)
    if without_peer_access and all(result.stage == Stage.DONE for result in without_peer_access):
        detail += "; it works with NCCL_P2P_DISABLE=1, so peer access between the GPUs is broken"
        remedy = (
            "switch off IOMMU and ACS for the GPUs (NCCL user guide, Troubleshooting); until then"
            " export "
        )
        return failure(detail, f"{remedy}NCCL_P2P_DISABLE=1", code)
    remedies = {
        "gloo": (
            "check the firewall between the hosts (all ports of net.ipv4.ip_local_port_range) and "
            "GLOO_SOCKET_IFNAME"
        ),
        "nccl": (
            "set NCCL_DEBUG=INFO to see which transport is used; try NCCL_P2P_DISABLE=1,"
            " NCCL_SHM_DISABLE=1, NCCL_IB_DISABLE=1 one by one, and name the network interface with"
            " NCCL_SOCKET_IFNAME"
        ),
    }
    return failure(detail, remedies[backend], code)


def hangs_in_nccl(results: list[RankResult], backend: str) -> bool:
    """Whether a second test without peer access between GPUs could show the cause."""
    hung = [result for result in results if result.code is None]
    return (
        backend == "nccl"
        and any(result.stage in (Stage.CONNECT, Stage.EXCHANGE) for result in hung)
        and not any(result.stopped or result.code for result in results)
    )


def bandwidth(results: list[RankResult], link: tuple[float, str]) -> Finding:
    """Bus bandwidth of an all-reduce: what each link of a ring would have to carry (nccl-tests,
    PERFORMANCE.md).

    link: of the slowest link between the ranks, bytes per second in one direction (0 if unknown)
    and its name.
    """
    size = len(results)
    if size == 1:
        return skipped("one process")
    if any("all_reduce" not in result.results for result in results):
        return skipped(TOO_EARLY)
    measured = [
        {**row, "bus_bytes_per_second": 2 * (size - 1) / size * row["bytes"] / row["seconds"]}
        for row in results[0].results["all_reduce"]
    ]
    best = max(row["bus_bytes_per_second"] for row in measured)
    detail = ", ".join(
        f"{row['bytes'] / 2**20:g} MiB {row['bus_bytes_per_second'] / 1e9:.3g} GB/s"
        for row in measured
    )
    capacity, name = link
    numbers = {"sizes": measured, "link_bytes_per_second": capacity}
    if not capacity:
        return ok(f"{detail}; bandwidth of {name} unknown" if name else detail, **numbers)
    detail += f"; {best / capacity:.0%} of {capacity / 1e9:.3g} GB/s ({name})"
    if best < LINK_SHARE * capacity:
        remedy = (
            "check with NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME for gloo, which interface is used,"
            " and whether GPUDirect is on"
        )
        return warning(f"{detail}, less than {LINK_SHARE:.0%}", remedy, **numbers)
    return ok(detail, **numbers)


def stragglers(results: list[RankResult]) -> Finding:
    """The same matrix product on all ranks at once: in training every step waits for the slowest
    rank."""
    computed = {
        result.name: result.results["compute"] for result in results if "compute" in result.results
    }
    if len(computed) < 2:
        return skipped("one process" if len(results) == 1 else TOO_EARLY)
    seconds = {name: result["seconds"] for name, result in computed.items()}
    fastest = min(seconds.values())
    limit = SLOWER[
        "cpu" if any(result["name"] == "cpu" for result in computed.values()) else "cuda"
    ]
    slow = [
        f"{name} takes {time / fastest:.2f} times as long as the fastest rank (limit {limit})"
        for name, time in seconds.items()
        if time > limit * fastest
    ]
    if slow:
        remedy = (
            "check clocks, temperature and other processes there; leave that GPU or host out until"
            " it is repaired"
        )
        return warning("; ".join(slow), remedy, seconds=seconds)
    ratio = max(seconds.values()) / fastest
    return ok(f"the slowest rank takes {ratio:.2f} times as long as the fastest", seconds=seconds)


def torch_installation(
    results: list[RankResult], config: Config, driver_cuda: tuple[int, int] | None
) -> Finding:
    """Whether torch on one host can be imported and use its GPUs.

    driver_cuda: the newest CUDA that the driver supports, None without a driver.
    """
    imported = [result for result in results if "versions" in result.results]
    if not imported:
        died = [result for result in results if result.code]
        if not died:
            return skipped(TOO_EARLY)
        detail = (
            f"{died[0].name} failed to import its modules: {died[0].error or 'no error message'}"
        )
        return failure(detail, "set up the environment again (make train)", LaunchError.exit_code)
    values = imported[0].results
    versions = values["versions"]
    detail = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "cuda", "nccl"))
    if config.device == "cpu" or values["cuda_available"]:
        return ok(detail, **versions)
    if values["torch_cuda"] is None:
        return failure(f"{detail}: this torch was built without CUDA", "install the build for CUDA")
    newest = ".".join(map(str, driver_cuda or ())) or "none"
    detail += f": torch finds no GPU that it can use; the driver supports CUDA up to {newest}"
    return failure(detail, "update the driver, or install a torch for an older CUDA")


def gpu_loads(results: list[RankResult]) -> dict[str, dict[str, Any]]:
    """What the driver reported of each GPU under load, by rank; {} for a rank without it."""
    return {
        result.name: result.results["compute"].get("load", {})
        for result in results
        if "compute" in result.results
    }
