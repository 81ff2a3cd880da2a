"""What Linux knows about processes and does for them: ends, orphans, states, memory. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def end_with_parent() -> None:
    """Linux ends this process when the one that started it dies, even by SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_loader_with_parent(_worker: int) -> None:
    """The `worker_init_fn` of DataLoaders. torch's own watch looks only every five seconds, and at the wrong process
    where a fork server of multiprocessing stands in between, as by default from Python 3.14 on."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent and parent.pid and state_of(parent.pid) in ("", "Z"):  # it died before we could ask
        os._exit(1)
    if parent and parent.pid != os.getppid():
        threading.Thread(target=_end_after, args=[parent], daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Whatever is started inside, by whomever, becomes a child of this process when its own parent dies; at the end it
    is killed. Processes that left their session (a daemon of the user's code) are found in no other way."""
    before = set(children_of(os.getpid()))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_children(before)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_children(but: set[int]) -> None:
    """Kills all children of this process but these, and those that it adopts from them."""
    while others := set(children_of(os.getpid())) - but:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def state_of(pid: int) -> str:
    """The letter of the kernel (man 5 proc): R, S, D, T for stopped, Z; empty where it cannot be known."""
    fields = _fields(pid)
    return fields[0] if fields else ""


def signal_main_thread(pid: int, number: int) -> None:
    """Like os.kill, but no other thread may take the signal: a stopped process handles it before all else."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc 2.30
        libc.tgkill(pid, pid, number)
    else:
        os.kill(pid, number)


def resident_bytes() -> int:
    """The memory that this process holds."""
    with contextlib.suppress(OSError):  # no /proc
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def children_of(pid: int) -> list[int]:
    """Process ids; empty where there is no /proc."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [child for child in pids if (fields := _fields(child)) and fields[1] == str(pid)]


def started(pid: int) -> float:
    """When a process started, in seconds since the epoch; now, where it cannot be known."""
    fields = _fields(pid)
    if not fields:
        return time.time()
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def set_title(words: list[str]) -> None:
    """What `ps` shows as the command line of this process, from now on; cut where the one it was started with ended."""
    fields = _fields(os.getpid())
    if len(fields) > 46:  # arg_start and arg_end (man 5 proc), the words being there where the kernel reads them
        start, end = int(fields[45]), int(fields[46])
        title = "\0".join(words).encode()[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on: the name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
