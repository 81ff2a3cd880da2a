"""mode=doctor: each check is made to fail by the thing itself where this machine can do it.

Tiny file systems, names that do not resolve, limits: in namespaces of a forked child (`apart`). A
clock that is off, a slow disk: a few lines of C before libc. GPUs: answers of NVML, at the border
to that library.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml
import pytest
import torch.distributed as dist

from ddp_lab.doctor import (
    all_hosts,
    collective_checks,
    collective_runner,
    collective_stages,
    collective_test,
    findings,
    gpu_checks,
    host_checks,
    isolated_check,
    main,
    multihost_checks,
    nvml,
)
from ddp_lab.doctor.all_hosts import HostDoctor
from ddp_lab.doctor.findings import FAILURE, OK, SKIPPED, WARNING, Finding
from ddp_lab.doctor.isolated_check import IsolatedCheck, NoAnswerError
from ddp_lab.doctor.multihost_checks import HostComparison
from ddp_lab.doctor.peers import Peers
from ddp_train.config.prepare import prepare
from ddp_train.distributed.agent import EXIT_CODE_FILE
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, PeerError
from ddp_train.hardware import Hardware, detect_hardware
from ddp_train.linux import children_of, state_of
from ddp_train.options.schema import Config
from tests.support.commands import (
    LAUNCH,
    PROGRAM,
    ROOT,
    environment,
    read,
    run,
    running,
    wait_until,
)
from tests.support.jobs import config_of
from tests.support.netlab import NetLab, why_not
from tests.support.silent_disk import silent_disk, why_none

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy
with_fuse = pytest.mark.skipif(bool(why_not() or why_none()), reason=why_not() or why_none())
on_linux_as_root = pytest.mark.skipif(bool(why_not()), reason=why_not())
DOCTOR = ("mode=doctor",)
NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x40000000  # linux/sched.h: mounts, host name, network


def config(size: int = 3, **sections: Any) -> Config:
    return config_of(World(0, size, 0, size), Hardware(cpus=2), **sections)


def apart(
    prepare: Callable[[], Any],
    look: Callable[..., Finding],
    *arguments: Any,
    namespaces: bool = True,
) -> Finding:
    """look(*arguments) in a child that has done `prepare`, in mounts, a host name and a network of
    its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if namespaces:
                assert ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACES) == 0, os.strerror(
                    ctypes.get_errno()
                )
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            prepare()
            said = asdict(look(*arguments))
        except BaseException as error:  # noqa: BLE001  it travels to the test
            said = {"check": "child", "status": "broken", "detail": repr(error)}
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    return Finding(**said)


def tmpfs(folder: Path, size: str) -> Callable[[], Any]:
    return lambda: subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True
    )


def is_failure(finding: Finding, code: int, *words: str) -> None:
    assert (finding.status, finding.exit_code) == (FAILURE, code), finding
    assert finding.remedy and all(word in f"{finding.detail} {finding.remedy}" for word in words), (
        finding
    )


def is_warning(finding: Finding, *words: str) -> None:
    assert finding.status == WARNING, finding
    assert finding.remedy and all(word in f"{finding.detail} {finding.remedy}" for word in words), (
        finding
    )


# --- the report -----------------------------------------------------------------------------------


def test_the_exit_code_is_that_of_the_first_failure_and_a_broken_check_hides_no_other(
    tmp_path: Path,
) -> None:
    def breaks() -> Finding:
        raise KeyError("no such file in /proc")

    broken = findings.run_check("cores", breaks)
    assert broken.status == FAILURE and "KeyError: 'no such file in /proc'" in broken.detail
    found = [
        findings.ok("fine"),
        findings.warning("slow", "faster"),
        findings.failure("not there", "put it there", 65),
        broken,
    ]
    assert findings.exit_code(found[:2]) == 0
    assert findings.report(found, ["here"], tmp_path / "run", time.monotonic()) == 65
    said = read(tmp_path / "run", "doctor.json")
    assert (said["status"], said["exit_code"]) == (FAILURE, 65)
    assert said["counts"] == {OK: 1, WARNING: 1, FAILURE: 2, SKIPPED: 0}
    assert said["findings"][2]["remedy"] == "put it there"


def test_hosts_that_found_the_same_share_a_row() -> None:
    same = [
        dataclasses.replace(findings.warning("too few", "more"), host=name) for name in ("a", "b")
    ]
    other = dataclasses.replace(findings.warning("far too few", "more"), host="c")
    made = findings.table([*same, other], ["a", "b", "c"])
    assert list(made.columns[1].cells) == ["a, b", "c"]


# --- what gives no answer -------------------------------------------------------------------------


def test_what_is_looked_at_aside_comes_back_or_is_given_up() -> None:
    soon = time.monotonic() + 30
    assert IsolatedCheck(sorted, [2, 1]).answer(soon) == [1, 2]
    assert len(IsolatedCheck(str.ljust, "", 2**20).answer(soon)) == 2**20, "more than a pipe holds"
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        IsolatedCheck(int, "one").answer(soon)
    with pytest.raises(RuntimeError, match="died"):
        IsolatedCheck(os.abort).answer(soon)
    slow = IsolatedCheck(time.sleep, 60)
    other = IsolatedCheck(os.getpid)
    began = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"^no answer within 0 s$"):
        slow.answer(began + 0.1)
    assert time.monotonic() - began < 5 and not state_of(slow.pid), "it was killed and buried"
    wait_until(lambda: state_of(other.pid) == "Z", "end of the other")
    assert other.answer(began) == other.pid, "it was there in time"


@pytest.mark.slow
@with_fuse
def test_a_disk_that_gives_no_answer_is_a_finding(tmp_path: Path) -> None:
    """Nobody waits for it: neither the config nor the checks of run directory and data nor the
    report."""
    dead = tmp_path / "dead"

    def look() -> Finding:
        words = [
            *DOCTOR,
            f"run_dir={dead}/run",
            "data=image_folder",
            f"data.root={dead}",
            "data.decode=auto",
        ]
        on_it = prepare(PROGRAM, words, None).config
        with (
            mock.patch.object(main, "LOCAL_CHECKS_SECONDS", 1.0),
            mock.patch.object(findings, "REPORT_SECONDS", 0.2),
            mock.patch.object(isolated_check, "END_SECONDS", 0.2),
        ):
            began = time.monotonic()
            _, found = main.check_at_rest(on_it, several=False, under_torchrun=False)
            code = findings.report(found, ["here"], dead / "run", began)
        return findings.ok("", code=code, found=[asdict(finding) for finding in found])

    said = apart(silent_disk(dead), look)
    assert said.status == OK, said
    found = {one["check"]: Finding(**one) for one in said.numbers["found"]}
    is_failure(found["run_dir"], 73, "no answer within ", "survives SIGKILL (state D)", "dmesg")
    is_failure(found["data set"], 65, "no answer within")
    assert found["shared memory"].status == OK and said.numbers["code"] == 73


@with_fuse
def test_a_probe_that_does_not_die_is_named_and_left_behind(tmp_path: Path) -> None:
    dead = tmp_path / "dead"

    def look() -> Finding:
        process = subprocess.Popen(["cat", str(dead / "file")], stdout=subprocess.PIPE)
        probe = collective_runner.RankProcess(
            process, collective_runner.RankResult(1, "node1", process.pid), tmp_path / "errors"
        )
        wait_until((tmp_path / "dead.asked").exists, "request")
        with mock.patch.object(collective_runner, "END_SECONDS", 0.2):
            collective_runner.kill_all([probe])
        return collective_checks.exchange([answers(1)[0], probe.result], "gloo")

    is_failure(
        apart(silent_disk(dead), look),
        71,
        "rank 1 on node1",
        "in stage 'import torch') survives SIGKILL (state D)",
    )


# --- a host ---------------------------------------------------------------------------------------


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
    is_failure(finding, 70, "limit 100 per process", "ulimit -n 65536", "the hard limit is 120")
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
        "runs on one host do not need one",
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
        "100.0 MiB free",
        "another disk",
    )
    assert host_checks.run_directory(tmp_path / "new").numbers["bytes_per_second"] > 0
    assert list((tmp_path / "new").iterdir()) == [], "what it wrote is gone"


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double asked(const char *name) { const char *value = getenv(name); return value ? atof(value) : 0; }

int fsync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    usleep(1e6 * asked("SLOW_FSYNC"));
    return real(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += (time_t)asked("CLOCK_OFFSET");
    return failed;
}
"""
"""Before libc: fsync takes SLOW_FSYNC seconds more, the wall clock is CLOCK_OFFSET seconds
ahead."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"], cwd=folder, check=True
    )
    return str(folder / "shim.so")


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


# --- GPUs -----------------------------------------------------------------------------------------


class Nvml:
    """Answers of NVML for some GPUs; a dict for each, with what is special about it. Healthy ones
    are H200s."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = cards

    def __enter__(self) -> Nvml:
        self.stack = contextlib.ExitStack()
        memory = mock.Mock(total=140 * 2**30, used=2**29)
        asked: dict[str, Callable[..., Any]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "SystemGetDriverVersion": lambda: "575.57.08",
            "SystemGetCudaDriverVersion": lambda: 12090,
            "DeviceGetCount": lambda: self.known(len(self.cards) or None),
            "DeviceGetHandleByIndex": self.handle,
            "DeviceGetHandleByUUID": lambda uuid: self.handle(int(uuid.removeprefix("GPU-"))),
            "DeviceGetUUID": lambda card: f"GPU-{[one is card for one in self.cards].index(True)}",
            "DeviceGetCudaComputeCapability": lambda _: (9, 0),
            "DeviceGetName": lambda card: card.get("name", "NVIDIA H200"),
            "DeviceGetMemoryInfo": lambda card: card.get("memory", memory),
            "DeviceGetRemappedRows": lambda card: card.get("rows", (0, 0, 0, 0)),
            "DeviceGetComputeRunningProcesses": lambda card: card.get("processes", []),
            "DeviceGetTotalEccErrors": lambda card, *_: self.known(card.get("errors", 0)),
            "DeviceGetCurrentClocksThrottleReasons": lambda card: card.get("reasons", 0),
            "DeviceGetClockInfo": lambda card, _: card.get("clock", 1900),
            "DeviceGetMaxClockInfo": lambda card, _: 1980,
            "DeviceGetCurrPcieLinkWidth": lambda card: card.get("width", 16),
            "DeviceGetMaxPcieLinkWidth": lambda card: 16,
            "DeviceGetMaxPcieLinkGeneration": lambda card: 5,
            "DeviceGetNvLinkState": lambda card, link: int(
                self.known(link < card.get("links", 18) or None)
            ),
            "DeviceGetP2PStatus": lambda one, other, way: (
                max(one.get("p2p", 0), other.get("p2p", 0))
                if way == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
                else 0
            ),
            "DeviceGetFieldValues": lambda card, _: [
                mock.Mock(nvmlReturn=pynvml.NVML_SUCCESS, value=mock.Mock(uiVal=26562))
            ],
        }
        for name, answer in asked.items():
            self.stack.enter_context(mock.patch.object(pynvml, f"nvml{name}", answer))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def handle(self, index: int) -> dict[str, Any]:
        if self.cards[index].get("lost"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.cards[index]

    @staticmethod
    def known(value: Any) -> Any:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def gpus(*cards: dict[str, Any], visible: str | None = None, wanted: int = 2) -> dict[str, Finding]:
    """Every finding about some GPUs, by its check."""
    with Nvml(*cards):
        found = nvml.read_gpus(visible)
    return {finding.check: finding for finding in gpu_checks.check_gpus(found, wanted)}


def test_healthy_gpus_are_left_in_peace() -> None:
    found = gpus({}, {})
    assert {finding.status for finding in found.values()} == {OK}, found
    assert "2 x NVIDIA H200, driver 575.57.08" in found["gpus"].detail
    assert found["gpu links"].detail == "NVLink, 18 links, 478 GB/s each way"


@pytest.mark.parametrize(
    ("card", "check", "status", "words"),
    [
        ({"lost": True}, "gpus", FAILURE, ("GPU 1: GPU is lost", "dmesg")),
        ({"name": "NVIDIA A100"}, "gpu models", WARNING, ("2 kinds", "NVIDIA A100 of 140 GiB")),
        (
            {"memory": mock.Mock(total=2**36, used=2**33)},
            "gpu models",
            WARNING,
            ("2 kinds", "of 64 GiB"),
        ),
        (
            {"memory": mock.Mock(total=2**36, used=2**33)},
            "gpu memory",
            WARNING,
            ("GPU 1: 8.0 of 64.0 GiB",),
        ),
        (
            {"processes": [mock.Mock(pid=77, usedGpuMemory=2**31)]},
            "gpu processes",
            WARNING,
            ("process 77 (2.0 GiB)",),
        ),
        ({"errors": 3}, "gpu ecc", FAILURE, ("GPU 1: 3 uncorrected errors", "nvidia-smi -r")),
        (
            {"rows": (0, 1, 0, 1)},
            "gpu ecc",
            FAILURE,
            ("GPU 1: a memory row could not be replaced",),
        ),
        ({"rows": (0, 1, 1, 0)}, "gpu ecc", WARNING, ("GPU 1: a memory row is due",)),
        ({"errors": None}, "gpu ecc", SKIPPED, ("GPU 1: no ECC",)),
        ({"reasons": 0x40 | 0x1}, "gpu throttling", WARNING, ("GPU 1: too hot (hardware)", "fans")),
        ({"reasons": 0x80}, "gpu throttling", WARNING, ("power brake",)),
        ({"width": 8}, "gpu links", WARNING, ("GPU 1: PCIe x8 of x16",)),
        ({"links": 16}, "gpu links", WARNING, ("GPU 1: 16 of 18 NVLinks",)),
    ],
)
def test_an_ailing_gpu_is_named(
    card: dict[str, Any], check: str, status: str, words: tuple[str, ...]
) -> None:
    finding = gpus({}, card)[check]
    assert finding.status == status, finding
    assert all(word in f"{finding.detail} {finding.remedy}" for word in words), finding


def test_gpus_are_counted_as_cuda_sees_them() -> None:
    is_failure(
        gpus({}, {}, visible="1")["gpus"],
        70,
        "1 GPU visible, 2 processes need one each",
        "CUDA_VISIBLE_DEVICES",
    )
    assert gpus({}, {}, {}, visible="GPU-2,0,9,1")["gpus"].numbers["names"] == {"NVIDIA H200": 2}
    assert gpus({}, visible="", wanted=0)["gpus"].status == SKIPPED


@pytest.mark.parametrize("visible", [None, "0", "0,1", "GPU-0", "GPU-1,GPU-0"])
def test_a_gpu_that_is_lost_is_named_however_it_is_asked_for(visible: str | None) -> None:
    is_failure(gpus({"lost": True}, {}, visible=visible)["gpus"], 70, "GPU 0: GPU is lost", "xid")


@pytest.mark.slow
def test_other_gpus_than_the_lost_one_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that would get the lost one is refused; the doctor is not, which says more."""
    words = [f"run_dir={tmp_path}/run", "launch.nproc_per_node=1"]
    cards: list[dict[str, Any]] = [{"lost": True}, {"name": "NVIDIA A100"}]
    for visible in ("1", "GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus(*cards, visible=visible, wanted=1)["gpus"].status == OK
        with Nvml(*cards):
            assert detect_hardware(visible) == Hardware(
                detect_hardware("").cpus, 1, "NVIDIA A100", (9, 0), 140 * 2**30
            )
            assert prepare(PROGRAM, [*words, *DOCTOR], None).config.device == "cuda"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with Nvml(*cards):
        with pytest.raises(
            ConfigError, match="device=cuda: the driver cannot reach GPU 0: GPU is lost; reset it"
        ):
            prepare(PROGRAM, words, None)
        prepared = prepare(PROGRAM, [*words, *DOCTOR], None)
        found, findings = main.check_at_rest(prepared.config, several=False, under_torchrun=False)
    is_failure(findings[0], 70, "GPU 0: GPU is lost")
    assert found and [one.error for one in found.gpus] == ["GPU is lost", ""]
    with Nvml({"lost": True}):
        assert (
            detect_hardware(None).lost == detect_hardware("GPU-0").lost == ("GPU 0: GPU is lost",)
        )


def test_nvlink_is_seen_between_the_gpus_that_are_visible() -> None:
    apart: dict[str, Any] = {"p2p": pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY}
    with Nvml({}, {}, apart):
        assert [detect_hardware(visible).nvlink for visible in (None, "0,1", "1,2")] == [
            False,
            True,
            False,
        ]
        assert not detect_hardware("0").nvlink, "other processes see the others"
    with Nvml({}, {}):
        assert detect_hardware("0").nvlink and detect_hardware("GPU-1,GPU-0").nvlink
        assert not detect_hardware("MIG-1,MIG-2").nvlink, "parts of a GPU have no links"
    with Nvml({}):
        assert not detect_hardware(None).nvlink, "there is no other"
    with Nvml({}, {"lost": True}):
        assert (detect_hardware(None).gpus, detect_hardware(None).nvlink) == (2, False)
    with Nvml({}, {"links": 4}):
        assert not detect_hardware(None).nvlink, "a bridge"


def test_a_driver_that_does_not_count_its_gpus_has_none() -> None:
    with Nvml():
        assert detect_hardware(None).gpus == 0
        with pytest.raises(nvml.NoDriverError, match="Not Supported"):
            nvml.read_gpus(None)


def test_a_gpu_without_a_driver_is_a_failure_and_no_gpu_is_none(tmp_path: Path) -> None:
    def dead() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    with (
        mock.patch.object(pynvml, "nvmlInit", dead),
        pytest.raises(nvml.NoDriverError) as caught,
    ):
        nvml.read_gpus(None)
    assert gpu_checks.no_driver(caught.value, tmp_path).status == SKIPPED
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    is_failure(
        gpu_checks.no_driver(caught.value, tmp_path),
        70,
        "1 NVIDIA GPU on the PCI bus",
        "mismatch",
        "reboot",
    )


def test_clocks_under_load_are_compared() -> None:
    with Nvml({}, {"clock": 1200}, {"clock": 1300, "reasons": 0x20}, {}):
        loads = {f"rank {number}": nvml.read_load(str(number)) for number in range(4)}
    finding = gpu_checks.clocks(loads)
    is_warning(
        finding, "rank 2: too hot (driver)", "rank 1: 1200 MHz, the others 1600", "nvidia-smi"
    )
    assert gpu_checks.clocks({"rank 0": loads["rank 0"]}).detail == "1900 of 1980 MHz under load"
    assert gpu_checks.clocks({"rank 0": {}}).status == SKIPPED


# --- probes ---------------------------------------------------------------------------------------


def answers(count: int = 3, **changes: Any) -> list[collective_runner.RankResult]:
    """Of processes that are well; `changes` are those of the last one."""
    rows = [{"bytes": 2**20, "seconds": 1e-3}, {"bytes": 2**28, "seconds": 2**28 / 300e9}]
    made = []
    for rank in range(count):
        results = {
            "versions": {"python": "3", "torch": "2", "cuda": "13", "nccl": "2"},
            "cuda_available": True,
            "torch_cuda": "13.0",
            "compute": {"name": "NVIDIA H200", "seconds": 1.0, "no_peer_access": []},
            "exchange": {"wrong": [], "summed": True},
            "all_reduce": rows,
        }
        made.append(
            collective_runner.RankResult(
                rank,
                f"node{rank}",
                100 + rank,
                collective_stages.Stage.DONE,
                30.0,
                code=0,
                results=results,
            )
        )
    for name, value in changes.items():
        if name in ("stage", "stopped", "code", "error"):
            setattr(made[-1], name, value)
        else:
            made[-1].results[name] = value
    return made


def test_numbers_that_arrive_changed_fail() -> None:
    spoilt = answers(exchange={"wrong": [[1, 2]], "summed": True})
    is_failure(collective_checks.exchange(spoilt, "nccl"), 70, "corrupt: rank 1 to rank 2", "IOMMU")
    is_failure(
        collective_checks.exchange(answers(exchange={"wrong": [], "summed": False}), "nccl"),
        70,
        "corrupt: all-reduce",
    )
    blind = answers(compute={"name": "RTX", "seconds": 1.0, "no_peer_access": [0]})
    is_warning(collective_checks.exchange(blind, "nccl"), "no peer access: rank 2 to GPU 0")
    assert (
        collective_checks.exchange(blind, "gloo").status
        == collective_checks.exchange(answers(), "nccl").status
        == OK
    )


def test_who_keeps_the_others_waiting_is_named() -> None:
    behind = answers(stage=collective_stages.Stage.CONNECT, code=None)
    behind[0].stage = collective_stages.Stage.EXCHANGE
    behind[0].code = None
    is_failure(
        collective_checks.exchange(behind, "nccl"),
        71,
        "no progress for 30 s in stage 'connect': rank 2 on node2",
        "NCCL_DEBUG",
    )
    is_failure(collective_checks.exchange(behind, "gloo"), 71, "GLOO_SOCKET_IFNAME")
    assert collective_checks.hangs_in_nccl(behind, "nccl") and not collective_checks.hangs_in_nccl(
        behind, "gloo"
    )
    is_failure(
        collective_checks.exchange(behind, "nccl", answers()),
        71,
        "it works with NCCL_P2P_DISABLE=1",
        "ACS",
    )
    is_failure(collective_checks.exchange(behind, "nccl", behind), 71, "NCCL_SHM_DISABLE")
    died = answers(stage=collective_stages.Stage.CONNECT, code=-9)
    is_failure(
        collective_checks.exchange(died, "nccl"),
        70,
        "rank 2 on node2 died in stage 'connect' (signal 9)",
    )
    echo = answers(
        stage=collective_stages.Stage.EXCHANGE, code=1, error="RuntimeError: out of memory"
    )
    echo[0].stage = collective_stages.Stage.EXCHANGE
    echo[0].code = 1
    echo[0].error = "RuntimeError: Connection closed by peer"
    is_failure(collective_checks.exchange(echo, "gloo"), 70, "rank 2", "out of memory")
    assert not collective_checks.hangs_in_nccl(died, "nccl")


def test_a_slow_gpu_a_slow_link_and_a_torch_that_does_not_fit_are_named() -> None:
    slow = answers(compute={"name": "NVIDIA H200", "seconds": 1.3})
    is_warning(collective_checks.stragglers(slow), "rank 2 on node2 takes 1.30 times as long")
    assert (
        collective_checks.stragglers(answers(compute={"name": "cpu", "seconds": 1.3})).status == OK
    )
    nvlink = (478e9, "NVLink, 18 links")
    best = collective_checks.bandwidth(answers(), nvlink)
    assert best.status == OK and "84% of 478 GB/s (NVLink, 18 links)" in best.detail, best
    is_warning(collective_checks.bandwidth(answers(), (2 * 478e9, "NVLink")), "42% of 956 GB/s")
    assert (
        collective_checks.bandwidth(
            answers(stage=collective_stages.Stage.CONNECT, all_reduce=None)[:1], nvlink
        ).status
        == SKIPPED
    )
    on_gpus = dataclasses.replace(config(), device="cuda")
    old = answers(1, cuda_available=False)
    is_failure(
        collective_checks.torch_installation(old, on_gpus, (12, 4)),
        70,
        "supports CUDA up to 12.4",
        "update the driver",
    )
    is_failure(
        collective_checks.torch_installation(
            answers(1, cuda_available=False, torch_cuda=None), on_gpus, None
        ),
        70,
        "without CUDA",
    )
    nothing = [
        collective_runner.RankResult(
            0, "node0", 1, code=1, error="ModuleNotFoundError: No module named 'torch'"
        )
    ]
    is_failure(
        collective_checks.torch_installation(nothing, config(), None),
        70,
        "No module named 'torch'",
        "make train",
    )


def probes_of(launcher: int) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for pid in children_of(launcher):
        with contextlib.suppress(OSError):  # it ended in between
            variables = dict(
                part.partition(b"=")[::2]
                for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            )
            if b"ddp_lab.doctor.collective_test" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[int(variables[b"RANK"])] = pid
    return found


TALKER = """
import json, sys, time
for stage, seconds in json.loads(sys.argv[1]):
    print(json.dumps({"stage": stage}), flush=True)
    time.sleep(seconds)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages_and_seconds", "ends"),
    [
        (
            [
                (collective_stages.Stage.COMPUTE, 1.8),
                (collective_stages.Stage.CONNECT, 1.8),
                (collective_stages.Stage.DONE, 0),
            ],
            True,
        ),
        (
            [
                (collective_stages.Stage.EXCHANGE, 0.1),
                *[(collective_stages.Stage.MEASURE, 0.3)] * 4,
                (collective_stages.Stage.DONE, 0),
            ],
            True,
        ),
        ([(collective_stages.Stage.EXCHANGE, 60)], False),
        ([(collective_stages.Stage.CONNECT, 60)], False),
    ],
)
def test_a_probe_stands_still_when_it_says_nothing_for_longer_than_its_stage_takes(
    stages_and_seconds: list[tuple[str, float]], ends: bool, tmp_path: Path
) -> None:
    """One second in stages that exchange, three to compute and to connect."""
    with (
        mock.patch.object(collective_runner, "PATIENCE_SECONDS", 1.0),
        mock.patch.object(collective_runner, "START_SECONDS", 1.5),
    ):
        limits = collective_runner.silence_limits(config(), 3, several=False) | {
            collective_stages.Stage.IMPORT: 60.0
        }
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER, json.dumps(stages_and_seconds)], stdout=subprocess.PIPE
    )
    probe = collective_runner.RankProcess(
        process, collective_runner.RankResult(0, "here", process.pid), tmp_path / "errors"
    )
    collective_runner.watch([probe], limits)
    collective_runner.kill_all([probe])
    assert (probe.result.code, probe.result.stage) == (
        (0, collective_stages.Stage.DONE) if ends else (None, stages_and_seconds[0][0])
    )
    assert ends or probe.result.seconds > limits[probe.result.stage]


def test_patience_grows_with_the_world_and_ends_with_that_of_a_run() -> None:
    few, many = (
        collective_runner.silence_limits(config(), size, several=True) for size in (3, 2048)
    )
    assert (
        many[collective_stages.Stage.CONNECT] > few[collective_stages.Stage.CONNECT] + 1000
        and many[collective_stages.Stage.EXCHANGE] == few[collective_stages.Stage.EXCHANGE] == 20
    )
    hasty = collective_runner.silence_limits(
        config(launch={"timeout_seconds": 2.0}), 3, several=False
    )
    assert (
        hasty[collective_stages.Stage.COMPUTE]
        == hasty[collective_stages.Stage.CONNECT]
        == hasty[collective_stages.Stage.EXCHANGE]
        == 2
        < hasty[collective_stages.Stage.IMPORT]
    )


def test_a_probe_says_that_it_measures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        row = collective_test.measure(2**16, "cpu")
    finally:
        dist.destroy_process_group()
    words = capfd.readouterr().out.splitlines()
    assert (
        row["bytes"] == 2**16
        and words == ['{"stage": "all-reduce"}'] * collective_stages.REPORTS_PER_SIZE
    )
    assert all(
        len(sizes) == collective_stages.NUM_SIZES for sizes in collective_test.SIZES.values()
    )


@pytest.mark.slow
def test_a_process_that_is_stopped_is_a_finding_and_nobody_hangs(tmp_path: Path) -> None:
    with running(
        tmp_path / "run", *DOCTOR, "launch.nproc_per_node=3", "launch.timeout_seconds=2"
    ) as job:
        wait_until(lambda: len(probes_of(job.process.pid)) == 3, "three probes")
        pids = probes_of(job.process.pid)
        os.kill(pids[1], signal.SIGSTOP)
        assert job.end() == 71, job.said()
        assert not any(state_of(pid) for pid in pids.values()), "a probe was left behind"
    (finding,) = [
        f for f in read(job.run_dir, "doctor.json")["findings"] if f["check"] == "exchange"
    ]
    assert f"rank 1 on {os.uname().nodename} (process {pids[1]}, in stage" in finding["detail"]
    assert "is stopped" in finding["detail"]


@pytest.mark.slow
def test_one_host_that_is_well(tmp_path: Path) -> None:
    """In a folder where a run has been: what that left is not touched."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text("{}")
    done = run(*DOCTOR, f"run_dir={tmp_path}/run", "launch.nproc_per_node=3")
    assert done.returncode == 0, done.stdout + done.stderr
    said = read(tmp_path / "run", "doctor.json")
    status = {finding["check"]: finding["status"] for finding in said["findings"]}
    assert (
        said["counts"][FAILURE] == 0
        and status["exchange"] == status["all-reduce"] == status["torch"] == OK
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "doctor.json",
        "summary.json",
    ]
    assert "| exchange" in done.stdout.replace(
        "│", "|"
    ) and f"report {tmp_path}/run/doctor.json" in done.stdout.replace("\n", "")
    sizes = next(f["numbers"]["sizes"] for f in said["findings"] if f["check"] == "all-reduce")
    assert [row["bytes"] for row in sizes] == [2**16, 2**20, 2**24] and all(
        row["seconds"] > 0 for row in sizes
    )


@pytest.mark.slow
def test_a_sweep_of_doctors_is_refused() -> None:
    done = run("-m", *DOCTOR, "seed=1,2")
    assert done.returncode == 2 and "mode=doctor: cannot be swept" in done.stderr


# --- several hosts --------------------------------------------------------------------------------


def facts(count: int = 3, **changes: Any) -> dict[int, dict[str, Any]]:
    """Of hosts that are alike; `changes` are those of the last one."""
    versions = {"python": "3.12.1", "torch": "2.11.0", "driver": "575.1"}
    made = {
        n: {"host": f"node{n}", "argv": ["seed=1"], "versions": dict(versions), "data": "abc"}
        for n in range(count)
    }
    made[count - 1] |= {name: value for name, value in changes.items() if name != "version"}
    made[count - 1]["versions"] |= changes.get("version", {})
    return made


def test_hosts_that_differ_are_named_with_both_values() -> None:
    versions = facts(version={"torch": "2.15.0", "driver": "550.2"})
    differ = HostComparison(versions, 3).versions()
    is_failure(differ, 69, "torch: node0 2.11.0, node1 2.11.0, node2 2.15.0", "driver: node0 575.1")
    overrides = HostComparison(facts(argv=["seed=2"]), 3).overrides()
    is_failure(overrides, 2, "seed=1 on rank 0 (node0), seed=2 on rank 2 (node2)")
    other_data = HostComparison(facts(data="xyz"), 3).data("mnist")
    is_failure(other_data, 65, "node1 abc, node2 xyz")
    no_data = HostComparison(facts(data=""), 3).data("image_folder")
    is_failure(no_data, 65, "node1 abc, node2 none")


def compared(everybody: dict[int, dict[str, Any]], count: int) -> list[Finding]:
    """The findings about hosts that do not differ, and whose clocks agree."""
    offsets = {number: 0.0 for number in everybody if number}
    return HostComparison(everybody, count).findings(offsets, "mnist")


def test_hosts_are_alike_only_as_far_as_they_answer() -> None:
    for finding in compared(facts(3), 3):
        assert finding.status == OK and "all 3 hosts" in finding.detail, finding
    for finding in compared(facts(2), 3):
        assert finding.status == OK and "2 of 3 hosts" in finding.detail, finding
    for finding in compared(facts(1), 2):
        assert finding.status == SKIPPED and finding.detail == "only one host answers", finding


def test_data_of_which_nothing_was_compared_are_not_the_same() -> None:
    own = config(data={"name": "custom", "target": "my.Data"})
    made = config()
    for one, why in ((own, "known only to its own code"), (made, "digits: no files to compare")):
        everybody = facts(3)
        for number in everybody:
            everybody[number]["data"] = host_checks.data_digest(one)
        finding = HostComparison(everybody, 3).data(one.data.name)
        assert finding.status == SKIPPED and why in finding.detail, finding


def test_clocks_that_are_off_are_named() -> None:
    hosts = HostComparison(facts(), 3)
    is_failure(hosts.clocks({1: 0.1, 2: -60.0}), 69, "node2 -60.0 s", "chrony")
    is_warning(hosts.clocks({1: 0.1, 2: 2.0}), "node2 +2.0 s")
    is_warning(hosts.clocks({1: 0.1}), "no answer about the clock from node2")
    assert hosts.clocks({1: 0.1, 2: -0.2}).status == OK


def test_a_host_that_cannot_be_reached_is_named() -> None:
    with multihost_checks.listening() as place, socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        others = facts(address="127.0.0.1", port=port)
        others[0] |= {"address": "", "port": 1}
        others[1] |= place
        nowhere = multihost_checks.connections(others, 1)
        is_failure(nowhere, 69, "node0 (:1): it has no address", "ip_local_port_range")
        assert "node2" not in nowhere.detail
    is_failure(
        multihost_checks.connections(others, 0), 69, f"node2 (127.0.0.1:{port}): Connection refused"
    )


def test_hosts_that_drop_packets_are_tried_at_the_same_time() -> None:
    with (
        socket.socket() as full,
        contextlib.ExitStack() as stack,
        mock.patch.object(multihost_checks, "CONNECT_SECONDS", 0.5),
    ):
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # from then on the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        everybody = {
            number: {"host": f"node{number}", "address": "127.0.0.1", "port": full.getsockname()[1]}
            for number in range(41)
        }
        began = time.monotonic()
        finding = multihost_checks.connections(everybody, 0)
        assert time.monotonic() - began < 40 * 0.5 / 4
    is_failure(finding, 69, "node1 (127.0.0.1", "timed out", "node40 (127.0.0.1")


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
def test_other_hosts_wait_longer_for_host_0_than_it_waits_for_them(size: int) -> None:
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


def test_host_0_speaks_although_the_other_host_is_silent(tmp_path: Path) -> None:
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
def test_what_is_wrong_between_three_hosts_is_found_at_once(three_hosts: Examined) -> None:
    found = three_hosts.of("node2")
    is_failure(found["shared run_dir"], 69, "written by host 0, is not visible here")
    is_failure(found["clocks"], 69, "node2 +40.0 s")
    is_failure(found["config"], 2, "seed=0 on rank 0 (node0), seed=7 on rank 2 (node2)")
    is_warning(found["all-reduce"], "of 1.25 GB/s (eth0, 10 Gbit/s)")


@on_linux_as_root
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")
def test_what_is_well_between_three_hosts_is_left_in_peace(three_hosts: Examined) -> None:
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
