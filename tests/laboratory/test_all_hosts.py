"""The doctor of several hosts: who waits for whom, and three hosts in network namespaces."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ddp_lab.doctor import (
    all_hosts,
    collective_runner,
    host_checks,
    multihost_checks,
)
from ddp_lab.doctor.all_hosts import HostDoctor
from ddp_lab.doctor.findings import OK, SKIPPED, WARNING, Finding
from ddp_lab.doctor.peers import Peers
from ddp_train.distributed.agent import EXIT_CODE_FILE
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.linux import state_of
from tests.support.commands import (
    LAUNCH,
    ROOT,
    environment,
    read,
    wait_until,
)
from tests.support.doctor import (
    DOCTOR,
    config,
    is_failure,
    is_warning,
    on_linux_as_root,
)
from tests.support.netlab import NetLab

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


def test_all_clocks_are_asked_at_the_same_time() -> None:
    """Four hosts say nothing, one is there."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = Peers(dist.TCPStore("127.0.0.1", store.port, is_master=False), 5, 6, 0)
    answering = threading.Thread(target=there.answer_clock, args=(30.0,))
    answering.start()
    began = time.monotonic()
    offsets = Peers(store, 0, 6, 0).clock_offsets([1, 2, 3, 4, 5], 1.0)
    assert 1.0 <= time.monotonic() - began < 3.0
    assert list(offsets) == [5] and abs(offsets[5]) < 0.5
    answering.join()


@pytest.mark.parametrize("size", [3, 512])
def test_other_hosts_wait_longer_than_host_0(size: int) -> None:
    store = dist.HashStore()
    doctor = HostDoctor(Peers(store, 0, size, 0), World(0, size, 0, 1), [], config(), ROOT)
    limits = collective_runner.silence_limits(config(), size, several=True)
    waits = (
        all_hosts.FACTS_SECONDS
        + all_hosts.CLOCK_SECONDS
        + collective_runner.longest_seconds(limits)
        + max(limits.values())
    )
    assert doctor.longest_seconds() > waits


def test_host_0_reports_without_the_silent_host(tmp_path: Path) -> None:
    """It says nothing of what it could not compare."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leader = Peers(store, 0, 2, 0)
    run_dir = tmp_path / "run"
    alone = dataclasses.replace(config(), run_dir=str(run_dir))
    doctor = HostDoctor(leader, World(0, 2, 0, 1), [], alone, ROOT)
    with mock.patch.object(all_hosts, "FACTS_SECONDS", 0.5):
        assert doctor.lead() == 69
    found = {
        finding["check"]: Finding(**finding) for finding in read(run_dir, "doctor.json")["findings"]
    }
    is_failure(found["hosts"], 69, "host 1 of 2 did not answer")
    for check in ("clocks", "config", "versions", "same data", "exchange"):
        assert found[check].status == SKIPPED, found[check]


def stopped_peer(port: int) -> None:
    """Host 1 of 2: it says where it is, and is stopped before it can be asked for the time."""
    peer = Peers(dist.TCPStore("127.0.0.1", port, is_master=False), 1, 2, 0)
    peer.gather("facts", {"host": "node1", "pid": os.getpid()}, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_doctor_that_is_stopped_is_not_waited_for() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leader = Peers(store, 0, 2, 0)
    # Forked: the tests' fork server would import torch for this one process alone.
    other = multiprocessing.get_context("fork").Process(target=stopped_peer, args=(store.port,))
    other.start()
    try:
        assert set(leader.gather("facts", {"host": "node0"}, 30.0)) == {0, 1}
        wait_until(lambda: state_of(other.pid or 0) == "T", "stopped peer")
        began = time.monotonic()
        assert leader.clock_offsets([1], 0.3) == {}
        reports = leader.gather("report", {"host": "node0"}, 0.3)
        assert time.monotonic() - began < 5
        is_failure(
            multihost_checks.all_present(reports, 2, 0.3),
            69,
            "host 1 of 2 did not answer",
            "present: node0",
        )
        peer = Peers(store, 1, 2, 0)
        with pytest.raises(PeerError, match="no message from host 0"):
            peer.wait_for("verdict", 0.2)
    finally:
        other.kill()
        other.join()


@dataclasses.dataclass
class Examined:
    """What the doctors of node0, node1 and node2 said: their output, and host 0's report."""

    said: list[str]
    codes: list[int]
    exit_code_file: str
    run_dir: Path
    found: list[Finding]

    def of(self, host: str) -> dict[str, Finding]:
        """By their checks: what one host found, and all of them together."""
        return {finding.check: finding for finding in self.found if finding.host in ("", host)}


@pytest.fixture(scope="module")
def three_hosts(shim: str, tmp_path_factory: pytest.TempPathFactory) -> Examined:
    """node0 and node1 are well. node2 has a disk of its own, a thin cable, a clock that is wrong,
    other words.

    Without torchrun's agents, which would leave that host out: in the environment that they give
    their workers.
    """
    folder = tmp_path_factory.mktemp("hosts")
    run_dir = folder / "run"
    exit_code_file = folder / "exit_code_file"
    with NetLab(3) as lab:
        for one in lab.hosts:  # this lab has the /sys of the machine it runs on
            assert one.popen(["mount", "-t", "sysfs", "sysfs", "/sys"], ROOT).wait() == 0
        run_dir.mkdir()
        own_disk = ["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(run_dir)]
        thin = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "400mbit",
            "burst",
            "64k",
            "latency",
            "1s",
        ]
        for command in (own_disk, thin):
            assert lab.hosts[2].popen(command, ROOT).wait() == 0
        started = []
        for number, one in enumerate(lab.hosts):
            env = environment(
                {
                    "RANK": str(number),
                    "WORLD_SIZE": "3",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(number),
                    "GROUP_WORLD_SIZE": "3",
                    "TORCHELASTIC_RUN_ID": "one",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "MASTER_ADDR": "node0",
                    "MASTER_PORT": "29400",
                }
                | ({EXIT_CODE_FILE: str(exit_code_file)} if number == 1 else {})
            )
            odd = ["env", f"LD_PRELOAD={shim}", "CLOCK_OFFSET=40"] if number == 2 else []
            words = [
                *odd,
                *LAUNCH,
                *DOCTOR,
                f"run_dir={run_dir}",
                f"seed={7 if number == 2 else 0}",
            ]
            started.append(
                one.popen(words, ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        said = [process.communicate(timeout=120)[0].decode() for process in started]
    report = read(run_dir, "doctor.json")
    found = [Finding(**finding) for finding in report["findings"]]
    return Examined(
        said,
        [process.returncode for process in started],
        exit_code_file.read_text(),
        run_dir,
        found,
    )


@on_linux_as_root
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")
def test_problems_between_three_hosts_are_found_at_once(three_hosts: Examined) -> None:
    found = three_hosts.of("node2")
    is_failure(found["shared run_dir"], 69, "written by host 0, is not visible here")
    is_failure(found["clocks"], 69, "node2 +40.0 s")
    is_failure(found["config"], 2, "seed=0 on rank 0 (node0), seed=7 on rank 2 (node2)")
    is_warning(found["all-reduce"], "of 1.25 GB/s (eth0, 10 Gbit/s)")


@on_linux_as_root
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")
def test_healthy_hosts_have_no_findings(three_hosts: Examined) -> None:
    for name in ("node0", "node1"):
        found = three_hosts.of(name)
        assert found["same data"].status == SKIPPED, "made in memory"
        for check in ("hosts", "versions", "exchange", "connections", "shared run_dir", "torch"):
            assert found[check].status == OK, found[check]
        disk = found["run_dir"]  # this machine's, which other tests keep busy
        is_slow = (
            disk.numbers["bytes_per_second"] < host_checks.SLOW_BYTES_PER_SECOND
            or disk.numbers["fsync_seconds"] > host_checks.SLOW_FSYNC_SECONDS
        )
        assert disk.status == (WARNING if is_slow else OK), disk


@on_linux_as_root
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")
def test_host_0_speaks_for_three_hosts(three_hosts: Examined) -> None:
    """One table, and the same exit code on all; the launcher outside of torchrun hears that it was
    told."""
    said = three_hosts.said
    assert three_hosts.codes == [69, 69, 69], "\n".join(said)
    assert "on node2; similar on the others" not in said[0] and "node0, node1, node2" in said[0]
    shown = [f"report {three_hosts.run_dir}/doctor.json" in text.replace("\n", "") for text in said]
    assert shown == [True, False, False]
    assert [path.name for path in three_hosts.run_dir.iterdir()] == ["doctor.json"], (
        "what it wrote to try is gone"
    )
    assert three_hosts.exit_code_file.splitlines() == [
        "0 0 begun",
        "0 0 reported",
        "0 0 69",
        "0 0 69",
    ]
