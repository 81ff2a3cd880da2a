"""Several hosts, and several runs that want the same place. Hosts are network namespaces: see
tests/support/netlab.py."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load

from ddp_train.launcher.multihost import present_hosts, registered
from ddp_train.resilience import run_lock
from tests.launcher.test_local import SLOW_END
from tests.support.commands import (
    ENDLESS,
    LAUNCH,
    LIMIT_SECONDS,
    ONE,
    ROOT,
    SMALL,
    checkpoints,
    environment,
    fatal_lines,
    read,
    run,
    wait_until,
    weights,
)
from tests.support.netlab import Host, NetLab, why_not

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


# --- several hosts --------------------------------------------------------------------------------

on_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())
ENDPOINT = "launch.rdzv_endpoint=node0:29400"


class Cluster:
    """The same command on each host of a lab, one process each, in one run directory."""

    def __init__(self, lab: NetLab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.run_dir = folder / "run"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env: dict[str, str] = {}

    def start(self, host: Host, *words: str) -> None:
        words = ("launch.nproc_per_node=1", f"run_dir={self.run_dir}", *words)
        with (self.folder / host.name).open("w") as output:
            self.processes[host.name] = host.popen(
                [*LAUNCH, *words],
                ROOT,
                env=environment(self.env),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start_all(self, *words: str) -> None:
        for host in self.lab.hosts:
            self.start(host, f"launch.nnodes={len(self.lab.hosts)}", ENDPOINT, *words)

    def wait_for_step(self) -> None:
        def begun() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, self.said(name)
            return (self.run_dir / "metrics.jsonl").exists()

        wait_until(begun, "first step")

    def end(self, name: str = "node0") -> int:
        return self.processes[name].wait(LIMIT_SECONDS)

    def said(self, name: str = "node0") -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with NetLab(getattr(request, "param", 2)) as lab:
        yield Cluster(lab, tmp_path)


@pytest.mark.slow
@on_hosts
@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("nowhere:29400", "nowhere does not resolve on node0"),
        ("10.99.0.1:29400", "no route from node0 to 10.99.0.1"),
        (
            "debian:29400",
            (
                "debian resolves to 127.0.1.1 on node0, a loopback address that no other host can"
                " reach"
            ),
        ),
        ("node0:29555", "port 29555 of node0 is in use by another process"),
    ],
)
def test_a_place_where_hosts_cannot_meet_is_named_at_once(
    endpoint: str, expected: str, cluster: Cluster
) -> None:
    host = cluster.lab.hosts[0]
    Path(cluster.lab.hosts_file).write_text(
        Path(cluster.lab.hosts_file).read_text() + "127.0.1.1 debian\n"
    )
    listen = (
        "import socket, time; s = socket.create_server(('', 29555)); print('up', flush=True);"
        " time.sleep(600)"
    )
    neighbour = host.popen([sys.executable, "-c", listen], ROOT, stdout=subprocess.PIPE)
    assert neighbour.stdout and neighbour.stdout.readline() == b"up\n"
    cluster.start(host, "launch.nnodes=2", f"launch.rdzv_endpoint={endpoint}")
    assert cluster.end() == 69
    (fatal,) = fatal_lines(cluster.said())
    assert fatal.startswith("FATAL peer (node0, hosts): ") and expected in fatal
    assert read(cluster.run_dir, "failure.json")["exit_code"] == 69
    neighbour.stdout.close()


@on_hosts
@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_three_hosts_train_the_model_of_one(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_all(*SMALL, "train.max_steps=12")
    assert [cluster.end(host.name) for host in cluster.lab.hosts] == [0, 0, 0], cluster.said()
    assert all(not host.commands() for host in cluster.lab.hosts)
    assert not any("waiting for" in cluster.said(host.name) for host in cluster.lab.hosts)
    assert read(cluster.run_dir, "summary.json")["world_size"] == 3
    assert list((cluster.run_dir / "hosts").iterdir()) == []
    alone = run(*SMALL, ONE, "train.max_steps=12", f"run_dir={tmp_path}/alone")
    assert alone.returncode == 0, alone.stderr
    one = load(weights(tmp_path / "alone"))
    three = load(weights(cluster.run_dir))
    assert max((one[name] - three[name]).abs().max().item() for name in one) < 1e-5


def test_a_host_that_others_look_at_takes_part(tmp_path: Path) -> None:
    """Its launcher starts while another one asks who is there: by a shared lock, for a moment."""
    path = tmp_path / "hosts" / socket.gethostname()
    path.parent.mkdir()
    look = f"""
import fcntl, time
with open({str(path)!r}, "a") as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    print("looking", flush=True)
    time.sleep(0.3)
"""
    with subprocess.Popen([sys.executable, "-c", look], stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"looking\n"
        with registered(tmp_path):
            assert present_hosts(tmp_path) == [path.name]


@on_hosts
@pytest.mark.slow
def test_a_host_that_never_arrives_is_not_waited_for(cluster: Cluster) -> None:
    cluster.start(
        cluster.lab.hosts[0], "launch.nnodes=2", ENDPOINT, "launch.join_timeout_seconds=6"
    )
    assert cluster.end() == 69
    (fatal,) = fatal_lines(cluster.said())
    assert re.search(r"1 of 2 hosts joined within \d+ s: node0$", fatal)
    assert not cluster.lab.hosts[0].commands()


@on_hosts
@pytest.mark.slow
def test_a_host_says_once_for_how_many_others_it_waits(cluster: Cluster) -> None:
    early, late = cluster.lab.hosts
    words = (*SMALL, "train.max_steps=2", "launch.nnodes=2", ENDPOINT)
    waiting = "waiting for 1 of 2 hosts at node0:29400 (launch.join_timeout_seconds=600); present: node0\n"
    cluster.start(early, *words)
    wait_until(lambda: waiting in cluster.said(early.name), "line about the other host")
    cluster.start(late, *words)
    assert [cluster.end(host.name) for host in cluster.lab.hosts] == [0, 0], cluster.said()
    assert [cluster.said(host.name).count("waiting for") for host in cluster.lab.hosts] == [1, 0]


@on_hosts
@pytest.mark.slow
def test_each_host_says_a_note_once(cluster: Cluster) -> None:
    cluster.start_all(*SMALL, "train.max_steps=2")
    assert [cluster.end(host.name) for host in cluster.lab.hosts] == [0, 0], cluster.said()
    note = "note: launch.nnodes=2: a lost process costs the steps since the last checkpoint"
    assert [cluster.said(host.name).count(note) for host in cluster.lab.hosts] == [1, 1]


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_hosts_with_other_words_are_refused(cluster: Cluster) -> None:
    for host, seed in zip(cluster.lab.hosts, (1, 2), strict=True):
        cluster.start(host, "launch.nnodes=2", ENDPOINT, f"seed={seed}")
    assert [cluster.end(name) for name in ("node0", "node1")] == [2, 2]
    assert re.search(
        r"seed=[12] on rank 0 \(node[01]\), seed=[12] on rank 1 \(node[01]\): use the same"
        r" overrides",
        read(cluster.run_dir, "failure.json")["detail"],
    )
    assert not (cluster.run_dir / "metrics.jsonl").exists()


@on_hosts
@pytest.mark.slow
def test_a_run_directory_that_is_not_shared_is_refused(cluster: Cluster) -> None:
    cluster.run_dir = Path("/dev/shm/run")  # each host has its own
    cluster.start_all(*SMALL, "train.max_steps=2")
    assert [cluster.end(name) for name in ("node0", "node1")] == [69, 69]
    told = fatal_lines(cluster.said("node0")) + fatal_lines(cluster.said("node1"))
    assert told and all("the processes differ in run_dir" in fatal for fatal in told)


@on_hosts
@pytest.mark.slow
def test_hosts_end_with_the_exit_code_of_the_failure_of_one(cluster: Cluster) -> None:
    """SLURM takes the highest of them; by 65 it is known that a restart would not help."""
    (cluster.folder / "slow_end.py").write_text(SLOW_END)
    cluster.env = {"PYTHONPATH": str(cluster.folder)}
    cluster.start_all(
        "model._target_=slow_end.Net", "trusted_modules=[slow_end]", "launch.max_restarts=2"
    )
    assert [cluster.end(name) for name in ("node0", "node1")] == [65, 65], cluster.said(
        "node0"
    ) + cluster.said("node1")
    assert read(cluster.run_dir, "failure.json")["rank"] == 1
    for name in ("node0", "node1"):
        (fatal,) = fatal_lines(cluster.said(name))
        assert "data (rank 1 on node1" in fatal, cluster.said(name)


@on_hosts
@pytest.mark.slow
def test_a_good_end_is_quiet_on_all_hosts(cluster: Cluster) -> None:
    cluster.env = {"TORCH_SHOW_CPP_STACKTRACES": "0"}  # agents that import torch themselves
    cluster.start_all(*SMALL, "train.max_steps=12")
    assert [cluster.end(name) for name in ("node0", "node1")] == [0, 0], cluster.said()
    for name in ("node1", "node0"):
        said = cluster.said(name)
        assert "frame #" not in said and "rendezvous" not in said, said


@on_hosts
@pytest.mark.slow
def test_hosts_that_stop_print_no_traceback(cluster: Cluster) -> None:
    cluster.start_all(*ENDLESS, "train.log_every_steps=1")
    cluster.wait_for_step()
    cluster.processes["node1"].send_signal(signal.SIGTERM)
    assert [cluster.end(name) for name in ("node0", "node1")] == [75, 75]
    said = cluster.said("node0") + cluster.said("node1")
    assert "and saved; resume with" in said and "Traceback" not in said, said


@on_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "silent"),
    [
        ("node0", True),
        pytest.param("node1", True, marks=pytest.mark.nightly),
        pytest.param("node0", False, marks=pytest.mark.nightly),
    ],
)
def test_the_others_end_when_a_host_is_lost(lost: str, silent: bool, cluster: Cluster) -> None:
    """Also if it was the head, whose store torchrun's other agents wait for without an end."""
    cluster.start_all(*ENDLESS, "train.log_every_steps=1", "launch.timeout_seconds=6")
    cluster.wait_for_step()
    gone, left = sorted(cluster.lab.hosts, key=lambda host: host.name != lost)
    gone.power_off(silent)
    began = time.monotonic()
    assert cluster.end(left.name) in (69, 70, 71)
    assert time.monotonic() - began < 6 + 10 + 5, "timeout + 10 s, and room for a busy machine"
    assert not left.commands()
    assert len(fatal_lines(cluster.said(left.name))) == 1
    failure = read(cluster.run_dir, "failure.json")
    assert failure["kind"] in ("peer", "hang")
    assert gone.name in failure["detail"] or gone.address in failure["detail"], failure


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_host_cut_off_never_writes_beside_a_new_run(cluster: Cluster) -> None:
    """The old rank 0 hangs in a collective, alive. Until it ends nobody else gets its run
    directory."""
    words = (
        "model=mlp",
        "train.epochs=1000000",
        "train.evaluate_every_epochs=1000000",
        "checkpoint.every_steps=3",
    )
    cluster.start_all(*words, "train.log_every_steps=1", "launch.timeout_seconds=15")
    cluster.wait_for_step()
    wait_until(lambda: any((cluster.run_dir / "checkpoints").glob("step_????????")), "checkpoint")
    for host in cluster.lab.hosts:
        host.unplug()
    writer = run_lock.owner(cluster.run_dir / run_lock.FILE)["host"]
    (other,) = (host for host in cluster.lab.hosts if host.name != writer)
    cluster.start(other, *words)
    assert cluster.end(other.name) == 2, "alone, under our own launcher"
    assert "another run is in it, process " in cluster.said(
        other.name
    ) and f" on {writer}, " in cluster.said(other.name)
    assert cluster.end(writer) in (69, 70, 71)
    for host in cluster.lab.hosts:
        host.plug()
    reached = int(checkpoints(cluster.run_dir)[-1].removeprefix("step_"))
    cluster.start(other, *words, f"train.max_steps={reached + 3}")
    assert cluster.end(other.name) == 0, cluster.said(other.name)
    assert f"from step {reached}" in cluster.said(other.name)
