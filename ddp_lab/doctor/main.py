"""`mode=doctor`: runs all checks in their order, on this host alone or on each of several hosts
under torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_lab.doctor import collective_checks, collective_runner, gpu_checks, host_checks
from ddp_lab.doctor.collective_runner import RankResult
from ddp_lab.doctor.findings import (
    REPORT_SECONDS,
    Finding,
    failed_check,
    isolated_finding,
    on_host,
    report,
    run_check,
    skipped,
)
from ddp_lab.doctor.isolated_check import IsolatedCheck, NoAnswerError
from ddp_train.distributed.environment import (
    host_number,
    hosts_started,
    visible_devices,
    write_reported,
)
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.options.schema import Config

if TYPE_CHECKING:  # both import torch, which is needed only if there are other hosts
    from ddp_lab.doctor.multihost_checks import Peers
    from ddp_train.distributed.process_group import Store

LOCAL_CHECKS_SECONDS = 30.0
"""Time limit for all checks of one host before it is under load; they run at the same time."""
VERSIONS_SECONDS = 15.0
"""Time limit for reading the versions of torch, CUDA, NCCL and this package's source."""
FACTS_SECONDS = 90.0
"""From the start until host 0 has the facts of all hosts."""
CLOCK_SECONDS = 10.0
"""Time limit for reading the clocks of all hosts, which are asked at once."""
SHARED_SECONDS = 15.0
"""Time limit for host 0 to write the file that the others must see, and to remove it; `seen_here`
waits for 10 s."""
MARGIN_SECONDS = 30.0
"""The others wait for host 0 this much longer than it may wait for them."""
TOKEN = "ddp_train doctor"
"""Content of the file that host 0 writes into run_dir."""
Facts = dict[str, Any]


def check_this_host(config: Config, import_path: Path | None) -> int:
    """Checks this host alone. Returns the exit code.

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
    findings.append(_torch_finding(results, config, gpus))
    findings += collective_findings(
        results, backend, slowest_link(config, gpus, None), without_peer_access
    )
    findings.append(skipped("other hosts", "one host"))
    return report(on_host(host, findings), [host], Path(str(config.run_dir)), began)


def check_all_hosts(
    store: Store, world: World, argv: list[str], config: Config, import_path: Path | None
) -> int:
    """Checks the hosts of a torchrun job. Called by all its processes: the first of each host
    checks that host, the others wait for the result.

    argv: the command line. Returns the exit code, the same on all processes.
    """
    from ddp_lab.doctor.multihost_checks import Peers
    from ddp_train.distributed.preflight import acknowledge

    peers = Peers(store, host_number(world), hosts_started(world), world.attempt)
    limit = longest_seconds(config, world) + MARGIN_SECONDS
    if not world.is_leader:
        _exit_after(limit)
    try:
        if not world.is_local_leader:
            code = peers.wait_for("verdict", limit)
        elif peers.is_leader:
            code = _check_as_leader(peers, world, argv, config, import_path)
            peers.publish("verdict", code)
        else:
            code = _check_as_follower(peers, world, argv, config, import_path, limit)
            print(
                f"doctor: {socket.gethostname()} is checked; host 0 prints the table (exit code"
                f" {code})"
            )
    except PeerError as error:
        print(
            f"FATAL {error.kind} (rank {world.rank}): {error}\n  remedy: {error.remedy}",
            file=sys.stderr,
        )
        code = error.exit_code
    if code:
        write_reported(code)
    acknowledge(store, world, wait=True)
    return code


def longest_seconds(config: Config, world: World) -> float:
    """Upper bound on the time until host 0 publishes the verdict, however many hosts are silent:
    the sum of all waits of host 0."""
    limits = collective_runner.silence_limits(config, world.size, several=world.hosts > 1)
    tests = collective_runner.longest_seconds(limits)
    shared_file = 3 * SHARED_SECONDS  # written, seen by the others, removed
    return (
        FACTS_SECONDS
        + CLOCK_SECONDS
        + tests
        + _reports_seconds(limits)
        + shared_file
        + REPORT_SECONDS
    )


def _reports_seconds(limits: dict[str, float]) -> float:
    """How much later than this host's own report that of another host may come: its collective test
    may end one silence limit later."""
    return max(limits.values()) + SHARED_SECONDS


def _exit_after(seconds: float) -> None:
    """Ends this process after a time limit, whatever the store does: a host that is cut off would
    wait for ever."""

    def leave() -> None:
        print(
            f"FATAL peer: no message from host 0 for {seconds:.0f} s", file=sys.stderr, flush=True
        )
        os._exit(PeerError.exit_code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _check_as_leader(
    peers: Peers, world: World, argv: list[str], config: Config, import_path: Path | None
) -> int:
    """Host 0: checks itself, collects the findings of the others, prints the report. Returns the
    exit code."""
    from ddp_lab.doctor import multihost_checks

    began = time.monotonic()
    run_dir = Path(str(config.run_dir))
    reports: dict[int, Facts] = {}
    with multihost_checks.listening() as endpoint:
        gpus, facts = _local_facts(endpoint, world, argv, config, peers.count > 1)
        facts_by_host = peers.gather("facts", facts, FACTS_SECONDS - (time.monotonic() - began))
        offsets = peers.clock_offsets([number for number in facts_by_host if number], CLOCK_SECONDS)
        if len(facts_by_host) < peers.count:
            peers.publish("all facts", None)
            answered = facts_by_host
        else:
            token = _within_limit(_write_token, run_dir) or ""
            peers.publish("all facts", {"hosts": facts_by_host, "token": token})
            own = _check_together(peers, facts_by_host, token, gpus, world, config, import_path)
            limits = collective_runner.silence_limits(config, world.size, several=peers.count > 1)
            reports = peers.gather("report", own, _reports_seconds(limits))
            answered = reports
            if token:
                _within_limit(Path(token).unlink)
    waited = time.monotonic() - began
    present = {number: facts_by_host[number] for number in answered}
    of_all = [run_check("hosts", multihost_checks.all_present, present, peers.count, waited)]
    if peers.count > 1:
        of_all += [
            run_check("clocks", multihost_checks.clocks, offsets, facts_by_host, peers.count),
            run_check("config", multihost_checks.same_overrides, facts_by_host, peers.count),
            run_check("versions", multihost_checks.same_versions, facts_by_host, peers.count),
            run_check(
                "same data",
                multihost_checks.same_data,
                facts_by_host,
                peers.count,
                config.data.name,
            ),
        ]
    parts = [*facts_by_host.values(), *reports.values()]
    of_hosts = [Finding(**values) for part in parts for values in part["findings"]]
    order = list(dict.fromkeys(finding.check for finding in of_hosts))
    of_hosts.sort(key=lambda finding: order.index(finding.check))
    if len(reports) == peers.count:
        results = [RankResult(**values) for part in reports.values() for values in part["results"]]
        results.sort(key=lambda result: result.rank)
        links = [
            (float(speed), str(name)) for speed, name in (part["link"] for part in reports.values())
        ]
        of_all += collective_findings(results, config.launch.backend, _slowest(links), None)
    else:
        of_all.append(skipped("exchange", "not all hosts answer"))
    names = [facts["host"] for facts in facts_by_host.values()]
    return report(of_hosts + of_all, names, run_dir, began)


def _check_as_follower(
    peers: Peers,
    world: World,
    argv: list[str],
    config: Config,
    import_path: Path | None,
    limit: float,
) -> int:
    """Every other host: checks itself, sends its findings to host 0. Returns the exit code from
    host 0.

    limit: seconds to wait for host 0.
    """
    from ddp_lab.doctor import multihost_checks

    with multihost_checks.listening() as endpoint:
        gpus, facts = _local_facts(endpoint, world, argv, config, several=True)
        peers.gather("facts", facts, 0)
        peers.answer_clock(limit)
        message = peers.wait_for("all facts", limit)
        if message:
            facts_by_host = {int(number): facts for number, facts in message["hosts"].items()}
            own = _check_together(
                peers, facts_by_host, message["token"], gpus, world, config, import_path
            )
            peers.gather("report", own, 0)
    return peers.wait_for("verdict", limit)


def _local_facts(
    endpoint: Facts, world: World, argv: list[str], config: Config, several: bool
) -> tuple[gpu_checks.Gpus | None, Facts]:
    """The GPUs of this host, and what it sends to host 0 before the hosts test anything
    together."""
    from ddp_train.distributed.preflight import versions_here

    began = time.monotonic()
    digest_check = IsolatedCheck(host_checks.data_digest, config)
    gpus, findings = check_at_rest(config, several, under_torchrun=True)
    versions_check = IsolatedCheck(
        versions_here
    )  # not earlier: it may start CUDA on GPUs that are checked at rest
    versions = {"processes": str(world.local_size), "driver": gpus.driver if gpus else "none"}
    try:
        versions |= versions_check.answer(time.monotonic() + VERSIONS_SECONDS)
    except (NoAnswerError, RuntimeError) as error:
        findings.append(failed_check("versions", error))
    digest = None
    with contextlib.suppress(NoAnswerError, RuntimeError):  # the check of the data set reports it
        digest = digest_check.answer(began + LOCAL_CHECKS_SECONDS)
    host = socket.gethostname()
    return gpus, {
        **endpoint,
        "host": host,
        "argv": argv,
        "versions": versions,
        "data": digest,
        "findings": [asdict(finding) for finding in on_host(host, findings)],
    }


def _check_together(
    peers: Peers,
    facts_by_host: dict[int, Facts],
    token: str,
    gpus: gpu_checks.Gpus | None,
    world: World,
    config: Config,
    import_path: Path | None,
) -> Facts:
    """This host's part of the checks that need all hosts: the report that it sends to host 0.

    token: path of the file that host 0 has written into run_dir.
    """
    from ddp_lab.doctor import multihost_checks

    running = {}
    if peers.count > 1:
        running["shared run_dir"] = IsolatedCheck(
            run_check, "shared run_dir", multihost_checks.shared_run_dir, token, TOKEN
        )
        running["connections"] = IsolatedCheck(
            run_check, "connections", multihost_checks.connections, facts_by_host, peers.number
        )
    results = collective_runner.run_with_other_hosts(config, world, import_path)
    deadline = time.monotonic() + SHARED_SECONDS
    findings = [
        run_check(name, isolated_finding, check, deadline) for name, check in running.items()
    ]
    findings.append(_torch_finding(results, config, gpus))
    interface = None
    if peers.count > 1:
        interface = multihost_checks.interface_to_peers(facts_by_host[peers.number]["address"])
    return {
        "findings": [asdict(finding) for finding in on_host(socket.gethostname(), findings)],
        "results": [asdict(result) for result in results],
        "link": slowest_link(config, gpus, interface),
    }


def _within_limit(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in another process; None if it fails or takes longer than
    SHARED_SECONDS."""
    with contextlib.suppress(NoAnswerError, RuntimeError):
        return IsolatedCheck(function, *arguments).answer(time.monotonic() + SHARED_SECONDS)
    return None


def _write_token(run_dir: Path) -> str:
    """Writes the file that the other hosts must see. Returns its path; empty if it cannot be
    written, which the check of run_dir reports."""
    path = run_dir.absolute() / f".doctor_{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(TOKEN)
    except OSError:
        return ""
    return str(path)


def check_at_rest(
    config: Config, several: bool, under_torchrun: bool
) -> tuple[gpu_checks.Gpus | None, list[Finding]]:
    """Checks this host before it is under load. Returns its GPUs, None without a driver, and the
    findings."""
    wanted = int(config.launch.nproc_per_node) if config.device == "cuda" else 0
    gpus_check = IsolatedCheck(_check_gpus, visible_devices(), wanted)
    running = [
        (name, IsolatedCheck(run_check, name, function, *arguments))
        for name, function, arguments in host_checks.all_checks(config, several, under_torchrun)
    ]
    deadline = time.monotonic() + LOCAL_CHECKS_SECONDS
    gpus = None
    try:
        values, found = gpus_check.answer(deadline)
        gpus = gpu_checks.from_values(values) if values else None
        findings = [Finding(**one) for one in found]
    except (NoAnswerError, RuntimeError) as error:
        findings = [failed_check("gpus", error)]
    return gpus, findings + [
        run_check(name, isolated_finding, check, deadline) for name, check in running
    ]


def _check_gpus(visible: str | None, wanted: int) -> tuple[gpu_checks.Gpus | None, list[Finding]]:
    try:
        gpus = gpu_checks.read_gpus(visible)
    except gpu_checks.NoDriverError as error:
        return None, [run_check("gpus", gpu_checks.no_driver, error)]
    checks = gpu_checks.all_checks(gpus, wanted)
    return gpus, [run_check(name, function, *arguments) for name, function, arguments in checks]


def _torch_finding(
    results: list[RankResult], config: Config, gpus: gpu_checks.Gpus | None
) -> Finding:
    driver_cuda = gpus.cuda if gpus else None
    return run_check("torch", collective_checks.torch_installation, results, config, driver_cuda)


def collective_findings(
    results: list[RankResult],
    backend: str,
    link: tuple[float, str],
    without_peer_access: list[RankResult] | None,
) -> list[Finding]:
    """The findings from the collective test of all ranks. without_peer_access: results of a second
    test."""
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
    config: Config, gpus: gpu_checks.Gpus | None, interface: str | None
) -> tuple[float, str]:
    """The slowest link that gradients take from this host: bytes per second, 0 if unknown, and its
    name.

    interface: the one that leads to other hosts; None if there are none.
    """
    links = []
    if config.launch.backend == "nccl" and gpus:
        links += [gpu.link for gpu in gpus.gpus if not gpu.error]
    if interface:
        links.append(host_checks.link_bytes_per_second(interface))
    return _slowest(links)


def _slowest(links: list[tuple[float, str]]) -> tuple[float, str]:
    """A link of unknown bandwidth (0) counts as the slowest, so that no bandwidth is judged by
    another link."""
    return min(links, default=(0.0, ""))
