"""Processes under Linux, by prctl and /proc: parent death, orphans, states, memory, processor.

Torch-free.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even of SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_loader_with_parent(_worker: int) -> None:
    """The `worker_init_fn` of DataLoaders: ends a loader process with its rank.

    torch's own watchdog polls every five seconds, and polls the wrong process if multiprocessing's
    fork server is the parent (the default from Python 3.14 on).
    """
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent and parent.pid and state_of(parent.pid) in ("", "Z"):  # it died before the call above
        os._exit(1)
    if parent and parent.pid != os.getppid():
        threading.Thread(target=_end_after, args=[parent], daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the subreaper of its descendants, and kill what is left at the end.

    A descendant whose parent dies becomes a child of this process. There is no other way to find
    processes that left their session, such as a daemon that the user's code started.
    """
    before = set(children_of(os.getpid()))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_children(before)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_children(keep: set[int]) -> None:
    """Kill all children of this process, and all descendants that it adopts.

    keep: process ids of children that stay.
    """
    while True:
        others = set(children_of(os.getpid())) - keep
        if not others:
            return
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            remove_shared_memory(pid)


def remove_shared_memory(pid: int) -> None:
    """Remove the shared memory of a process that is gone.

    torch opens the file of a tensor under the process's name, and removes it at once, unless the
    process is killed in between.
    """
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):  # somebody else's, in another namespace of process ids
            left.unlink()


def keep_exit_codes() -> None:
    """Undo an ignored SIGCHLD, which a parent hands on (`trap '' CHLD`).

    The kernel would forget how children end.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def state_of(pid: int) -> str:
    """The state letter of a process (man 5 proc): R, S, D, T (stopped), t (traced), Z ...

    Empty if it is unknown.
    """
    fields = _fields(pid)
    return fields[0] if fields else ""


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal as os.kill does, but no other thread can take it.

    A stopped process handles it first when it continues.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc 2.30
        libc.tgkill(pid, pid, number)
    else:
        os.kill(pid, number)


def resident_bytes() -> int:
    """Resident memory of this process; 0 without /proc."""
    try:
        fields = os.pread(_memory_file(os.getpid()), 100, 0).split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    # other code may have closed the file, and opened another
    except (OSError, ValueError, IndexError):
        return 0


@functools.cache
def _memory_file(pid: int) -> int:
    """The descriptor of this process's memory file, opened once in each process.

    Opening it takes 40 us between two steps, where caches hold other things. pid: of this process;
    /proc may be that of another PID namespace, so the path does not name it.
    """
    return os.open("/proc/self/statm", os.O_RDONLY)


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has killed since boot; 0 if it is unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def children_of(pid: int) -> list[int]:
    """Process ids of the children; empty without /proc."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(folder.name))
        if fields and fields[1] == str(pid):
            children.append(int(folder.name))
    return children


def command_of(pid: int) -> bytes:
    """The command line of a process, as /proc has it; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def start_time(pid: int) -> float:
    """When a process started, in seconds since the epoch; the current time if it is unknown."""
    fields = _fields(pid)
    if not fields:
        return time.time()
    lines = Path("/proc/stat").read_text().splitlines()
    boot = next(line for line in lines if line.startswith("btime"))
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def set_title(argv: list[str]) -> None:
    """Set the command line that `ps` shows for this process, cut to the original's length."""
    fields = _fields(os.getpid())
    if len(fields) <= 46:
        return
    # arg_start and arg_end (man 5 proc): the kernel reads the command line there
    start = int(fields[45])
    end = int(fields[46])
    title = os.fsencode("\0".join(argv))[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone.

    The name before them may contain any character.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def wait_until(condition: Callable[[], object], seconds: float, poll_seconds: float = 0.02) -> bool:
    """Wait until a condition holds, `seconds` at most. Returns whether it does.

    The condition is asked once at least.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_seconds)
    return True


def processor_name() -> str:
    """The model of the processor; its architecture if the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"model name\s*: (.*)", info.read_text())
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()
