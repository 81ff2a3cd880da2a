"""What every test gets, what none may leave behind, and the order in which they run."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import zygote
from tests.support.zygote import ROOT

LEAVE_SECONDS = 5.0
"""For what is ending when a test is over."""
SET_BY_IMPORTS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_", "TRITON_")
SET_BY_LIBRARIES = {signal.SIGALRM, signal.SIGCHLD}
"""pytest-timeout's, and for good that of torch's DataLoader with processes."""
SIGNALS = sorted(signal.valid_signals() - SET_BY_LIBRARIES)
CACHES = {".pytest_cache", ".ruff_cache", ".hypothesis", "__pycache__", "build"}
"""Ignored by git. build/ holds SLURM's packages, which tests/support/slurmlab.py unpacks once."""


def pytest_configure() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, nohup a terminal that closes, and
    so would all commands of the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Test processes are forked from one that has imported torch, and do not import it themselves:
    tests/support/zygote.py. On a host with GPUs they do: a process that had been asked for GPUs
    could not hand them on."""
    if not Path("/dev/nvidiactl").exists():
        subprocess.Popen = zygote.Command  # type: ignore[misc]  # pyright: ignore


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported stays: to search it for garbage again and again took a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Triton calls what is frozen at the end a leak, in fifty lines for each process."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a module's fixture run in one process (`--dist loadgroup`); they come first,
    then slow ones, those of all files mixed: many of one file wait at a time, or compute."""
    for item in items:
        shared = [
            name
            for name, found in item._fixtureinfo.name2fixturedefs.items()  # type: ignore[attr-defined]
            if found[-1].scope == "module" and found[-1].baseid
        ]
        if shared:
            values = [f"{name}={value}" for name, value in _parameters(item) if name in shared]
            item.add_marker(pytest.mark.xdist_group(":".join([item.path.stem, *values])))
    items.sort(key=_place)  # of equal places the order stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist passes a group on in a test's id. If it does not, shared fixtures are made in
    every process."""
    if getattr(session.config.option, "loadgroup", False):
        lost = [
            item.nodeid
            for item in session.items
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
        ]
        assert not lost, f"pytest-xdist does not see the group of {lost[0]}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop() -> Iterator[object]:
    """Before the first test, which may start threads: see tests/support/ranks.py.

    torch computes with one thread in this process: two wait for each other in each small operation,
    and longest where other tests keep the cores busy (a file of tests took 46 CPU-s, and 9).
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.server.start()
    return (yield)


def _parameters(item: pytest.Item) -> list[tuple[str, Any]]:
    return sorted(item.callspec.params.items()) if hasattr(item, "callspec") else []  # type: ignore[attr-defined]


def _place(item: pytest.Item) -> tuple[int, int]:
    is_slow = item.get_closest_marker("slow") is not None
    if item.get_closest_marker("xdist_group"):
        return 0 if is_slow else 1, 0
    if is_slow:
        return 2, zlib.crc32(item.nodeid.encode())  # alike in all test processes
    return 3, 0


# --- what is left behind --------------------------------------------------------------------------


def children() -> set[int]:
    """Of this process, but for the servers that all tests share."""
    pids = {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in _read(task / "children").split()
    }
    tracker = multiprocessing.resource_tracker._resource_tracker
    servers = {zygote.zygote_pid(), tracker._pid}  # type: ignore[attr-defined]
    if ranks := sys.modules.get("tests.support.ranks"):
        servers.add(ranks.server.pid)
    return pids - servers


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread or process has ended
        return ""


def surroundings() -> dict[str, Any]:
    """What a test may change while it runs, by name."""
    found: dict[str, Any] = {
        "working directory": os.getcwd(),  # noqa: PTH109
        "environment": {
            n: value for n, value in os.environ.items() if not n.startswith(SET_BY_IMPORTS)
        },
        "signal handlers": {number: signal.getsignal(number) for number in SIGNALS},
        "threads": {thread for thread in threading.enumerate() if not thread.daemon},
        "child processes": children(),
        "files": {path.name for path in ROOT.iterdir()} - CACHES,
        "runs": {path.name for path in (ROOT / "runs").iterdir()}
        if (ROOT / "runs").is_dir()
        else set(),
    }
    if torch := sys.modules.get("torch"):
        found["torch.are_deterministic_algorithms_enabled"] = (
            torch.are_deterministic_algorithms_enabled()
        )
        found["torch.get_default_dtype"] = torch.get_default_dtype()
        found["torch.get_num_threads"] = torch.get_num_threads()
    return found


def leaks(before: dict[str, Any], tmp_path: Path | None, earlier: set[int]) -> dict[str, Any]:
    """What differs, by name; of sets only what was added.

    earlier: the processes that there were before the test.
    """
    found: dict[str, Any] = {}
    for name, now in surroundings().items():
        then = before.get(name, now)
        if isinstance(now, set) and now - then:
            found[name] = now - then
        elif isinstance(now, dict) and now != then:
            found[name] = {
                key: (then.get(key), now.get(key))
                for key in {**then, **now}
                if then.get(key) != now.get(key)
            }
        elif not isinstance(now, set) and now != then:
            found[name] = (then, now)
    for pid in found.get("child processes", set()).copy():
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:  # it had ended
                found["child processes"].remove(pid)
    if not found.get("child processes", True):
        del found["child processes"]
    if tmp_path and (left := commands_of(tmp_path, processes() - earlier)):
        found["processes"] = left
    return found


def processes() -> set[int]:
    """All of this machine: to read what each of them is takes longer than most tests."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208


def commands_of(folder: Path, pids: set[int]) -> list[str]:
    """Command lines of processes, of whatever parent and session, that name the folder of a
    test."""
    lines = [_read(Path(f"/proc/{pid}/cmdline")).rstrip("\0") for pid in sorted(pids)]
    return [line.replace("\0", " ") for line in lines if str(folder) in line]


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails that leaves a process, a thread, a file in the repository, or changed state of
    this process.

    What a fixture of its module started is not its own: it is looked at after those are made.
    """
    before, earlier = surroundings(), processes()
    yield
    tmp_path = (request.node.funcargs or {}).get("tmp_path")  # None after Ctrl-C
    deadline = time.monotonic() + LEAVE_SECONDS
    while (found := leaks(before, tmp_path, earlier)) and time.monotonic() < deadline:
        if not {"child processes", "processes", "threads"} & set(found):
            break  # it will not go away
        time.sleep(0.05)
    if "working directory" in found:
        os.chdir(before["working directory"])  # the tests that follow are not to blame
    assert not found, f"left behind: {found}"


@pytest.fixture(autouse=True)
def true_command(leaves_nothing: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """The marker of this name: `run` and `running` start new interpreters, and do not use the
    zygote."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("true_command"):
            patch.setattr(zygote, "_fits", lambda _: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def composed_once() -> Iterator[None]:
    """See tests/support/configs.py."""
    from ddp_train.config import composition, preset_checks
    from tests.support import configs

    with pytest.MonkeyPatch.context() as patch:
        for module in (composition, preset_checks):
            patch.setattr(module, "compose_options", configs.composed_once)
        yield


@pytest.fixture
def folder_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working folder, and the messages of a host without GPUs wherever tests run."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of studies that are made in this process come from the zygote too."""
    zygote.start()
    monkeypatch.setattr(subprocess, "Popen", zygote.Command)
