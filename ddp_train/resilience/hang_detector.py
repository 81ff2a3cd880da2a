"""The launcher's eye on its workers: who hangs, and why; who is slower than the others. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ddp_train.linux import signal_main_thread, state_of
from ddp_train.resilience.heartbeat import START_SECONDS, StatusBoard, StatusSnapshot, stack_file

LOOK_SECONDS = 0.1
STALE_SECONDS = 2.0
"""Without a beat for so long, while others beat: ten times the usual pause."""
STACK_SECONDS = 1.0
"""For the workers to write their stacks."""
WINDOW_SECONDS = 10.0
WORK = ("data", "forward")
"""Phases without others: in backward, or on a GPU in the optimizer step, all wait for the last."""
EXCESS = 0.2
"""A straggler spends so much more of its time at work than the slowest of the others. By chance, the 50 samples of a
window differ by 0.1 (one standard deviation at a share of one half, as if independent)."""
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a network file system"}


@dataclass(frozen=True)
class Hang:
    """Who keeps the run from going on, and how we know."""

    rank: int
    row: StatusSnapshot
    seconds: float
    reason: str
    """What is known beyond the place; may be empty."""
    others: str
    stack: list[str]
    """Of the culprit's thread that is at work, most recent call last; empty if it wrote none."""


@dataclass
class _Seen:
    """One rank, as the launcher saw it."""

    row: StatusSnapshot
    moved: float
    """When its status last changed."""
    beat: float
    """When its beat last changed."""
    samples: Counter[str] = field(default_factory=Counter)
    """How often it was seen in each phase in this window."""


class HangDetector:
    """Looks at a status board. `look` is cheap and may be called as often as one likes."""

    def __init__(self, board: StatusBoard, pids: list[int], timeout_seconds: float) -> None:
        """pids: of the ranks 0, 1, ... timeout_seconds: the longest that a rank may stay where it is."""
        self.board, self.pids, self.timeout_seconds = board, pids, timeout_seconds
        now = time.monotonic()
        self.seen = [_Seen(status.snapshot(), now, now) for status in board.ranks]
        self.last_look = self.window_began = now
        self.warned = False

    def is_hung(self) -> bool:
        """Whether some rank has not moved for too long."""
        now = time.monotonic()
        if now - self.last_look < LOOK_SECONDS:
            return False
        self.last_look = now
        for status, seen in zip(self.board.ranks, self.seen, strict=True):
            row, before = status.snapshot(), seen.row
            if row.beats != before.beats:
                seen.beat = now
                seen.samples[row.phase] += 1
            if (row.step, row.batches, row.phase) != (before.step, before.batches, before.phase):
                seen.moved = now
            seen.row = row
        if now - self.window_began > WINDOW_SECONDS:
            self._compare()
            self.window_began = now
        late = [rank for rank, seen in enumerate(self.seen) if now - seen.moved > self._limit(seen)]
        return any(self._alive(rank) for rank in late)

    def _alive(self, rank: int) -> bool:
        return state_of(self.pids[rank]) not in ("", "Z")

    def _limit(self, seen: _Seen) -> float:
        return self.timeout_seconds if seen.row.batches > 1 else max(self.timeout_seconds, START_SECONDS)

    def _compare(self) -> None:
        """Warns once of a rank that keeps the others waiting in every step."""
        shares = [sum(seen.samples[phase] for phase in WORK) / max(1, seen.samples.total()) for seen in self.seen]
        slowest = max(range(len(shares)), key=shares.__getitem__)
        others = [share for rank, share in enumerate(shares) if rank != slowest]
        training = all(seen.samples["backward"] + seen.samples["optimizer step"] for seen in self.seen)
        if others and training and not self.warned and shares[slowest] > max(others) + EXCESS:
            self.warned = True
            phase = max(WORK, key=lambda phase: self.seen[slowest].samples[phase])
            print(
                f"warning: rank {slowest} is slower than the others: {shares[slowest]:.0%} of its time is data and "
                f"forward, mostly {phase}; of theirs {max(others):.0%} at most, the rest they wait for it",
                file=sys.stderr,
            )
        for seen in self.seen:
            seen.samples.clear()

    def diagnose(self, run_dir: Path) -> Hang:
        """Finds the culprit. Wakes processes that are stopped: to be called when all are about to be ended."""
        now = time.monotonic()
        states = [state_of(pid) for pid in self.pids]
        stacks = self._stacks(run_dir)
        rank, reason = self._culprit(now, states, stacks)
        culprit = self.seen[rank]
        others = [f"rank {other} in {seen.row.where}" for other, seen in enumerate(self.seen) if other != rank]
        return Hang(rank, culprit.row, now - culprit.moved, reason, ", ".join(others), stacks[rank])

    def _culprit(self, now: float, states: list[str], stacks: list[list[str]]) -> tuple[int, str]:
        """What the kernel says is stopped; else who holds Python's lock; else the least advanced; among several of
        those, the one that does not wait inside torch."""
        for rank, state in enumerate(states):
            if state in ("T", "t"):
                return rank, f"the process is {STATES[state]}"
        alive = [rank for rank in range(len(self.seen)) if self._alive(rank)]
        beating = [rank for rank in alive if self.seen[rank].row.beats]
        silent = [rank for rank in beating if now - self.seen[rank].beat > STALE_SECONDS]
        if silent and (len(silent) < len(beating) or len(self.seen) == 1):
            return silent[0], "its other threads stand still too: some code keeps Python's lock (GIL)"
        last = min(self.seen[rank].row.progress for rank in alive)
        behind = [rank for rank in alive if self.seen[rank].row.progress == last]
        at_work = [rank for rank in behind if stacks[rank] and not _waits(stacks[rank])]
        rank = (at_work or behind)[0]
        if states[rank] in STATES:
            return rank, f"the process is {STATES[states[rank]]}"
        undecided = len(behind) > 1 and not at_work
        return rank, f"ranks {', '.join(map(str, behind))} all wait there: this is the first" if undecided else ""

    def _stacks(self, run_dir: Path) -> list[list[str]]:
        """Asks every worker that is at work for its stack."""
        beating = [rank for rank, seen in enumerate(self.seen) if seen.row.beats and self._alive(rank)]
        for rank in beating:  # before its first beat a worker has no handler, and the signal would end it
            with contextlib.suppress(ProcessLookupError):
                signal_main_thread(self.pids[rank], signal.SIGUSR2)
                os.kill(self.pids[rank], signal.SIGCONT)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(working_stack(run_dir, rank) for rank in beating):
            time.sleep(0.05)
        time.sleep(0.05)  # for those that are at it
        return [working_stack(run_dir, rank) for rank in range(len(self.pids))]


def working_stack(run_dir: Path, rank: int) -> list[str]:
    """Of what a rank wrote: the stack of the thread that did not come from Python's `threading` and runs Python, or
    else of the main thread. Most recent call last; empty if there is nothing.

    Autograd runs the gradients of a GPU in a thread of its own, the hooks of the user in it; on CPU in the main thread.
    """
    try:
        text = stack_file(run_dir, rank).read_text(errors="replace")
    except OSError:
        return []
    threads = [block.splitlines()[1:] for block in text.split("\n\n")]  # the newest thread first, the main one last
    threads = [[line for line in lines if line.startswith("  File ")] for lines in threads]
    own = [lines[::-1] for lines in threads if lines and not lines[-1].rstrip().endswith(" in _bootstrap")]
    return own[0] if own else []


def _waits(stack: list[str]) -> bool:
    """Whether the innermost call is torch's or this package's: whatever waits for other ranks or for a device does so
    there; what hangs of its own accord does so in the user's code or in a library of its own."""
    return "-packages/torch/" in stack[-1] or str(Path(__file__).parent.parent) in stack[-1]
