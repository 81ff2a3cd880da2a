"""`mode=doctor` under torchrun: each host checks itself, and all are compared with each other."""

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
from typing import Any

from ddp_lab.doctor import collective_runner, host_checks, multihost_checks
from ddp_lab.doctor.collective_runner import RankResult
from ddp_lab.doctor.findings import (
    REPORT_SECONDS,
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
from ddp_lab.doctor.main import (
    LOCAL_CHECKS_SECONDS,
    check_at_rest,
    collective_findings,
    slowest_link,
    torch_finding,
)
from ddp_lab.doctor.multihost_checks import Facts, HostComparison
from ddp_lab.doctor.nvml import Gpus
from ddp_lab.doctor.peers import Peers
from ddp_train.distributed.agent import host_number, hosts_started, write_reported
from ddp_train.distributed.preflight import acknowledge, versions_here
from ddp_train.distributed.process_group import Store
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.options.schema import Config

VERSIONS_SECONDS = 15.0
"""Time limit for reading the versions of torch, CUDA, NCCL and this package's source."""
FACTS_SECONDS = 90.0
"""Time limit for host 0 to have the facts of all hosts, from the start."""
CLOCK_SECONDS = 10.0
"""Time limit for reading the clocks of all hosts, which are asked at once."""
SHARED_SECONDS = 15.0
"""Time limit for host 0 to write the file that the others must see, and to remove it; `seen_here`
waits for 10 s."""
MARGIN_SECONDS = 30.0
"""The others wait for host 0 this much longer than it may wait for them."""
TOKEN = "ddp_train doctor"
"""Content of the file that host 0 writes into run_dir."""


def check_all_hosts(
    store: Store, world: World, argv: list[str], config: Config, import_path: Path | None
) -> int:
    """Check the hosts of a torchrun job. Called by all its processes: the first of each host checks
    that host, the others wait for the result.

    argv: the command line.

    Returns the exit code, the same on all processes.
    """
    peers = Peers(store, host_number(world), hosts_started(world), world.attempt)
    doctor = HostDoctor(peers, world, argv, config, import_path)
    limit = doctor.longest_seconds() + MARGIN_SECONDS
    if not world.is_leader:
        _exit_after(limit)
    try:
        if not world.is_local_leader:
            code = peers.wait_for("verdict", limit)
        elif peers.is_leader:
            code = doctor.lead()
            peers.publish("verdict", code)
        else:
            code = doctor.follow(limit)
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


def _exit_after(seconds: float) -> None:
    """End this process after a time limit, whatever the store does: a host that is cut off would
    wait for ever."""

    def leave() -> None:
        print(
            f"FATAL peer: no message from host 0 for {seconds:.0f} s", file=sys.stderr, flush=True
        )
        os._exit(PeerError.exit_code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


class HostDoctor:
    """The checks of one of several hosts."""

    def __init__(
        self, peers: Peers, world: World, argv: list[str], config: Config, import_path: Path | None
    ) -> None:
        self.peers = peers
        self.world = world
        self.argv = argv
        self.config = config
        self.import_path = import_path
        self.host = socket.gethostname()
        self.run_dir = Path(str(config.run_dir))
        self.gpus: Gpus | None = None
        self.limits = collective_runner.silence_limits(config, world.size, peers.count > 1)

    def longest_seconds(self) -> float:
        """Upper bound on the time until host 0 publishes the verdict, however many hosts are
        silent: the sum of all waits of host 0."""
        shared_file = 3 * SHARED_SECONDS  # written, seen by the others, removed
        tests = collective_runner.longest_seconds(self.limits)
        before = FACTS_SECONDS + CLOCK_SECONDS
        return before + tests + self._reports_seconds() + shared_file + REPORT_SECONDS

    def _reports_seconds(self) -> float:
        """Seconds by which the report of another host may come later than this host's own.

        Its collective test may end one silence limit later.
        """
        return max(self.limits.values()) + SHARED_SECONDS

    def lead(self) -> int:
        """Check host 0, which this is, collect the findings of the others, and print the report.

        Returns the exit code.
        """
        peers = self.peers
        began = time.monotonic()
        reports: dict[int, Facts] = {}
        with multihost_checks.listening() as endpoint:
            facts = self._facts(endpoint)
            seconds_left = FACTS_SECONDS - (time.monotonic() - began)
            facts_by_host = peers.gather("facts", facts, seconds_left)
            others = [number for number in facts_by_host if number]
            offsets = peers.clock_offsets(others, CLOCK_SECONDS)
            if len(facts_by_host) < peers.count:
                peers.publish("all facts", None)
            else:
                token = _within_limit(_write_token, self.run_dir) or ""
                peers.publish("all facts", {"hosts": facts_by_host, "token": token})
                own_report = self._check_together(facts_by_host, token)
                reports = peers.gather("report", own_report, self._reports_seconds())
                if token:
                    _within_limit(Path(token).unlink)
        waited = time.monotonic() - began
        answered = {number: facts_by_host[number] for number in reports or facts_by_host}
        present = multihost_checks.all_present
        findings = _sorted_findings([*facts_by_host.values(), *reports.values()])
        findings.append(run_check("hosts", present, answered, peers.count, waited))
        if peers.count > 1:
            comparison = HostComparison(facts_by_host, peers.count)
            findings += comparison.findings(offsets, self.config.data.name)
        findings += self._exchange_findings(reports)
        names = [facts["host"] for facts in facts_by_host.values()]
        return report(findings, names, self.run_dir, began)

    def follow(self, limit: float) -> int:
        """Check this host, which is not host 0, and send the findings there.

        Returns the exit code that host 0 has found.

        limit: seconds to wait for host 0.
        """
        with multihost_checks.listening() as endpoint:
            self.peers.gather("facts", self._facts(endpoint), 0)
            self.peers.answer_clock(limit)
            message = self.peers.wait_for("all facts", limit)
            if message:
                facts_by_host = {int(number): facts for number, facts in message["hosts"].items()}
                own_report = self._check_together(facts_by_host, message["token"])
                self.peers.gather("report", own_report, 0)
        return self.peers.wait_for("verdict", limit)

    def _facts(self, endpoint: Facts) -> Facts:
        """The facts that this host sends to host 0 before the hosts test anything together."""
        began = time.monotonic()
        digest_check = IsolatedCheck(host_checks.data_digest, self.config)
        self.gpus, findings = check_at_rest(self.config, self.peers.count > 1, under_torchrun=True)
        # not earlier: it may start CUDA on GPUs that are checked at rest
        versions_check = IsolatedCheck(versions_here)
        driver = self.gpus.driver if self.gpus else "none"
        versions = {"processes": str(self.world.local_size), "driver": driver}
        try:
            versions |= versions_check.answer(time.monotonic() + VERSIONS_SECONDS)
        except (NoAnswerError, RuntimeError) as error:
            findings.append(failed_check("versions", error))
        digest = None
        # the check of the data set reports an error
        with contextlib.suppress(NoAnswerError, RuntimeError):
            digest = digest_check.answer(began + LOCAL_CHECKS_SECONDS)
        return {
            **endpoint,
            "host": self.host,
            "argv": self.argv,
            "versions": versions,
            "data": digest,
            "findings": self._plain(findings),
        }

    def _check_together(self, facts_by_host: dict[int, Facts], token: str) -> Facts:
        """This host's part of the checks that need all hosts: the report that it sends to host 0.

        token: path of the file that host 0 has written into run_dir.
        """
        running = {}
        interface = None
        number = self.peers.number
        if self.peers.count > 1:
            checks: dict[str, Callable[[], Finding]] = {
                "shared run_dir": lambda: multihost_checks.shared_run_dir(token, TOKEN),
                "connections": lambda: multihost_checks.connections(facts_by_host, number),
            }
            running = start_checks(checks)
            interface = multihost_checks.interface_to_peers(facts_by_host[number]["address"])
        results = collective_runner.run_with_other_hosts(self.config, self.world, self.import_path)
        deadline = time.monotonic() + SHARED_SECONDS
        findings = isolated_findings(running, deadline)
        findings.append(torch_finding(results, self.config, self.gpus))
        return {
            "findings": self._plain(findings),
            "results": [asdict(result) for result in results],
            "link": slowest_link(self.config, self.gpus, interface),
        }

    def _plain(self, findings: list[Finding]) -> list[dict[str, Any]]:
        """The findings of this host for JSON."""
        return [asdict(finding) for finding in on_host(self.host, findings)]

    def _exchange_findings(self, reports: dict[int, Facts]) -> list[Finding]:
        """The findings of the collective test of all hosts."""
        if len(reports) < self.peers.count:
            return [skipped("not all hosts answer").named("exchange")]
        results = []
        links = []
        for host_report in reports.values():
            results += [RankResult(**result) for result in host_report["results"]]
            speed, name = host_report["link"]
            links.append((float(speed), str(name)))
        results.sort(key=lambda result: result.rank)
        return collective_findings(results, self.config.launch.backend, min(links), None)


def _sorted_findings(parts: list[Facts]) -> list[Finding]:
    """The findings of all hosts, those of one check together."""
    findings = [Finding(**finding) for part in parts for finding in part["findings"]]
    order = list(dict.fromkeys(finding.check for finding in findings))
    return sorted(findings, key=lambda finding: order.index(finding.check))


def _within_limit(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in another process; None if it fails or takes longer than
    SHARED_SECONDS."""
    with contextlib.suppress(NoAnswerError, RuntimeError):
        return IsolatedCheck(function, *arguments).answer(time.monotonic() + SHARED_SECONDS)
    return None


def _write_token(run_dir: Path) -> str:
    """Write the file that the other hosts must see. Returns its path; empty if it cannot be
    written, which the check of run_dir reports."""
    path = run_dir.absolute() / f".doctor_{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(TOKEN)
    except OSError:
        return ""
    return str(path)
