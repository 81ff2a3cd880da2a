"""Each check of a host is made to fail by the thing itself where this machine can do it.

Tiny file systems, names that do not resolve, limits: in namespaces of a forked child (`apart`). A
slow disk: a few lines of C before libc."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddp_lab.doctor import (
    host_checks,
)
from ddp_lab.doctor.findings import OK, SKIPPED, Finding
from tests.support.commands import (
    ROOT,
    environment,
)
from tests.support.doctor import (
    apart,
    config,
    is_failure,
    is_warning,
    on_linux_as_root,
    tmpfs,
)

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


@on_linux_as_root
def test_a_small_dev_shm_fails_if_loader_processes_need_more() -> None:
    loading = config(data={"name": "cifar10", "placement": "host"}, tuning={"num_workers": 2})
    small = tmpfs(Path("/dev/shm"), "64k")
    is_failure(
        apart(small, host_checks.shared_memory, loading),
        70,
        "/dev/shm: 64.0 KiB free",
        "--shm-size",
        "num_workers=2",
    )
    assert apart(small, host_checks.shared_memory, config()).status == OK, "nobody uses it"
    on_gpus = dataclasses.replace(config(), device="cuda")
    is_warning(
        apart(tmpfs(Path("/dev/shm"), "64m"), host_checks.shared_memory, on_gpus),
        "free, 1.0 GiB are recommended",
    )
    is_warning(host_checks.shared_memory(config(), Path("/nowhere")), "there is no /nowhere")


def test_a_low_limit_of_open_files_fails() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 120))

    finding = apart(lower, host_checks.file_descriptors, config(), namespaces=False)
    is_failure(
        finding, 70, "a process may open 100 files", "ulimit -n 65536", "the hard limit is 120"
    )
    assert host_checks.file_descriptors(config()).status == OK


def few_ports() -> None:
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40005")


def no_port() -> None:
    few_ports()
    taken = [socket.create_server(("", port)) for port in range(40000, 40006)]
    socket.socket.keep = taken  # type: ignore[attr-defined]  # open until this child ends


def torchrun_port() -> None:
    socket.socket.keep = socket.create_server(("", 29500))  # type: ignore[attr-defined]


@on_linux_as_root
def test_too_few_ports_fail_and_a_taken_one_is_named() -> None:
    is_failure(
        apart(few_ports, host_checks.ports, config(), False),
        69,
        "6 of 6 ephemeral ports are free, 15 are needed",
    )
    is_failure(
        apart(no_port, host_checks.ports, config(), False),
        69,
        "no free port between 40000 and 40005",
    )
    is_warning(
        apart(torchrun_port, host_checks.ports, config(), False), "port 29500", "--standalone"
    )
    assert apart(torchrun_port, host_checks.ports, config(), True).status == OK, (
        "it is this job's own"
    )


def named(name: str, hosts: Path, content: str = "") -> Callable[[], Any]:
    """This host has that name, and /etc/hosts is all that knows names."""

    def prepare() -> None:
        hosts.write_text(content)
        subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        socket.sethostname(name)

    return prepare


@on_linux_as_root
def test_a_host_name_must_resolve_to_what_others_reach(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    is_failure(
        apart(named("lost", hosts), host_checks.host_name, True),
        69,
        "lost does not resolve",
        "/etc/hosts",
    )
    is_warning(
        apart(named("lost", hosts), host_checks.host_name, False),
        "only torchrun with gloo needs one for a run on one host",
    )
    debian = named("debian", hosts, "127.0.1.1 debian\n")
    is_failure(
        apart(debian, host_checks.host_name, True),
        69,
        "debian resolves to 127.0.1.1 here, which no other host can reach",
    )
    assert apart(debian, host_checks.host_name, False).status == OK
    assert apart(named("good", hosts, "10.0.0.7 good\n"), host_checks.host_name, True).status == OK


@on_linux_as_root
def test_a_name_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    server = tmp_path / "resolv.conf"
    server.write_text("nameserver 127.0.0.1\n")

    def dead() -> None:
        named("lost", tmp_path / "hosts")()
        subprocess.run(["mount", "--bind", str(server), "/etc/resolv.conf"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        silent.bind(("127.0.0.1", 53))
        socket.socket.keep = silent  # type: ignore[attr-defined]

    with mock.patch.object(host_checks, "RESOLVER_SECONDS", 0.3):
        is_failure(
            apart(dead, host_checks.host_name, True),
            69,
            "not resolved within 0.3 s",
            "/etc/resolv.conf",
        )


def test_more_processes_than_cores_are_warned_of(tmp_path: Path) -> None:
    one_core = apart(
        lambda: os.sched_setaffinity(0, {0}), host_checks.cores, config(), namespaces=False
    )
    is_warning(one_core, "1 core for 3 processes", "lower launch.nproc_per_node")
    loading = config(1, tuning={"num_workers": 4096}, launch={"threads_per_process": 1})
    is_warning(
        host_checks.cores(loading, tmp_path),
        "1 x 4096 loader processes",
        "lower tuning.num_workers",
    )
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    is_warning(
        host_checks.cores(config(1), tmp_path),
        "of which the container's quota allows 0.5 for 1 process",
    )
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host_checks.cores(config(1, launch={"threads_per_process": 1}), tmp_path).status == OK


@on_linux_as_root
def test_a_run_dir_that_cannot_be_written_fails(tmp_path: Path) -> None:
    def read_only() -> None:
        tmpfs(tmp_path, "1m")()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)

    is_failure(
        apart(read_only, host_checks.run_directory, tmp_path),
        73,
        "cannot be written (Read-only file system)",
    )
    full = apart(tmpfs(tmp_path, "1m"), host_checks.run_directory, tmp_path)
    is_failure(full, 73, "No space left on device", "free some space")
    is_warning(
        apart(tmpfs(tmp_path, "100m"), host_checks.run_directory, tmp_path),
        "only 100.0 MiB free (writes ",
        "another disk",
    )
    assert host_checks.run_directory(tmp_path / "new").numbers["bytes_per_second"] > 0
    assert list((tmp_path / "new").iterdir()) == [], "what it wrote is gone"


@pytest.mark.slow
def test_a_slow_disk_is_warned_of(shim: str, tmp_path: Path) -> None:
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path\n"
        "from ddp_lab.doctor import host_checks\n"
        "host_checks.WRITE_SECONDS = 0.1\n"
        "print(json.dumps(asdict(host_checks.run_directory(Path(sys.argv[1])))))"
    )
    env = environment({"LD_PRELOAD": shim, "SLOW_FSYNC": "0.2"})
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    finding = Finding(**json.loads(done.stdout))
    is_warning(finding, "is slow", "a checkpoint of 1 GB takes", "raise checkpoint.every_steps")
    assert finding.numbers["fsync_seconds"] > 0.2


def test_a_data_set_that_is_not_there_fails_on_this_host(tmp_path: Path) -> None:
    mnist = config(data={"name": "mnist", "root": str(tmp_path)})
    is_failure(
        host_checks.data_set(mnist),
        65,
        "train-images-idx3-ubyte is missing",
        "add data.download=true",
    )
    fetched = config(data={"name": "mnist", "root": str(tmp_path), "download": True})
    assert host_checks.data_set(fetched).status == OK
    folders = config(data={"name": "image_folder", "root": str(tmp_path)})
    is_failure(host_checks.data_set(folders), 65, "must hold a folder per class")
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
    assert host_checks.data_set(folders).status == OK
    before = host_checks.data_digest(folders)
    (tmp_path / "train" / "dog").mkdir()
    assert host_checks.data_digest(folders) != before
    assert (
        host_checks.data_set(config(data={"name": "custom", "target": "my.Data"})).status == SKIPPED
    )


def test_the_speed_of_a_network_is_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "net/eth0").mkdir(parents=True)
    (tmp_path / "net/eth0/speed").write_text("25000\n")
    assert host_checks.link_bytes_per_second("eth0", tmp_path) == (25e9 / 8, "eth0, 25 Gbit/s")
    (tmp_path / "net/eth0/speed").write_text("-1\n")
    assert host_checks.link_bytes_per_second("eth0", tmp_path) == (0.0, "eth0")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    assert host_checks.link_bytes_per_second("eth0", tmp_path)[0] == 100e9
