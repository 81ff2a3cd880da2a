"""Watches the status board for the launcher: which rank hangs and why, which rank is slower.
Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_train.linux import children_of, command_of, signal_main_thread, state_of, wait_until
from ddp_train.resilience import collectives
from ddp_train.resilience.heartbeat import (
    START_SECONDS,
    RankStatus,
    StatusBoard,
    StatusSnapshot,
    stack_file,
)

LOOK_SECONDS = 0.1
ASLEEP_SECONDS = 5.0
"""A launcher that has not looked for so long was stopped itself, and its ranks with it: `scontrol
suspend`, `docker pause`. It looks ten times a second, and writes a page in between."""
STALE_SECONDS = 2.0
"""A rank whose beats stop for so long, while others beat, is stalled: ten times the interval
between beats."""
STACK_SECONDS = 1.0
"""How long the workers have to write their stacks."""
RECORD_SECONDS = 1.0
"""How long they have to write which collectives they called."""
WINDOW_SECONDS = 10.0
WORK = ("data", "forward")
"""Phases in which a rank does not wait for others. In backward (on a GPU, the optimizer step) all
wait for the last."""
FETCHING = ("data", "evaluation data")
"""Phases in which a rank may wait for its loader processes."""
EXCESS = 0.2
"""A straggler's share of time in WORK exceeds that of every other rank by more than this. By chance
two shares differ by 0.1 (one standard deviation, for the 50 samples of a window at a share of one
half, taken as independent)."""
STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a network file system",
}
STOPPED = f"the process is {STATES['T']}"
"""The reason of a hang that a signal has made."""


@dataclass(frozen=True)
class Hang:
    """The rank that blocks the run, and the evidence."""

    rank: int
    snapshot: StatusSnapshot
    seconds: float
    """Since its last progress."""
    reason: str
    """What is known besides step and phase; may be empty."""
    others: str
    """Phase and step of the other ranks."""
    called: str
    """Where the collectives of the ranks part; may be empty."""
    stack: list[str]
    """Of the culprit's working thread, most recent call last; empty if it wrote none. Those of the
    loader processes that it waits for follow."""


@dataclass
class _Observed:
    """What the launcher has observed of one rank."""

    snapshot: StatusSnapshot
    progress_at: float
    """When step, phase or the number of batches last changed."""
    beat_at: float
    """When the number of beats last changed."""
    samples: Counter[str] = field(default_factory=Counter)
    """In how many samples of this window it was in each phase."""
    step_before: int = 0
    """Steps done when this window began."""

    @property
    def is_training(self) -> bool:
        """A rank that works nearly all the time may be seen in no phase of waiting, but it does
        steps."""
        waits = self.samples["backward"] + self.samples["optimizer step"]
        return waits > 0 or self.snapshot.step > self.step_before


class HangDetector:
    """Watches a status board. `is_hung` is cheap and may be called at any rate."""

    def __init__(self, board: StatusBoard, pids: list[int], timeout_seconds: float) -> None:
        """pids: of the ranks 0, 1, ... timeout_seconds: how long a rank may make no progress."""
        now = time.monotonic()
        self.board = board
        self.pids = pids
        self.timeout_seconds = timeout_seconds
        self.observed = [_Observed(status.snapshot(), now, now) for status in board.ranks]
        self.last_look = now
        self.window_began = now
        self.suspect = -1
        """The rank that was slower than all others in the last window."""
        self.warned = False

    def is_hung(self) -> bool:
        """Whether a living rank has made no progress for longer than its limit."""
        now = time.monotonic()
        if now - self.last_look < LOOK_SECONDS:
            return False
        asleep = now - self.last_look
        self.last_look = now
        if asleep > ASLEEP_SECONDS:
            self._leave_out(asleep)
        for status, observed in zip(self.board.ranks, self.observed, strict=True):
            current = status.snapshot()
            before = observed.snapshot
            if current.beats != before.beats:
                observed.beat_at = now
                observed.samples[current.phase] += 1
            if (current.step, current.batches, current.phase) != (
                before.step,
                before.batches,
                before.phase,
            ):
                observed.progress_at = now
            observed.snapshot = current
        if now - self.window_began > WINDOW_SECONDS:
            self._warn_of_straggler()
            self.window_began = now
        late = [
            rank
            for rank, seen in enumerate(self.observed)
            if now - seen.progress_at > self._limit(seen)
        ]
        return any(self._is_alive(rank) and not self.board.ranks[rank].is_done for rank in late)

    def _leave_out(self, seconds: float) -> None:
        for observed in self.observed:
            observed.beat_at += seconds
            observed.progress_at += seconds

    def _is_alive(self, rank: int) -> bool:
        return state_of(self.pids[rank]) not in ("", "Z")

    def _limit(self, observed: _Observed) -> float:
        started = observed.snapshot.batches > 1
        if started:
            return self.timeout_seconds
        return max(self.timeout_seconds, START_SECONDS)

    def _warn_of_straggler(self) -> None:
        """Warns once if a rank keeps the others waiting in two windows in a row, and begins a new
        window.

        In one window the host's other work may have held it up.
        """
        work_shares = [
            sum(observed.samples[phase] for phase in WORK) / max(1, observed.samples.total())
            for observed in self.observed
        ]
        slowest = max(range(len(work_shares)), key=work_shares.__getitem__)
        others = [share for rank, share in enumerate(work_shares) if rank != slowest]
        training = all(seen.is_training for seen in self.observed)
        is_slower = bool(others) and training and work_shares[slowest] > max(others) + EXCESS
        again = self.suspect == slowest
        self.suspect = slowest if is_slower else -1
        if is_slower and again and not self.warned:
            self.warned = True
            phase = max(WORK, key=lambda phase: self.observed[slowest].samples[phase])
            print(
                f"warning: rank {slowest} is slower than the others: it spends"
                f" {work_shares[slowest]:.0%} of its time in data and forward, mostly {phase}; the"
                f" others at most {max(others):.0%}, and then wait for it",
                file=sys.stderr,
            )
        for observed in self.observed:
            observed.samples.clear()
            observed.step_before = observed.snapshot.step

    def diagnose(self, run_dir: Path) -> Hang:
        """Finds the culprit and its stack. Continues stopped processes: call it only before all
        workers are ended."""
        now = time.monotonic()
        states = [state_of(pid) for pid in self.pids]
        for rank in range(len(self.pids)):
            with contextlib.suppress(OSError):
                collectives.record_file(run_dir, rank).unlink(
                    missing_ok=True
                )  # of an attempt before
        # First the stacks: Python's faulthandler may crash if another thread of that process runs
        # Python meanwhile, as the one does that writes the record. It was seen once, in 3.11.
        stacks = self._stacks(run_dir)
        for status in self.board.ranks:
            status.is_examined = 1
        rank, reason = self._culprit(now, states, stacks)
        if self.observed[rank].snapshot.phase in FETCHING:
            stacks[rank] += stacks_of_loaders(run_dir, rank, self.pids[rank])
        culprit = self.observed[rank]
        others = [
            f"rank {other} in {seen.snapshot.where}"
            for other, seen in enumerate(self.observed)
            if other != rank
        ]
        seconds = now - culprit.progress_at
        called = self._calls(run_dir)
        return Hang(
            rank, culprit.snapshot, seconds, reason, ", ".join(others), called, stacks[rank]
        )

    def _calls(self, run_dir: Path) -> str:
        """Where the collectives of the ranks part; of those that tell within RECORD_SECONDS."""
        ranks = [
            rank
            for rank, seen in enumerate(self.observed)
            if seen.snapshot.beats and self._is_alive(rank)
        ]
        files = [collectives.record_file(run_dir, rank) for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files), RECORD_SECONDS)
        found = {rank: collectives.calls_of(run_dir, rank) for rank in ranks}
        return collectives.compare(
            {rank: calls for rank, calls in found.items() if calls is not None}
        )

    def _culprit(self, now: float, states: list[str], stacks: list[list[str]]) -> tuple[int, str]:
        """The rank that blocks the others, and the reason. In this order: a process that the kernel
        reports as stopped; one whose beats stopped (Python's lock is held); the one furthest
        behind; if several are, the one that does not wait inside torch."""
        for rank, state in enumerate(states):
            if state in ("T", "t"):
                return rank, f"the process is {STATES[state]}"
        ranks = range(len(self.observed))
        alive = [rank for rank in ranks if self._is_alive(rank)] or list(
            ranks
        )  # all have died since
        beating = [rank for rank in alive if self.observed[rank].snapshot.beats]
        stalled = [rank for rank in beating if now - self.observed[rank].beat_at > STALE_SECONDS]
        if stalled and (len(stalled) < len(beating) or len(self.observed) == 1):
            return (
                stalled[0],
                "its heartbeat thread does not run either: some code holds Python's lock (GIL)",
            )
        last = min(self.observed[rank].snapshot.progress for rank in alive)
        behind = [rank for rank in alive if self.observed[rank].snapshot.progress == last]
        at_work = [rank for rank in behind if stacks[rank] and not _is_waiting(stacks[rank])]
        rank = (at_work or behind)[0]
        if states[rank] in STATES:
            return rank, f"the process is {STATES[states[rank]]}"
        undecided = len(behind) > 1 and not at_work
        named = ", ".join(map(str, behind))
        reason = (
            f"ranks {named} all wait at the same place, none is behind the others; the first is"
            " named"
        )
        return rank, reason if undecided else ""

    def _stacks(self, run_dir: Path) -> list[list[str]]:
        """The stack of each worker's working thread; empty for those that wrote none within
        STACK_SECONDS."""
        beating = [
            rank
            for rank, seen in enumerate(self.observed)
            if seen.snapshot.beats and self._is_alive(rank)
        ]
        for (
            rank
        ) in beating:  # before its first beat a worker has no handler, and the signal would kill it
            with contextlib.suppress(ProcessLookupError):
                signal_main_thread(self.pids[rank], signal.SIGUSR2)
                os.kill(self.pids[rank], signal.SIGCONT)
        wait_until(
            lambda: all(working_stack(run_dir, rank) for rank in beating), STACK_SECONDS, 0.05
        )
        time.sleep(0.05)  # for a stack that is being written
        return [working_stack(run_dir, rank) for rank in range(len(self.pids))]


def working_stack(run_dir: Path, rank: int) -> list[str]:
    """The stack, in a rank's stack file, of the newest thread that runs Python and that `threading`
    did not start, else of the main thread. Most recent call last; empty if there is none.

    Autograd computes the gradients of a GPU in a thread of its own, and calls the user's hooks
    there; on a CPU it uses the main thread.
    """
    return _newest(_written(run_dir, rank))


def _newest(text: str) -> list[str]:
    threads = [
        block.splitlines()[1:] for block in text.split("\n\n")
    ]  # the newest thread first, the main one last
    threads = [[line for line in lines if line.startswith("  File ")] for lines in threads]
    own = [
        lines[::-1]
        for lines in threads
        if lines and not lines[-1].rstrip().endswith(" in _bootstrap")
    ]
    return own[0] if own else []


def _written(run_dir: Path, rank: int) -> str:
    try:
        return stack_file(run_dir, rank).read_text(errors="replace")
    except OSError:
        return ""


def stacks_of_loaders(run_dir: Path, rank: int, pid: int) -> list[str]:
    """The stacks of a rank's loader processes, each under a line that names it; of one that is
    stopped that line alone.

    A forked process has the command line of its parent, and its handler of SIGUSR2, which writes to
    the same file even before the process has run a line of Python.
    """
    found = []
    command = command_of(pid)
    for loader in [child for child in children_of(pid) if command_of(child) == command]:
        before = _written(run_dir, rank)
        state = state_of(loader)
        deadline = time.monotonic() + STACK_SECONDS
        stack: list[str] = []
        if state not in STATES:
            with contextlib.suppress(ProcessLookupError):
                os.kill(loader, signal.SIGUSR2)
            while not stack and time.monotonic() < deadline:
                time.sleep(0.05)
                stack = _of_loader(_newest(_written(run_dir, rank).removeprefix(before)))
        known = "most recent call last" if stack else STATES.get(state, "it wrote no stack")
        found += [f"its loader process {loader} ({known})" + ":" * bool(stack), *stack]
    return found


def _of_loader(stack: list[str]) -> list[str]:
    """Without the calls of the rank that forked it, if it has come to its own."""
    begins = [number for number, line in enumerate(stack) if "multiprocessing/process.py" in line]
    return stack[begins[-1] + 1 :] or stack if begins else stack


def note_late(run_dir: Path, pids: dict[int, int], statuses: Sequence[RankStatus]) -> None:
    """Writes into the log of each of these ranks, which should have stopped, where they are. pids:
    by rank."""
    for rank, pid in pids.items():
        before = _written(run_dir, rank)
        with contextlib.suppress(ProcessLookupError):
            signal_main_thread(pid, signal.SIGUSR2)
        wait_until(
            lambda rank=rank, before=before: _written(run_dir, rank) != before, STACK_SECONDS
        )
        time.sleep(0.02)  # for one that is being written
        text = _written(run_dir, rank)
        where = statuses[rank].snapshot().where
        lines = [
            f"a rank is lost, and this one, in {where}, has not stopped for it; its threads:",
            text[len(before) :],
        ]
        with (
            contextlib.suppress(OSError),
            (run_dir / "logs" / f"rank_{rank}.log").open("a") as file,
        ):
            file.write("\n".join(lines))


def _is_waiting(stack: list[str]) -> bool:
    """Whether the innermost call is in torch or in this package, where a rank waits for other ranks
    or for a device. A rank that hangs by itself does so in the user's code or in another
    library."""
    return "-packages/torch/" in stack[-1] or str(Path(__file__).parent.parent) in stack[-1]
