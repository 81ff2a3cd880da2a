"""`mode=doctor` on this host: its checks in their order. Torch-free."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from ddp_lab.doctor import collective_checks, collective_runner, gpu_checks, host_checks, nvml
from ddp_lab.doctor.collective_runner import RankResult
from ddp_lab.doctor.findings import (
    Finding,
    failed_check,
    isolated_findings,
    on_host,
    report,
    run_check,
    skipped,
    start_checks,
)
from ddp_lab.doctor.isolated_check import IsolatedCheck, NoAnswerError
from ddp_train.distributed.environment import visible_devices
from ddp_train.options.schema import Config

LOCAL_CHECKS_SECONDS = 30.0
"""Time limit for all checks of one host before it is under load; they run at the same time."""


def check_this_host(config: Config, import_path: Path | None) -> int:
    """Check this host alone. Returns the exit code.

    import_path: the folder from which the test processes import this package.
    """
    began = time.monotonic()
    host = socket.gethostname()
    backend = config.launch.backend
    gpus, findings = check_at_rest(config, several=False, under_torchrun=False)
    results = collective_runner.run_on_this_host(config, import_path)
    without_peer_access = None
    if collective_checks.hangs_in_nccl(results, backend):
        variables = {"NCCL_P2P_DISABLE": "1"}
        without_peer_access = collective_runner.run_on_this_host(config, import_path, variables)
    link = slowest_link(config, gpus, None)
    findings.append(torch_finding(results, config, gpus))
    findings += collective_findings(results, backend, link, without_peer_access)
    findings.append(skipped("one host").named("other hosts"))
    return report(on_host(host, findings), [host], Path(str(config.run_dir)), began)


def check_at_rest(
    config: Config, several: bool, under_torchrun: bool
) -> tuple[nvml.Gpus | None, list[Finding]]:
    """Check this host before it is under load.

    Returns its GPUs, None without a driver, and the findings.
    """
    ranks_on_gpus = int(config.launch.nproc_per_node) if config.device == "cuda" else 0
    gpus_check = IsolatedCheck(_check_gpus, visible_devices(), ranks_on_gpus)
    running = start_checks(host_checks.all_checks(config, several, under_torchrun))
    deadline = time.monotonic() + LOCAL_CHECKS_SECONDS
    gpus = None
    try:
        values, gpu_findings = gpus_check.answer(deadline)
        gpus = nvml.from_values(values) if values else None
        findings = [Finding(**finding) for finding in gpu_findings]
    except (NoAnswerError, RuntimeError) as error:
        findings = [failed_check("gpus", error)]
    return gpus, findings + isolated_findings(running, deadline)


def _check_gpus(visible: str | None, wanted: int) -> tuple[nvml.Gpus | None, list[Finding]]:
    try:
        gpus = nvml.read_gpus(visible)
    except nvml.NoDriverError as error:
        return None, [run_check("gpus", gpu_checks.no_driver, error)]
    return gpus, gpu_checks.check_gpus(gpus, wanted)


def torch_finding(results: list[RankResult], config: Config, gpus: nvml.Gpus | None) -> Finding:
    """The finding about the installation of torch on this host."""
    driver_cuda = gpus.cuda if gpus else None
    return run_check("torch", collective_checks.torch_installation, results, config, driver_cuda)


def collective_findings(
    results: list[RankResult],
    backend: str,
    link: tuple[float, str],
    without_peer_access: list[RankResult] | None,
) -> list[Finding]:
    """The findings from the collective test of all ranks.

    link: see `slowest_link`.
    without_peer_access: results of a second test, if there was one.
    """
    findings = [
        run_check("exchange", collective_checks.exchange, results, backend, without_peer_access),
        run_check("all-reduce", collective_checks.bandwidth, results, link),
        run_check("stragglers", collective_checks.stragglers, results),
    ]
    loads = collective_checks.gpu_loads(results)
    if any(loads.values()):
        findings.append(run_check("gpu clocks", gpu_checks.clocks, loads))
    return findings


def slowest_link(
    config: Config, gpus: nvml.Gpus | None, interface: str | None
) -> tuple[float, str]:
    """The slowest link that gradients take from this host: bytes per second, 0 if unknown, and its
    name. A link of unknown bandwidth counts as the slowest, so that none is judged by another.

    interface: the one that leads to other hosts; None if there are none.
    """
    links = []
    if config.launch.backend == "nccl" and gpus:
        links += [gpu.link for gpu in gpus.alive]
    if interface:
        links.append(host_checks.link_bytes_per_second(interface))
    return min(links, default=(0.0, ""))
