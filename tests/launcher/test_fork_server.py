"""A forked worker finds what one finds that starts as a new interpreter, and does not depend on the
fork server."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddp_train.launcher import fork_server
from ddp_train.launcher.fork_server import ForkServer, WorkerSpec
from ddp_train.linux import adopting_orphans, children_of
from tests.support import zygote
from tests.support.commands import (
    ENDLESS,
    LAUNCH,
    ROOT,
    THREE,
    environment,
    processes_of,
    read,
    run,
    running,
    server_of,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)  # the machine may be busy

FACTS = '''
import collections
import gc
import json
import logging
import multiprocessing.spawn
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_info
from torch import nn

FORKED = any("fork_server" in word for word in sys.orig_argv)


def kind(descriptor):
    """What an open file is, without the numbers that are its own."""
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the status board's thread had it open for a moment
        return "closed"
    return name.split(":")[0] if ":" in name else name.replace(f"/{os.getpid()}/", "/self/")


class Net(nn.Module):
    """Writes down what it finds in its process."""

    def __init__(self, folder="", spawn=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        main = sys.modules["__main__"]
        open_files = [entry for entry in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{entry}").exists()]
        common = {
            "environment": {name: value for name, value in os.environ.items()
                            if name not in ("RANK", "LOCAL_RANK", "MASTER_PORT", "DDP_TRAIN_LAUNCHER_PID",
                                            "PYTEST_CURRENT_TEST")},
            "arguments": sys.argv[1:2],
            "path": sys.path,
            "directory": os.getcwd(),
            "main": [main.__spec__.name, Path(main.__file__).name],
            "what it would spawn": [value for name, value in multiprocessing.spawn.get_preparation_data("it").items()
                                    if name.startswith("init_main")],
            "torch threads": torch.get_num_threads(),
            "BLAS threads": [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"],
            "garbage collection": gc.isenabled(),
            "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
            "open": collections.Counter(kind(entry) for entry in open_files) - collections.Counter(closed=99),
            "leads its session": os.getsid(0) == os.getpid(),
            "command line": Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").split(b"\\0")[1:5] == [
                b"-P", b"-m", b"ddp_train.runs.worker", sys.argv[1].encode()],
            "logging": [type(handler).__name__ for handler in logging.root.handlers],
            "random": torch.initial_seed(),
        }
        own = {
            "numpy": float(np.random.rand()),
            "temporary": tempfile.mktemp(),
            "pid": os.getpid(),
            "parent": os.getppid(),
        }
        text = json.dumps({"forked": FORKED, "common": common, "own": own})
        Path(folder, os.environ["RANK"]).write_text(text)
        if spawn and os.environ["RANK"] == "0":  # as loader processes are started, by Python 3.14 for one
            with multiprocessing.get_context("forkserver").Pool(1) as pool:
                assert pool.apply(abs, (-1,)) == 1

    def forward(self, images):
        return self.layers(images)
'''


def facts_of(folder: Path, *words: str, spawn: bool = False) -> list[dict[str, Any]]:
    """What each rank found, in a run that must succeed."""
    (folder / "facts.py").write_text(FACTS)
    written = folder / f"facts_{len(list(folder.iterdir()))}"
    written.mkdir()
    done = run(
        "model._target_=facts.Net",
        f"+model.folder={written}",
        f"+model.spawn={spawn}",
        "trusted_modules=[facts]",
        "launch.threads_per_process=2",
        "data.limit=200",
        "train.max_steps=2",
        "tuning.num_workers=1",
        "launch.nproc_per_node=2",
        f"run_dir={folder}/run",
        "checkpoint.resume=never",
        *words,
        env={"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    assert read(folder / "run", "summary.json")["steps"] == 2
    return [json.loads((written / str(rank)).read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("facts")


@pytest.fixture(scope="module")
def forked(place: Path) -> list[dict[str, Any]]:
    """What the forked workers of a real command found."""
    with mock.patch.object(zygote, "_fits", return_value=False):
        return facts_of(place)


@pytest.mark.slow
@pytest.mark.true_command
def test_a_forked_worker_finds_what_a_new_interpreter_finds(
    place: Path, forked: list[dict[str, Any]]
) -> None:
    fresh = facts_of(place, "launch.fork_server=false")
    assert [facts["forked"] for facts in forked + fresh] == [True] * 2 + [False] * 2
    for one, other in zip(forked, fresh, strict=True):
        assert one["common"] == other["common"]
        assert one["common"]["torch threads"] == 2
    for name in ("numpy", "temporary", "pid"):
        assert len({facts["own"][name] for facts in forked}) == 2, f"{name} is shared"
    assert len({facts["own"]["parent"] for facts in forked}) == 1, (
        "all are children of the launcher"
    )


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.true_command
def test_a_forked_worker_spawns_processes(place: Path) -> None:
    assert facts_of(place, spawn=True)[0]["forked"]


@pytest.mark.slow
def test_a_worker_of_the_zygote_finds_what_a_real_one_finds(
    place: Path, forked: list[dict[str, Any]]
) -> None:
    """See tests/support/zygote.py."""
    for one, other in zip(facts_of(place), copy.deepcopy(forked), strict=True):
        for facts in (one, other):  # the zygote has also loaded scikit-learn's BLAS
            facts["common"]["BLAS threads"] = set(facts["common"]["BLAS threads"])
            for name in (
                "KMP_DUPLICATE_LIB_OK",
                "KMP_INIT_AT_FORK",
                "TORCHINDUCTOR_CACHE_DIR",
            ):  # set by imports
                facts["common"]["environment"].pop(name, None)
        assert one["common"] == other["common"] and one["forked"] == other["forked"]


def test_a_server_with_threads_forks_nothing() -> None:
    """What it looks at: `test_a_process_with_cuda_or_threads_is_not_forked`."""
    with (
        mock.patch.object(fork_server, "unfit", return_value="it has 2 threads"),
        mock.patch.object(fork_server.log, "debug") as said,
        adopting_orphans(),
    ):
        server = ForkServer(ROOT, changed={})
        assert server.fork([SPEC], given_up=lambda: False) == []
    text, reason = said.call_args.args
    assert text.endswith("the fork server failed: %s") and str(reason) == "it has 2 threads"


@pytest.mark.slow
def test_a_run_continues_without_its_fork_server(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE, "launch.max_restarts=1") as job:
        job.wait_for_step()
        before = job.workers()
        os.kill(server_of(job.process.pid), signal.SIGKILL)
        time.sleep(0.3)
        assert job.process.poll() is None and job.workers() == before and job.said() == ""
        os.kill(before[1], signal.SIGKILL)
        wait_until(
            lambda: (
                len(job.workers()) == 3 and not set(job.workers().values()) & set(before.values())
            ),
            "restart",
        )
        said = "restarting (1 of 1 restarts), from step"
        wait_until(lambda: said in job.said(), said)
        job.process.terminate()
        assert job.end() in (75, 143), job.said()
        assert processes_of(job.run_dir) == {}


def carrying(mark: str) -> list[int]:
    """Processes that were started with this in their environment, and what they forked."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended in between
            continue
    return found


@pytest.mark.slow
@pytest.mark.true_command
def test_fork_server_ends_with_its_launcher(tmp_path: Path) -> None:
    env = {"FORK_SERVER_TEST": str(tmp_path)}
    assert run("train.epochs=0", env=env).returncode == 2
    assert carrying(str(tmp_path)) == []
    with subprocess.Popen(
        [*LAUNCH, f"run_dir={tmp_path}/run"], cwd=ROOT, env=environment(env)
    ) as launcher:
        wait_until(lambda: len(carrying(str(tmp_path))) == 2, "fork server")
        launcher.kill()  # long before torch is imported
    wait_until(lambda: not carrying(str(tmp_path)), "end of the fork server", seconds=10)


INTERRUPTED_FORK = """
import os, signal
from ddp_train.launcher.fork_server import ForkServer

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    ForkServer(None, changed={})
    print("lost")
except KeyboardInterrupt:
    print("heard")
"""


def test_ctrl_c_during_the_fork_of_a_server_is_not_lost() -> None:
    """Python drops what is raised while it calls the functions that are registered for a fork."""
    command = [sys.executable, "-c", INTERRUPTED_FORK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "heard\n", done.stderr


@pytest.mark.slow
@pytest.mark.true_command
def test_a_stop_is_obeyed_while_torch_is_imported(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_file("config.yaml")
        began = time.monotonic()
        job.process.terminate()
        assert job.end() in (-signal.SIGTERM, 143)  # the former between config and launcher
        assert time.monotonic() - began < 3, "which importing torch takes at least"
        assert not any((job.run_dir / "logs").iterdir()), "no worker has begun"
        assert processes_of(job.run_dir) == {}


JOINED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "1",
}
SPEC = WorkerSpec(["/no/such/run", "rank=0"], environment(JOINED), {})


def test_shared_memory_of_orphans_that_are_killed_goes() -> None:
    """A loader process that dies between the opening of a tensor's file and its removal leaves the
    file."""
    with adopting_orphans():
        orphan = subprocess.Popen(["sleep", "60"])
        left = Path(f"/dev/shm/torch_{orphan.pid}_1_0")
        others = Path(f"/dev/shm/torch_{orphan.pid}0_1_0")
        left.touch()
        others.touch()
    assert not left.exists() and others.exists()
    others.unlink()
    assert orphan.poll() is not None


@pytest.fixture
def forked_server(forked_trials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not import torch, but comes from the zygote, which has none of the GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_server")
def test_what_ends_a_forked_worker_is_known(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "config.yaml")  # without a writer: a worker that reads it blocks
    server = ForkServer(ROOT)
    try:
        with adopting_orphans():
            reading, writing = os.pipe()
            spec = WorkerSpec(SPEC.arguments, SPEC.environment, {"ANY": writing})
            workers = server.fork([spec] * 3, given_up=lambda: False)
            assert [worker.wait() for worker in workers] == [73, 73, 73]
            os.close(writing)
            assert os.read(reading, 1) == b"", (
                "a forked worker, or the server, still holds a file it was given"
            )
            os.close(reading)
            error = capfd.readouterr().err
            assert error.count("FATAL write (rank 0 on ") == 3 and "Traceback" not in error
            waiting = WorkerSpec([str(tmp_path)], SPEC.environment, {})
            (worker,) = server.fork([waiting], given_up=lambda: False)
            worker.send_signal(signal.SIGKILL)
            assert worker.wait() == worker.poll() == -signal.SIGKILL
            worker.send_signal(signal.SIGKILL)  # not delivered: the process id may be in use again
    finally:
        server.close()


@pytest.mark.true_command
def test_a_server_that_cannot_be_used_forks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(server: ForkServer, stopped: bool = False) -> int:
        began = time.monotonic()
        try:
            return len(server.fork([SPEC], given_up=lambda: stopped))
        finally:
            server.close()
            assert time.monotonic() - began < 1

    assert forked(ForkServer(ROOT), stopped=True) == 0
    killed = ForkServer(ROOT)
    os.kill(server_of(os.getpid()), signal.SIGKILL)
    assert forked(killed) == 0
    elsewhere = ForkServer(ROOT)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert forked(elsewhere) == 0
    other = ForkServer(ROOT)
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    assert forked(other) == 0
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert forked(ForkServer(ROOT)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_server")
def test_workers_that_the_server_could_not_report_are_ended(tmp_path: Path) -> None:
    """The answer is lost after the forks. The workers block on their config, which is a pipe
    without a writer."""
    os.mkfifo(tmp_path / "config.yaml")
    spec = WorkerSpec([str(tmp_path), "rank=0"], SPEC.environment, {})
    server = ForkServer(ROOT)
    seen = set()

    def lost(*_: object) -> None:
        wait_until(lambda: len(processes_of(tmp_path)) == 3, "three workers", seconds=5)
        seen.update(processes_of(tmp_path))
        raise OSError("cut off")

    with adopting_orphans(), mock.patch("ddp_train.launcher.fork_server._receive", lost):
        before = set(children_of(os.getpid())) - {server_of(os.getpid())}
        assert server.fork([spec] * 3, given_up=lambda: False) == []
        assert len(seen) == 3 and processes_of(tmp_path) == {}
        assert set(children_of(os.getpid())) == before


UNFIT = """
import threading
import torch
from ddp_train.launcher.fork_server import unfit
said = [unfit()]
torch.cuda.is_initialized = lambda: True
said.append(unfit())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print([*said, unfit()])
# The zygote forks scripts that have this word, from a process with one thread: ddp_train.session()
"""


def test_a_process_with_cuda_or_threads_is_not_forked(tmp_path: Path) -> None:
    script = tmp_path / "unfit.py"
    script.write_text(UNFIT)
    done = run(command=[sys.executable, str(script)])
    assert done.stdout == "['', 'CUDA is initialized in it', 'it has 2 threads']\n", done.stderr
