"""The Python stacks of a host's workers and of their loader processes, which each writes when it is
sent SIGUSR2. Torch-free."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_train.linux import children_of, command_of, signal_main_thread, state_of, wait_until
from ddp_train.resilience.heartbeat import RankStatus

STACK_SECONDS = 1.0
"""How long the workers have to write their stacks."""
STACK_POLL_SECONDS = 0.05
STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a network file system",
}
"""Why a process runs no code, by its state."""
STOPPED = f"the process is {STATES['T']}"
"""The reason of a hang that a signal has made."""
PACKAGE = str(Path(__file__).parent.parent)


def stack_file(run_dir: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks, on SIGUSR2 and on a fault (SIGSEGV, SIGABRT
    ...)."""
    return run_dir / "logs" / f"rank_{rank}.stack"


def show_stacks(run_dir: Path, rank: int) -> None:
    """Register faulthandler for SIGUSR2 and for faults.

    It writes the stacks of all threads from C code, which needs neither Python's lock nor a
    responsive main thread.
    """
    file = stack_file(run_dir, rank).open("w")  # faulthandler keeps it open
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file)


def remove_empty_stacks(run_dir: Path, rank: int) -> None:
    """Remove a stack file to which nothing was written, at the end of a run."""
    file = stack_file(run_dir, rank)
    with contextlib.suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()


def request_stacks(run_dir: Path, pids: dict[int, int]) -> None:
    """Let workers write their stacks, and continue those that were stopped.

    Returns when all have, after STACK_SECONDS at most.

    pids: process ids by rank. Each must have called `show_stacks`, or the signal would kill it.
    """
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            signal_main_thread(pid, signal.SIGUSR2)
            os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: all(working_stack(run_dir, rank) for rank in pids),
        STACK_SECONDS,
        STACK_POLL_SECONDS,
    )
    time.sleep(STACK_POLL_SECONDS)  # for a stack that is being written


def working_stack(run_dir: Path, rank: int) -> list[str]:
    """The stack, in a rank's stack file, of the newest thread that runs Python and that `threading`
    did not start, else of the main thread. Most recent call last; empty if there is none.

    Autograd computes the gradients of a GPU in a thread of its own, and calls the user's hooks
    there; on a CPU it uses the main thread.
    """
    return _newest_stack(_stack_text(run_dir, rank))


def _newest_stack(text: str) -> list[str]:
    """See `working_stack`. In faulthandler's text the newest thread comes first, the main one
    last."""
    for block in text.split("\n\n"):
        lines = block.splitlines()[1:]
        frames = [line for line in lines if line.startswith("  File ")]
        if frames and not frames[-1].rstrip().endswith(" in _bootstrap"):
            return frames[::-1]
    return []


def _stack_text(run_dir: Path, rank: int) -> str:
    """The content of a rank's stack file; empty if there is none."""
    try:
        return stack_file(run_dir, rank).read_text(errors="replace")
    except OSError:
        return ""


def is_waiting(stack: list[str]) -> bool:
    """Whether the innermost call is in torch or in this package, where a rank waits for other ranks
    or for a device.

    A rank that hangs by itself does so in the user's code or in another library.
    """
    innermost = stack[-1]
    return "-packages/torch/" in innermost or PACKAGE in innermost


def stacks_of_loaders(run_dir: Path, rank: int, pid: int) -> list[str]:
    """The stacks of a rank's loader processes, each under a line that names it; for one that is
    stopped, that line alone.

    A forked process has the command line of its parent, and its handler of SIGUSR2, which writes to
    the same file even before the process has run a line of Python.
    """
    lines = []
    command = command_of(pid)
    loaders = [child for child in children_of(pid) if command_of(child) == command]
    for loader in loaders:
        reason = STATES.get(state_of(loader), "")
        stack = []
        if not reason:
            stack = _stack_of_loader(run_dir, rank, loader)
            reason = "most recent call last" if stack else "it wrote no stack"
        end = ":" if stack else ""
        lines += [f"its loader process {loader} ({reason}){end}", *stack]
    return lines


def _stack_of_loader(run_dir: Path, rank: int, loader: int) -> list[str]:
    """The stack of a loader process; empty if it wrote none within STACK_SECONDS."""
    before = _stack_text(run_dir, rank)
    with contextlib.suppress(ProcessLookupError):
        os.kill(loader, signal.SIGUSR2)

    def stack() -> list[str]:
        text = _stack_text(run_dir, rank).removeprefix(before)
        return _without_fork(_newest_stack(text))

    wait_until(stack, STACK_SECONDS, STACK_POLL_SECONDS)
    return stack()


def _without_fork(stack: list[str]) -> list[str]:
    """A stack without the calls of the rank that forked the process, if the process has calls of
    its own."""
    places = [number for number, line in enumerate(stack) if "multiprocessing/process.py" in line]
    if not places:
        return stack
    return stack[places[-1] + 1 :] or stack


def note_late(run_dir: Path, pids: dict[int, int], statuses: Sequence[RankStatus]) -> None:
    """Write into the log of each of these ranks, which should have stopped, where they are.

    pids: process ids by rank.
    """
    for rank, pid in pids.items():
        before = _stack_text(run_dir, rank)
        with contextlib.suppress(ProcessLookupError):
            signal_main_thread(pid, signal.SIGUSR2)
        wait_until(
            lambda rank=rank, before=before: _stack_text(run_dir, rank) != before, STACK_SECONDS
        )
        time.sleep(0.02)  # for a stack that is being written
        stacks = _stack_text(run_dir, rank)[len(before) :]
        where = statuses[rank].snapshot().where
        note = f"a rank is lost, but this one has not stopped, in {where}; its threads:"
        log_file = run_dir / "logs" / f"rank_{rank}.log"
        with contextlib.suppress(OSError), log_file.open("a") as file:
            file.write(f"{note}\n{stacks}")
