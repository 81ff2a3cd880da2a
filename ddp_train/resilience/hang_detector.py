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
STACK_POLL_SECONDS = 0.05
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
    """Time since its last progress."""
    reason: str
    """What is known besides step and phase; may be empty."""
    others: str
    """Phase and step of the other ranks."""
    called: str
    """Where the collectives of the ranks part; may be empty."""
    stack: list[str]
    """The stack of the culprit's working thread, most recent call last; empty if it wrote none.
    Those of the loader processes that it waits for follow."""


@dataclass
class _Observation:
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

    def update(self, current: StatusSnapshot, now: float) -> None:
        before = self.snapshot
        if current.beats != before.beats:
            self.beat_at = now
            self.samples[current.phase] += 1
        if current._replace(beats=0) != before._replace(beats=0):
            self.progress_at = now
        self.snapshot = current

    def work_share(self) -> float:
        """The share of its time in this window that it did not wait for others."""
        in_work = sum(self.samples[phase] for phase in WORK)
        return in_work / max(1, self.samples.total())

    def begin_window(self) -> None:
        self.samples.clear()
        self.step_before = self.snapshot.step

    @property
    def is_training(self) -> bool:
        """A rank that works nearly all the time may be seen in no phase of waiting, but it does
        steps."""
        waits = self.samples["backward"] + self.samples["optimizer step"]
        return waits > 0 or self.snapshot.step > self.step_before


class HangDetector:
    """Watches a status board. `is_hung` is cheap and may be called at any rate."""

    def __init__(self, board: StatusBoard, pids: list[int], timeout_seconds: float) -> None:
        """pids: the process ids of the ranks 0, 1, ...
        timeout_seconds: how long a rank may make no progress.
        """
        now = time.monotonic()
        self.board = board
        self.pids = pids
        self.timeout_seconds = timeout_seconds
        self.observations = [_Observation(status.snapshot(), now, now) for status in board.ranks]
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
        for status, observation in zip(self.board.ranks, self.observations, strict=True):
            observation.update(status.snapshot(), now)
        if now - self.window_began > WINDOW_SECONDS:
            self._warn_of_straggler()
            self.window_began = now
        return any(self._is_late(rank, now) for rank in range(len(self.pids)))

    def _is_late(self, rank: int, now: float) -> bool:
        observation = self.observations[rank]
        if now - observation.progress_at <= self._limit(observation):
            return False
        return self._is_alive(rank) and not self.board.ranks[rank].is_done

    def _leave_out(self, seconds: float) -> None:
        """Does not count a time in which the launcher was stopped."""
        for observation in self.observations:
            observation.beat_at += seconds
            observation.progress_at += seconds

    def _is_alive(self, rank: int) -> bool:
        return state_of(self.pids[rank]) not in ("", "Z")

    def _limit(self, observation: _Observation) -> float:
        has_started = observation.snapshot.batches > 1
        if has_started:
            return self.timeout_seconds
        return max(self.timeout_seconds, START_SECONDS)

    def _warn_of_straggler(self) -> None:
        """Warns once if a rank keeps the others waiting in two windows in a row, and begins a new
        window.

        In one window the host's other work may have held it up.
        """
        shares = [observation.work_share() for observation in self.observations]
        slowest = max(range(len(shares)), key=shares.__getitem__)
        others = [share for rank, share in enumerate(shares) if rank != slowest]
        are_training = all(observation.is_training for observation in self.observations)
        is_slower = bool(others) and are_training and shares[slowest] > max(others) + EXCESS
        was_suspect = self.suspect == slowest
        self.suspect = slowest if is_slower else -1
        if is_slower and was_suspect and not self.warned:
            self.warned = True
            samples = self.observations[slowest].samples
            phase = max(WORK, key=lambda phase: samples[phase])
            print(
                f"warning: rank {slowest} is slower than the others: it spends"
                f" {shares[slowest]:.0%} of its time in data and forward, mostly {phase}; the"
                f" others at most {max(others):.0%}, and then wait for it",
                file=sys.stderr,
            )
        for observation in self.observations:
            observation.begin_window()

    def diagnose(self, run_dir: Path) -> Hang:
        """Finds the culprit and its stack. Continues stopped processes: call it only before all
        workers are ended."""
        now = time.monotonic()
        states = [state_of(pid) for pid in self.pids]
        for rank in range(len(self.pids)):
            record_of_earlier_attempt = collectives.record_file(run_dir, rank)
            with contextlib.suppress(OSError):
                record_of_earlier_attempt.unlink(missing_ok=True)
        # First the stacks: Python's faulthandler may crash if another thread of that process runs
        # Python meanwhile, as the one does that writes the record. It was seen once, in 3.11.
        stacks = self._stacks(run_dir)
        for status in self.board.ranks:
            status.is_examined = 1
        rank, reason = self._culprit(now, states, stacks)
        culprit = self.observations[rank]
        stack = stacks[rank]
        if culprit.snapshot.phase in FETCHING:
            stack += stacks_of_loaders(run_dir, rank, self.pids[rank])
        others = [
            f"rank {other} in {observation.snapshot.where}"
            for other, observation in enumerate(self.observations)
            if other != rank
        ]
        return Hang(
            rank=rank,
            snapshot=culprit.snapshot,
            seconds=now - culprit.progress_at,
            reason=reason,
            others=", ".join(others),
            called=self._calls(run_dir),
            stack=stack,
        )

    def _responsive_ranks(self) -> list[int]:
        """The ranks that live, and have imported torch."""
        return [
            rank
            for rank, observation in enumerate(self.observations)
            if observation.snapshot.beats and self._is_alive(rank)
        ]

    def _calls(self, run_dir: Path) -> str:
        """Where the collectives of the ranks part, of those that have written their records within
        RECORD_SECONDS."""
        ranks = self._responsive_ranks()
        files = [collectives.record_file(run_dir, rank) for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files), RECORD_SECONDS)
        known = {}
        for rank in ranks:
            calls = collectives.calls_of(run_dir, rank)
            if calls is not None:
                known[rank] = calls
        return collectives.compare(known)

    def _culprit(self, now: float, states: list[str], stacks: list[list[str]]) -> tuple[int, str]:
        """The rank that blocks the others, and the reason.

        In this order: a process that the kernel reports as stopped; one whose beats stopped
        (Python's lock is held); the one furthest behind; if several are, the one that does not wait
        inside torch.
        """
        for rank, state in enumerate(states):
            if state in ("T", "t"):
                return rank, f"the process is {STATES[state]}"
        ranks = range(len(self.observations))
        alive = [rank for rank in ranks if self._is_alive(rank)]
        alive = alive or list(ranks)  # all have died since
        snapshots = {rank: self.observations[rank].snapshot for rank in alive}
        beating = [rank for rank in alive if snapshots[rank].beats]
        stalled = [
            rank for rank in beating if now - self.observations[rank].beat_at > STALE_SECONDS
        ]
        if stalled and (len(stalled) < len(beating) or len(ranks) == 1):
            reason = "its heartbeat thread does not run either: some code holds Python's lock (GIL)"
            return stalled[0], reason
        least = min(snapshot.progress for snapshot in snapshots.values())
        behind = [rank for rank in alive if snapshots[rank].progress == least]
        at_work = [rank for rank in behind if stacks[rank] and not _is_waiting(stacks[rank])]
        rank = (at_work or behind)[0]
        if states[rank] in STATES:
            return rank, f"the process is {STATES[states[rank]]}"
        if len(behind) == 1 or at_work:
            return rank, ""
        numbers = ", ".join(map(str, behind))
        return rank, (
            f"ranks {numbers} all wait at the same place, none is behind the others; the first is"
            " named"
        )

    def _stacks(self, run_dir: Path) -> list[list[str]]:
        """The stack of each worker's working thread; empty for those that wrote none within
        STACK_SECONDS."""
        # Before its first beat a worker has no handler, and the signal would kill it.
        ranks = self._responsive_ranks()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                signal_main_thread(self.pids[rank], signal.SIGUSR2)
                os.kill(self.pids[rank], signal.SIGCONT)
        wait_until(
            lambda: all(working_stack(run_dir, rank) for rank in ranks),
            STACK_SECONDS,
            STACK_POLL_SECONDS,
        )
        time.sleep(STACK_POLL_SECONDS)  # for a stack that is being written
        return [working_stack(run_dir, rank) for rank in range(len(self.pids))]


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
    """What a rank has written to its stack file; empty if there is none."""
    try:
        return stack_file(run_dir, rank).read_text(errors="replace")
    except OSError:
        return ""


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
        state = state_of(loader)
        stack = [] if state in STATES else _stack_of_loader(run_dir, rank, loader)
        if stack:
            lines.append(f"its loader process {loader} (most recent call last):")
        else:
            reason = STATES.get(state, "it wrote no stack")
            lines.append(f"its loader process {loader} ({reason})")
        lines += stack
    return lines


def _stack_of_loader(run_dir: Path, rank: int, loader: int) -> list[str]:
    """The stack of a loader process; empty if it wrote none within STACK_SECONDS."""
    before = _stack_text(run_dir, rank)
    deadline = time.monotonic() + STACK_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.kill(loader, signal.SIGUSR2)
    while time.monotonic() < deadline:
        time.sleep(STACK_POLL_SECONDS)
        text = _stack_text(run_dir, rank).removeprefix(before)
        stack = _without_fork(_newest_stack(text))
        if stack:
            return stack
    return []


def _without_fork(stack: list[str]) -> list[str]:
    """A stack without the calls of the rank that forked the process, if the process has calls of
    its own."""
    places = [number for number, line in enumerate(stack) if "multiprocessing/process.py" in line]
    if not places:
        return stack
    return stack[places[-1] + 1 :] or stack


def note_late(run_dir: Path, pids: dict[int, int], statuses: Sequence[RankStatus]) -> None:
    """Writes into the log of each of these ranks, which should have stopped, where they are.

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
        note = f"a rank is lost, and this one, in {where}, has not stopped for it; its threads:"
        log_file = run_dir / "logs" / f"rank_{rank}.log"
        with contextlib.suppress(OSError), log_file.open("a") as file:
            file.write(f"{note}\n{stacks}")


def _is_waiting(stack: list[str]) -> bool:
    """Whether the innermost call is in torch or in this package, where a rank waits for other ranks
    or for a device. A rank that hangs by itself does so in the user's code or in another
    library."""
    innermost = stack[-1]
    return "-packages/torch/" in innermost or str(Path(__file__).parent.parent) in innermost
