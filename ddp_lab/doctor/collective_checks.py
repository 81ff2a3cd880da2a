"""Findings from the results of all ranks' test processes: exchange, bandwidth, stragglers, torch.
Torch-free."""

from __future__ import annotations

from typing import Any

from ddp_lab.doctor.collective_runner import RankResult
from ddp_lab.doctor.collective_stages import NEIGHBOURS, Stage
from ddp_lab.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.errors import HangError
from ddp_train.options.schema import Config
from ddp_train.resilience.failure import is_peer_error
from ddp_train.text import counted

SLOWER = {"cpu": 2.0, "cuda": 1.15}
"""A rank is a straggler if it takes this many times as long as the fastest. Cores are shared with
other work, GPUs should not be."""
LINK_SHARE = 0.5
"""Least share of the link's bandwidth. NCCL reached 70 to 90 % of NVLink with 256 MiB on H200s."""
TOO_EARLY = "the test processes failed earlier: see the row exchange"


def exchange(
    results: list[RankResult], backend: str, without_peer_access: list[RankResult] | None = None
) -> Finding:
    """Check that every rank could send to the others, in time and with correct data.

    without_peer_access: results of a second test with NCCL_P2P_DISABLE=1, if there was one.
    """
    if any(result.stage != Stage.DONE or result.code != 0 for result in results):
        return _failed_exchange(results, backend, without_peer_access)
    if len(results) == 1:
        return skipped("one process")
    wrong = []
    sums_are_right = True
    unreachable = []
    for result in results:
        received = result.results["exchange"]
        wrong += received["wrong"]
        sums_are_right &= received["summed"]
        for other in result.results["compute"].get("no_peer_access", []):
            unreachable.append(f"rank {result.rank} to GPU {other}")
    if wrong or not sums_are_right:
        pairs = ", ".join(f"rank {sender} to rank {receiver}" for sender, receiver in wrong)
        remedy = (
            "repeat the check with NCCL_P2P_DISABLE=1. If the data are right then, switch off"
            " IOMMU and ACS for the GPUs (NCCL user guide, Troubleshooting). If not, test memory"
            " and cables"
        )
        return failure(f"received data is corrupt: {pairs or 'all-reduce'}", remedy, wrong=wrong)
    if backend == "nccl" and unreachable:
        detail = f"no peer access: {', '.join(unreachable)}; NCCL goes through host memory"
        remedy = "`nvidia-smi topo -p2p r` shows why; consumer GPUs have no peer access"
        return warning(detail, remedy)
    processes = counted(len(results), "process")
    return ok(f"{processes} over {backend}, up to {NEIGHBOURS} neighbours each")


def _failed_exchange(
    results: list[RankResult], backend: str, without_peer_access: list[RankResult] | None
) -> Finding:
    """The finding that names the cause: in this order a process that survives SIGKILL, is stopped,
    died, or is furthest behind."""
    unkillable = [
        f"{result.where} survives SIGKILL (state {result.unkillable_state})"
        for result in results
        if result.unkillable_state
    ]
    if unkillable:
        stacks = " ".join(
            f"/proc/{result.pid}/stack" for result in results if result.unkillable_state
        )
        remedy = (
            f"the process waits in the kernel; as root, `cat {stacks}` and `dmesg` show for what."
            " If it is the GPU's driver, reboot the host"
        )
        return failure(" and ".join(unkillable), remedy, HangError.exit_code)
    stopped = [f"{result.where} is stopped" for result in results if result.stopped]
    if stopped:
        remedy = (
            "find out what stopped the process by SIGSTOP: a debugger, a batch system or a"
            " frozen container"
        )
        return failure(" and ".join(stopped), remedy, HangError.exit_code)
    died = [result for result in results if result.code]
    if died:
        # an error of a peer is an echo of another rank's
        died.sort(key=lambda result: is_peer_error(RuntimeError(result.error)))
        first = died[0]
        code = first.code or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = first.error or "no error message"
        detail = f"{first.name} died in stage '{first.stage}' ({cause}): {error}"
        remedy = "follow that message; `dmesg` shows whether the kernel killed the process"
        return failure(detail, remedy)
    return _hang(results, backend, without_peer_access)


def _hang(
    results: list[RankResult], backend: str, without_peer_access: list[RankResult] | None
) -> Finding:
    """The finding that names the ranks in the earliest stage: the others wait for them."""
    code = HangError.exit_code
    present = {result.stage for result in results}
    stage = next(stage for stage in Stage if stage in present)
    behind = [result for result in results if result.stage == stage]
    seconds = min(result.seconds for result in behind)
    names = "all ranks"
    if len(behind) < len(results):
        names = " and ".join(result.name for result in behind)
    detail = f"no progress for {seconds:.0f} s in stage '{stage}': {names}"
    if stage in (Stage.IMPORT, Stage.RENDEZVOUS):
        return failure(detail, "check the load and the disk of that host", code)
    if without_peer_access and all(result.stage == Stage.DONE for result in without_peer_access):
        detail += "; it works with NCCL_P2P_DISABLE=1, so peer access between the GPUs is broken"
        remedy = (
            "switch off IOMMU and ACS for the GPUs (NCCL user guide, Troubleshooting); until then"
            " export NCCL_P2P_DISABLE=1"
        )
    elif backend == "gloo":
        remedy = (
            "check the firewall between the hosts (all ports of net.ipv4.ip_local_port_range) and "
            "GLOO_SOCKET_IFNAME"
        )
    else:
        remedy = (
            "set NCCL_DEBUG=INFO to see which transport is used; try NCCL_P2P_DISABLE=1,"
            " NCCL_SHM_DISABLE=1, NCCL_IB_DISABLE=1 one by one, and name the network interface with"
            " NCCL_SOCKET_IFNAME"
        )
    return failure(detail, remedy, code)


def hangs_in_nccl(results: list[RankResult], backend: str) -> bool:
    """Tell whether a second test without peer access between GPUs could show the cause."""
    hung = [result for result in results if result.code is None]
    return (
        backend == "nccl"
        and any(result.stage in (Stage.CONNECT, Stage.EXCHANGE) for result in hung)
        and not any(result.stopped or result.code for result in results)
    )


def bandwidth(results: list[RankResult], link: tuple[float, str]) -> Finding:
    """Judge the bus bandwidth of an all-reduce: what each link of a ring would have to carry
    (nccl-tests, PERFORMANCE.md).

    link: slowest link between the ranks, bytes per second in one direction (0 if unknown) and its
        name.
    """
    size = len(results)
    if size == 1:
        return skipped("one process")
    if any("all_reduce" not in result.results for result in results):
        return skipped(TOO_EARLY)
    measured = []
    shown = []
    for row in results[0].results["all_reduce"]:
        speed = 2 * (size - 1) / size * row["bytes"] / row["seconds"]
        measured.append({**row, "bus_bytes_per_second": speed})
        shown.append(f"{row['bytes'] / 2**20:g} MiB {speed / 1e9:.3g} GB/s")
    best = max(row["bus_bytes_per_second"] for row in measured)
    detail = ", ".join(shown)
    capacity, name = link
    numbers = {"sizes": measured, "link_bytes_per_second": capacity}
    if not capacity:
        if name:
            detail += f"; bandwidth of {name} unknown"
        return ok(detail, **numbers)
    detail += f"; {best / capacity:.0%} of {capacity / 1e9:.3g} GB/s ({name})"
    if best < LINK_SHARE * capacity:
        remedy = (
            "set NCCL_DEBUG=INFO to see which network interface is used, and whether GPUDirect"
            " is on; for gloo choose the interface by GLOO_SOCKET_IFNAME"
        )
        return warning(f"{detail}, less than {LINK_SHARE:.0%}", remedy, **numbers)
    return ok(detail, **numbers)


def stragglers(results: list[RankResult]) -> Finding:
    """Compare the times of the same matrix product on all ranks at once: in training every step
    waits for the slowest rank."""
    computed = {
        result.name: result.results["compute"] for result in results if "compute" in result.results
    }
    if len(computed) < 2:
        return skipped("one process" if len(results) == 1 else TOO_EARLY)
    seconds = {name: product["seconds"] for name, product in computed.items()}
    fastest = min(seconds.values())
    on_cpu = any(product["name"] == "cpu" for product in computed.values())
    limit = SLOWER["cpu" if on_cpu else "cuda"]
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
    detail = f"the slowest rank takes {ratio:.2f} times as long as the fastest"
    return ok(detail, seconds=seconds)


def torch_installation(
    results: list[RankResult], config: Config, driver_cuda: tuple[int, int] | None
) -> Finding:
    """Check that torch on one host can be imported and use its GPUs.

    driver_cuda: the newest CUDA that the driver supports, None without a driver.
    """
    imported = [result for result in results if "versions" in result.results]
    if not imported:
        died = [result for result in results if result.code]
        if not died:
            return skipped(TOO_EARLY)
        error = died[0].error or "no error message"
        detail = f"{died[0].name} failed to import its modules: {error}"
        return failure(detail, "set up the environment again (make train)")
    values = imported[0].results
    versions = values["versions"]
    detail = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "cuda", "nccl"))
    if config.device == "cpu" or values["cuda_available"]:
        return ok(detail, **versions)
    if values["torch_cuda"] is None:
        detail += ": this torch was built without CUDA"
        return failure(detail, "install the build for CUDA")
    newest = ".".join(map(str, driver_cuda or ())) or "none"
    detail += f": torch finds no GPU that it can use; the driver supports CUDA up to {newest}"
    return failure(detail, "update the driver, or install a torch for an older CUDA")


def gpu_loads(results: list[RankResult]) -> dict[str, dict[str, Any]]:
    """The driver's report on each GPU under load, by rank; {} for a rank without one."""
    return {
        result.name: result.results["compute"].get("load", {})
        for result in results
        if "compute" in result.results
    }
