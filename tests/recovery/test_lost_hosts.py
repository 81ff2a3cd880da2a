"""`launch.nnodes=2:3`: a host is lost, leaves or comes, and the run goes on. Hosts are network
namespaces."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import nn

from ddp_train.config.auto import resolve
from ddp_train.config.freeze import load_frozen, to_text
from ddp_train.config.validate import check, check_rules
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.world import World
from ddp_train.engine.resize_hook import names_of_change
from ddp_train.hardware import Hardware
from ddp_train.launcher import meeting_point
from ddp_train.launcher.multihost import OF_A_RANGE, command
from ddp_train.launcher.network_location import NetworkLocation
from ddp_train.launcher.worker_exits import WorkerExits, read_exits
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.options.sections import LaunchConfig, TrainConfig
from ddp_train.parallel.config import SingleConfig
from ddp_train.parallel.ordered.config import OrderedConfig
from ddp_train.recovery.lost_host import OwnNumbers
from ddp_train.resilience import lost_hosts, run_lock
from ddp_train.tasks.mean_loss import RunningLoss
from tests.launcher.test_multihost import ENDPOINT, Cluster, on_hosts
from tests.launcher.test_resize import WORDS, assert_close, slow_net
from tests.support.commands import (
    ONE,
    PROGRAM,
    THREE,
    checkpoints,
    fatal_lines,
    metrics,
    read,
    run,
    running,
    wait_until,
    weights,
)
from tests.support.netlab import NetLab
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.timeout(300)


# --- a range, and what is made of it --------------------------------------------------------------

CORES = Hardware(8)


def asked_config(
    nnodes: int | str, max_restarts: int = 1, processes: int = 2, **more: Any
) -> Config:
    launch = LaunchConfig(processes, nnodes=nnodes, rdzv_endpoint="a:1", max_restarts=max_restarts)
    return Config(run_dir="here", launch=launch, **more)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            asked_config("2:x"),
            "launch.nnodes=2:x: must be a whole number of at least 1, or a range LOW:HIGH, as 2:3",
        ),
        (
            asked_config("auto"),
            "launch.nnodes=auto: must be a whole number of at least 1, or a range LOW:HIGH, as 2:3",
        ),
        (
            asked_config("2:auto"),
            "launch.nnodes=2:auto: must be a whole number of at least 1, or a range LOW:HIGH, as 2:3",
        ),
        (
            asked_config("3:2"),
            ("launch.nnodes=3:2: must be a range LOW:HIGH with 1 <= LOW <= HIGH; use"),
        ),
        (
            asked_config("1:1"),
            "launch.nnodes=1:1: a range must allow more than one host; use launch.nnodes=1",
        ),
        (
            asked_config("2:3", 0),
            "launch.nnodes=2:3: a lost host costs a restart, and launch.max_restarts=0 allows none; add",
        ),
        (
            asked_config("2:3", strategy=SingleConfig()),
            "launch.nnodes=2:3: strategy=single runs in one process; use",
        ),
        (
            asked_config("2:3", strategy=OrderedConfig()),
            "cannot divide 8 virtual shards evenly among 6 processes; use launch.nnodes=1:2",
        ),
        (
            asked_config("1:2", processes=6, strategy=OrderedConfig()),
            "among 6 or 12 processes; use launch.nnodes=1:2 launch.nproc_per_node=4",
        ),
        (
            asked_config("1:2", processes=1, strategy=OrderedConfig(virtual_shards=1)),
            "use strategy.virtual_shards=2 launch.nnodes=1:2 launch.nproc_per_node=1",
        ),
        (
            asked_config("2:3", train=TrainConfig(5)),
            "too small for 3 hosts with 2 processes each; use train.global_batch_size=6 or more",
        ),
        (
            asked_config("2:3", train=TrainConfig(8, 2)),
            "with 2 processes each and 2 accumulation steps in each process; use train.global_batch",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else str(one.launch.nnodes),
)
def test_a_range_of_hosts_that_cannot_be_is_told_in_one_line(asked: Config, said: str) -> None:
    problems = check_rules(asked) or check(
        RequestedRun(asked, resolve(asked, CORES, None), CORES, None)
    )
    assert [said in problem for problem in problems] == [True], problems


def test_a_range_of_hosts_is_torchruns() -> None:
    asked = asked_config("2:3", train=TrainConfig(97))
    config = resolve(asked, CORES, None)
    assert (config.launch.nnodes, config.host_range) == (3, "2:3")
    assert not check_rules(asked) and not check(RequestedRun(asked, config, CORES, None)), (
        "97 samples are uneven on any number"
    )
    words = command(
        config, NetworkLocation("10.0.0.1", "eth0", True), PROGRAM, ["launch.nnodes=2:3"]
    )
    assert "--nnodes=2:3" in words and "launch.nnodes=2:3" in words
    (conf,) = (word for word in words if word.startswith("--rdzv-conf="))
    assert all(knob in conf for knob in OF_A_RANGE)
    fixed = command(
        resolve(asked_config(3), CORES, None),
        NetworkLocation("10.0.0.1", "eth0", True),
        PROGRAM,
        [],
    )
    assert "--nnodes=3" in fixed and not any(knob in " ".join(fixed) for knob in OF_A_RANGE)


def test_a_worker_knows_how_many_hosts_there_are_and_may_be(tmp_path: Path) -> None:
    asked = asked_config("2:3", 0, train=TrainConfig(97))
    world = World(0, 4, 0, 2)
    config = resolve(asked, CORES, world)
    assert (config.launch.nnodes, config.host_range) == (2, "2:3")
    assert not check(RequestedRun(asked, config, CORES, world))
    assert load_frozen(to_text(config)) == config
    with mock.patch.dict(os.environ, PET_NNODES="1:4"):
        assert resolve(asked_config(1), CORES, world).host_range == "1:4", (
            "of a torchrun that the user started"
        )
    assert resolve(asked_config("2:3", mode="evaluate"), CORES, None).host_range is None, (
        "nothing is lost there"
    )


# --- what survivors leave, and what launchers read ------------------------------------------------


def test_the_highest_step_and_the_first_loss_are_noted(tmp_path: Path) -> None:
    lost_hosts.note_loss(tmp_path, rank=1)
    assert lost_hosts.noted_loss(tmp_path) is None, "nobody had begun to train"
    began = time.monotonic()
    for step in (7, 8, 7):
        lost_hosts.note_loss(tmp_path, step)
    lost_hosts.note_loss(tmp_path, rank=2)
    lost_hosts.note_loss(tmp_path, rank=0)
    found = lost_hosts.noted_loss(tmp_path) or pytest.fail("it is there")
    assert (found["step"], found["rank"]) == (8, 2)
    assert began - 1 < found["at"] <= time.monotonic()
    lost_hosts.forget_loss(tmp_path)
    assert lost_hosts.noted_loss(tmp_path) is None
    (tmp_path / lost_hosts.FILE).write_text("{")
    assert lost_hosts.noted_loss(tmp_path) is None


def test_a_survivor_that_stands_still_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_hosts, "LOCK_SECONDS", 0.2)
    held = run_lock.acquire(tmp_path / lost_hosts.LOCK)
    with lost_hosts.one_at_a_time(tmp_path):
        assert run_lock.is_held(tmp_path / lost_hosts.LOCK)
    held.release()
    with lost_hosts.one_at_a_time(tmp_path), pytest.raises(run_lock.LockHeldError):
        run_lock.acquire(tmp_path / lost_hosts.LOCK)


def test_only_the_workers_that_were_started_last_count(tmp_path: Path) -> None:
    """A host that joins makes torchrun's agent start them anew, and its count of restarts stays."""
    file = tmp_path / "codes"
    file.write_text("0 0 begun\n0 1 begun\n0 0 75\n0 1 75\n0 0 begun\n0 1 begun\n0 1 0\n")
    assert read_exits(file) == WorkerExits(0, [0], False)
    file.write_text(file.read_text() + "1 0 begun\n1 0 reported\n1 0 70\n")
    assert read_exits(file) == WorkerExits(1, [70, 0], True)
    file.write_text("")
    assert read_exits(file) == WorkerExits(0, [], False)


def exchange(world: World) -> list[Any]:
    """A step of a model whose statistics differ between ranks, in two micro-batches."""
    module = nn.BatchNorm1d(2)
    losses = RunningLoss()
    job: Any = SimpleNamespace(module=module, stepper=SimpleNamespace(losses=losses))
    numbers = OwnNumbers(job)
    first, last = (MicroBatch(0, 0, np.arange(3), 3, 1.0, is_last) for is_last in (False, True))
    numbers.before_backward(torch.tensor(1.0), None, first)
    losses.add(1.0, 3, first)
    module.running_mean = torch.full((2,), 10.0 + world.rank)  # a new tensor in its place
    numbers.before_backward(torch.tensor(float(world.rank)), None, last)
    module.running_mean.add_(100)
    numbers.before_update()
    return numbers.of_ranks.tolist()


def test_every_rank_has_what_each_knows_alone() -> None:
    expected = [[1.0 + rank, 6.0, *[10.0 + rank] * 2, 1.0, 1.0] for rank in range(3)]
    assert on_ranks(3, exchange) == [expected] * 3


def test_hosts_that_left_or_joined_are_named() -> None:
    assert names_of_change(["a", "b", "c"], ["a", "c"]) == "host b left"
    assert names_of_change(["a", "b", "c"], ["a"]) == "hosts b and c left"
    assert names_of_change(["a"], ["a", "b"]) == "host b joined"
    assert names_of_change(["a", "b"], ["a", "c"]) == "host b left, host c joined"
    assert names_of_change([], ["a"]) == "", "a checkpoint of before knows no names"


# --- whole runs -----------------------------------------------------------------------------------

HOSTS = ("launch.nnodes=2:3", ENDPOINT, "launch.max_restarts=5", "launch.join_timeout_seconds=40")
NET = (*WORDS, "+model.delay=0.05")
BATCH_NORM = (
    *(word for word in NET if "ema" not in word),
    "+model.norm=true",
    "train.global_batch_size=48",
)


class Elastic(Cluster):
    """The same command on each host, where hosts may leave and come."""

    def __init__(self, lab: NetLab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.env = slow_net(folder)
        self.late = 0
        """Changes of the number until all hosts were in."""

    def begin(self, *words: str, hosts: int = 3) -> None:
        """Until all of them train. On a slow machine one may come so late that the others have
        begun without it."""
        hold = self.folder / "hold"
        hold.touch()
        for host in self.lab.hosts[:hosts]:
            self.start(host, *HOSTS, *words)
        wait_until(lambda: f"{hosts} on {hosts} hosts" in self.all_said(), f"run on {hosts} hosts")
        if "processes      2 on 2 hosts" in self.all_said() and hosts > 2:
            wait_until(lambda: self.changes() != [], "step on all hosts")
            self.late = 1
        hold.unlink()

    def join(self, number: int, *words: str) -> None:
        self.start(self.lab.hosts[number], *HOSTS, *words)

    def wait_for(self, step: int) -> int:
        """Until a step is logged. Returns the last one that is."""

        def last() -> int:
            logged = (self.run_dir / "metrics.jsonl").exists()
            if logged:
                return max((line["step"] for line in metrics(self.run_dir)), default=-1)
            return -1

        wait_until(lambda: last() >= step, f"step {step}")
        return last()

    def worker_of(self, number: int) -> int:
        """The process id, outside, of the one on a host: torchrun starts it with -u."""
        there = {
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if self.lab.hosts[number].has(int(path.name))
        }
        (pid,) = (pid for pid in there if b"\0-u\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return pid

    def ends(self, *names: str) -> list[int]:
        return [self.end(name) for name in names]

    def all_said(self) -> str:
        return "".join(self.said(name) for name in self.processes)

    def changes(self) -> list[tuple[int, int, str]]:
        """Of the number of processes, since all hosts were in."""
        lines = metrics(self.run_dir) if (self.run_dir / "metrics.jsonl").exists() else []
        return [(one["from"], one["to"], one["why"]) for one in lines if one["kind"] == "resize"][
            self.late :
        ]


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Elastic]:
    with NetLab(getattr(request, "param", 3)) as lab:
        yield Elastic(lab, tmp_path)


def calm(folder: Path, *words: str) -> Path:
    """The run that nobody disturbs, on one process."""
    done = run(*words, ONE, f"run_dir={folder}/calm", env=slow_net(folder))
    assert done.returncode == 0, done.stderr
    return folder / "calm"


LOST = (3, 2, "a rank was lost")
JOINED = "host node3 joined"


@on_hosts
@pytest.mark.slow
def test_a_host_that_crashes_costs_no_step(hosts: Elastic, tmp_path: Path) -> None:
    hosts.begin(*NET, "train.epochs=9")
    reached = hosts.wait_for(9)
    hosts.lab.hosts[1].power_off(silent=False)
    assert hosts.ends("node0", "node2") == [0, 0], hosts.all_said()
    assert all(not host.commands() for host in hosts.lab.hosts)
    summary = read(hosts.run_dir, "summary.json")
    said = hosts.all_said()
    (recovery,) = summary["recoveries"]
    assert recovery["rank"] == 1 and recovery["steps_redone"] == summary["steps_redone"] == 0
    assert recovery["step"] >= reached and 0 < recovery["seconds"] < 60
    assert hosts.changes() == [LOST] and summary["world_size"] == 2
    assert len(summary["resizes"]) == hosts.late + 1
    assert fatal_lines(said) == [] and said.count("LOST peer (rank 1 on node1") == 1
    assert f"step {recovery['step']} is not lost: it was in memory outside the processes" in said
    assert_close(hosts.run_dir, calm(tmp_path, *WORDS, "+model.delay=0", "train.epochs=9"))


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_a_host_without_power_is_replaced_by_one_that_comes(hosts: Elastic, tmp_path: Path) -> None:
    """No packet says that it is gone: launch.timeout_seconds does. At the end the number is what it
    was."""
    words = (*NET, "train.epochs=60", "launch.timeout_seconds=6")
    hosts.begin(*words)
    hosts.wait_for(9)
    hosts.lab.hosts[2].power_off(silent=True)
    wait_until(lambda: "LOST hang (rank 2 on node2" in hosts.all_said(), "loss")
    wait_until(lambda: hosts.changes() != [], "change")
    hosts.join(3, *words)
    assert hosts.ends("node0", "node1", "node3") == [0, 0, 0], hosts.all_said()
    summary = read(hosts.run_dir, "summary.json")
    assert hosts.changes() == [LOST, (2, 3, JOINED)]
    assert [one["rank"] for one in summary["recoveries"]] == [2]
    assert (summary["steps_redone"], summary["world_size"]) == (0, 3)
    assert_close(hosts.run_dir, calm(tmp_path, *WORDS, "+model.delay=0", "train.epochs=60"))


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_a_host_that_is_cut_off_is_left_behind(hosts: Elastic, tmp_path: Path) -> None:
    """It sees the run directory all the same, and ends without a word in it."""
    words = (*NET, "launch.timeout_seconds=6")
    hosts.begin(*words)
    hosts.wait_for(9)
    hosts.lab.hosts[1].unplug()
    assert hosts.ends("node0", "node2") == [0, 0], hosts.all_said()
    assert read(hosts.run_dir, "summary.json")["steps_redone"] == 0
    assert hosts.changes() == [LOST]
    assert_close(hosts.run_dir, calm(tmp_path, *WORDS, "+model.delay=0"))
    assert hosts.end("node1") in (69, 70, 71), hosts.said("node1")


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_worker_is_replaced_to_the_same_bytes(hosts: Elastic, tmp_path: Path) -> None:
    """Batch norm's statistics differ between ranks: those of the dead one are known to the
    others."""
    words = BATCH_NORM
    hosts.begin(
        *words, "launch.nnodes=3:3"
    )  # all from the first step on: their number decides bits
    hosts.wait_for(8)
    os.kill(hosts.worker_of(1), signal.SIGKILL)
    assert hosts.ends("node0", "node1", "node2") == [0, 0, 0], hosts.all_said()
    summary = read(hosts.run_dir, "summary.json")
    assert [one["rank"] for one in summary["recoveries"]] == [1] and summary["steps_redone"] == 0
    assert hosts.changes() == []
    with running(tmp_path / "calm", *words, THREE, env=hosts.env) as job:
        assert job.end() == 0, job.said()
    for name in ("model.safetensors", "training.pt"):
        ours, theirs = (
            folder / "checkpoints" / checkpoints(folder)[-1] / name
            for folder in (hosts.run_dir, job.run_dir)
        )
        if name == "model.safetensors":
            assert ours.read_bytes() == theirs.read_bytes()
        else:
            one, other = (torch.load(path, weights_only=True) for path in (ours, theirs))
            assert torch.equal(one["buffers"], other["buffers"]) and one["buffers"].shape[0] == 3


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_a_host_that_is_asked_to_stop_leaves(hosts: Elastic, tmp_path: Path) -> None:
    """As before a spot host is taken away. The others go on."""
    hosts.begin(*NET)
    hosts.wait_for(9)
    hosts.processes["node2"].send_signal(signal.SIGTERM)
    assert hosts.ends("node2", "node0", "node1") == [75, 0, 0], hosts.all_said()
    assert read(hosts.run_dir, "summary.json")["steps_redone"] == 0
    assert [change[:2] for change in hosts.changes()] == [(3, 2)]
    assert_close(hosts.run_dir, calm(tmp_path, *WORDS, "+model.delay=0"))


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_all_hosts_stop_and_resume_with_another_number(hosts: Elastic, tmp_path: Path) -> None:
    hosts.begin(*NET)
    hosts.wait_for(9)
    for process in hosts.processes.values():
        process.send_signal(signal.SIGTERM)
    assert hosts.ends("node0", "node1", "node2") == [75, 75, 75], hosts.all_said()
    hosts.processes.clear()
    hosts.begin(*NET, hosts=2)
    assert hosts.ends("node0", "node1") == [0, 0], hosts.all_said()
    assert hosts.changes() == [(3, 2, "host node2 left")]
    assert re.search(
        r"^host node2 left after step \d+; 2 processes continue$", hosts.all_said(), re.M
    )
    ours = load(weights(hosts.run_dir))
    theirs = load(weights(calm(tmp_path, *WORDS, "+model.delay=0")))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-10) for name in theirs)


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [4], indirect=True)
@pytest.mark.parametrize("silent", [False, True])
def test_hosts_meet_elsewhere_when_the_endpoint_is_lost(
    silent: bool, hosts: Elastic, tmp_path: Path
) -> None:
    """It has the rendezvous, rank 0, the lock of the run directory and the store of the workers.
    Whoever comes with the old words finds the others all the same."""
    words = (*NET, "train.epochs=80", "launch.timeout_seconds=6")
    hosts.begin(*words)
    hosts.wait_for(9)
    hosts.lab.hosts[0].power_off(silent)
    wait_until(lambda: hosts.changes() != [], "change")
    hosts.join(3, *words)
    assert hosts.ends("node1", "node2", "node3") == [0, 0, 0], hosts.all_said()
    summary = read(hosts.run_dir, "summary.json")
    assert hosts.changes() == [LOST, (2, 3, JOINED)]
    assert [one["rank"] for one in summary["recoveries"]] == [0] and summary["steps_redone"] == 0
    said = hosts.said("node1"), hosts.said("node2")
    assert all(
        len(re.findall(r"the hosts meet at 10\.77\.0\.1[12]:29400 from now on", one)) == 1
        for one in said
    )
    assert_close(hosts.run_dir, calm(tmp_path, *WORDS, "+model.delay=0", "train.epochs=80"))


@on_hosts
@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_without_restarts_left_is_resumed_elsewhere(hosts: Elastic, tmp_path: Path) -> None:
    """The next command names another endpoint; the last step is not lost."""
    words = (*NET, "launch.max_restarts=1")
    hosts.begin(*words)
    reached = hosts.wait_for(9)
    os.kill(hosts.worker_of(1), signal.SIGKILL)
    wait_until(
        lambda: any(line["step"] > reached + 8 for line in metrics(hosts.run_dir)),
        "step after the first loss",
    )
    hosts.lab.hosts[0].power_off(silent=False)
    assert {*hosts.ends("node1", "node2")} <= {69, 70, 71}, hosts.all_said()
    hosts.processes.clear()
    for host in hosts.lab.hosts[1:]:
        hosts.start(host, HOSTS[0], *HOSTS[2:], "launch.rdzv_endpoint=node2:29400", *NET)
    assert hosts.ends("node1", "node2") == [0, 0], hosts.all_said()
    summary = read(hosts.run_dir, "summary.json")
    assert [one["rank"] for one in summary["recoveries"]] == [1, 0] and summary["steps_redone"] == 0
    assert_close(hosts.run_dir, calm(tmp_path, *WORDS, "+model.delay=0"))


def test_the_first_launcher_chooses_where_to_meet(tmp_path: Path) -> None:
    assert meeting_point.chosen(tmp_path) is None
    mine = run_lock.acquire(tmp_path / "hosts" / os.uname().nodename)
    assert meeting_point.choose(tmp_path, "a:1", "b:1") == "b:1"
    assert meeting_point.choose(tmp_path, "a:1", "c:1") == "b:1", "another launcher was faster"
    assert meeting_point.chosen(tmp_path) == "b:1"
    assert meeting_point.choose(tmp_path, "b:1", "c:1") == "c:1", "that one is lost too"
    mine.release()
    assert meeting_point.chosen(tmp_path) is None, "its host is gone"
    again = run_lock.acquire(tmp_path / "hosts" / os.uname().nodename)
    assert meeting_point.chosen(tmp_path) is None, "a later run on the same host"
    again.release()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert meeting_point.is_reachable(endpoint)
    assert not meeting_point.is_reachable(endpoint)
