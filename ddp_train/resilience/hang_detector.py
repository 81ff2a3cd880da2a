"""Watches the status board for the launcher: which rank hangs and why, which rank is slower.
Torch-free."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_train.linux import state_of, wait_until
from ddp_train.resilience import collectives
from ddp_train.resilience.heartbeat import (
    START_SECONDS,
    StatusBoard,
    StatusSnapshot,
)
from ddp_train.resilience.stacks import (
    STATES,
    is_waiting,
    request_stacks,
    stacks_of_loaders,
    working_stack,
)

LOOK_SECONDS = 0.1
ASLEEP_SECONDS = 5.0
"""A launcher that has not looked for so long was stopped itself, and its ranks with it: `scontrol
suspend`, `docker pause`. It looks ten times a second, and writes a page in between."""
STALE_SECONDS = 2.0
"""A rank whose beats stop for so long, while others beat, is stalled: ten times the interval
between beats."""
RECORD_SECONDS = 1.0
"""How long the workers have to write which collectives they called."""
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
HOLDS_GIL = (
    "the heartbeat thread of the process does not run either: some code holds Python's lock (GIL)"
)


@dataclass(frozen=True)
class Hang:
    """The rank that blocks the run, and the evidence."""

    rank: int
    snapshot: StatusSnapshot
    seconds: float
    """Time since its last progress."""
    reason: str
    """Details besides step and phase; may be empty."""
    others: str
    """Phase and step of the other ranks."""
    called: str
    """The collective at which the calls of the ranks differ; may be empty."""
    stack: list[str]
    """The stack of the culprit's working thread, most recent call last; empty if it wrote none.
    Those of the loader processes that it waits for follow."""


@dataclass
class Observation:
    """The launcher's observations of one rank."""

    snapshot: StatusSnapshot
    progress_at: float
    """When step, phase or the number of batches, or of samples passed, last changed."""
    beat_at: float
    """When the number of beats last changed."""
    passed_at: float = -math.inf
    """When the number of samples that it has read past last changed."""
    samples: Counter[str] = field(default_factory=Counter)
    """Number of samples of this window in which it was in each phase."""
    step_before: int = 0
    """Steps done when this window began."""

    def update(self, current: StatusSnapshot, now: float) -> None:
        before = self.snapshot
        if current.beats != before.beats:
            self.beat_at = now
            self.samples[current.phase] += 1
        if current.samples_passed != before.samples_passed:
            self.passed_at = now
        if current._replace(beats=0) != before._replace(beats=0):
            self.progress_at = now
        self.snapshot = current

    def leave_out(self, seconds: float) -> None:
        """Do not count a time in which the launcher was stopped."""
        self.beat_at += seconds
        self.passed_at += seconds
        self.progress_at += seconds

    @property
    def work_share(self) -> float:
        """The share of its time in this window that it did not wait for others."""
        in_work = sum(self.samples[phase] for phase in WORK)
        return in_work / max(1, self.samples.total())

    @property
    def is_training(self) -> bool:
        """Whether the rank trains: it was seen to wait for others, or has done a step."""
        waits = self.samples["backward"] + self.samples["optimizer step"]
        return waits > 0 or self.snapshot.step > self.step_before


class HangDetector:
    """Watches a status board: `finds_hang` says if a rank hangs, `diagnose` which one and why."""

    def __init__(self, board: StatusBoard, pids: list[int], timeout_seconds: float) -> None:
        """
        pids: the process ids of the ranks 0, 1, ...
        timeout_seconds: how long a rank may make no progress.
        """
        now = time.monotonic()
        self.board = board
        self.pids = pids
        self.timeout_seconds = timeout_seconds
        self.observations = [Observation(status.snapshot(), now, now) for status in board.ranks]
        self.last_look = now
        self.window_began = now
        self.suspect: int | None = None
        """The rank that was slower than all others in the last window."""
        self.warned = False

    def finds_hang(self) -> bool:
        """Look at the board, ten times a second at most however often this is called.

        Returns whether a living rank has made no progress for longer than its limit, and none has
        read past samples of a stream. Warns, once in a run, of a rank that is slower than the
        others.
        """
        now = time.monotonic()
        since_last_look = now - self.last_look
        if since_last_look < LOOK_SECONDS:
            return False
        self.last_look = now
        for status, observation in zip(self.board.ranks, self.observations, strict=True):
            if since_last_look > ASLEEP_SECONDS:
                observation.leave_out(since_last_look)
            observation.update(status.snapshot(), now)
        if now - self.window_began > WINDOW_SECONDS:
            self._end_window()
            self.window_began = now
        return any(self._is_late(rank, now) for rank in range(len(self.pids)))

    def _is_late(self, rank: int, now: float) -> bool:
        observation = self.observations[rank]
        limit = self.timeout_seconds
        if not observation.snapshot.has_started:
            limit = max(limit, START_SECONDS)
        # While a rank reads past samples of a stream, the others wait for it.
        read_past_at = max(other.passed_at for other in self.observations)
        if now - max(observation.progress_at, read_past_at) <= limit:
            return False
        return self._is_alive(rank) and not self.board.ranks[rank].is_done

    def _is_alive(self, rank: int) -> bool:
        return state_of(self.pids[rank]) not in ("", "Z")

    def _end_window(self) -> None:
        """Warn once if a rank keeps the others waiting in two windows in a row: in one the host's
        other work may have held it up."""
        straggler = find_straggler(self.observations)
        if straggler is not None and straggler == self.suspect and not self.warned:
            self.warned = True
            print(warning_of(straggler, self.observations), file=sys.stderr)
        self.suspect = straggler
        for observation in self.observations:
            observation.samples.clear()
            observation.step_before = observation.snapshot.step

    def diagnose(self, run_dir: Path) -> Hang:
        """Find the culprit and its stack.

        Continues stopped processes: call it only before all workers are ended.
        """
        now = time.monotonic()
        states = [state_of(pid) for pid in self.pids]
        for rank in range(len(self.pids)):
            record_of_earlier_attempt = collectives.record_file(run_dir, rank)
            with contextlib.suppress(OSError):
                record_of_earlier_attempt.unlink(missing_ok=True)
        # First the stacks: Python's faulthandler may crash if another thread of that process runs
        # Python meanwhile, as the one does that writes the record. It was seen once, in 3.11.
        stacks = self.stacks(run_dir)
        for status in self.board.ranks:
            status.is_examined = 1
        observed = dict(enumerate(self.observations))
        alive = {rank: seen for rank, seen in observed.items() if self._is_alive(rank)}
        rank, reason = find_culprit(alive or observed, states, stacks, now)
        culprit = observed.pop(rank)
        stack = stacks[rank]
        if culprit.snapshot.phase in FETCHING:
            stack += stacks_of_loaders(run_dir, rank, self.pids[rank])
        others = [f"rank {other} in {seen.snapshot.where}" for other, seen in observed.items()]
        return Hang(
            rank=rank,
            snapshot=culprit.snapshot,
            seconds=now - culprit.progress_at,
            reason=reason,
            others=", ".join(others),
            called=self.calls(run_dir),
            stack=stack,
        )

    def stacks(self, run_dir: Path) -> list[list[str]]:
        """The stack of each worker's working thread; empty for those that wrote none."""
        # Before its first beat a worker has no handler, and the signal would kill it.
        request_stacks(run_dir, {rank: self.pids[rank] for rank in self._responsive_ranks()})
        return [working_stack(run_dir, rank) for rank in range(len(self.pids))]

    def calls(self, run_dir: Path) -> str:
        """The collective at which the calls of the ranks differ, of the ranks that write their
        records within RECORD_SECONDS."""
        ranks = self._responsive_ranks()
        files = [collectives.record_file(run_dir, rank) for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files), RECORD_SECONDS)
        calls = {rank: collectives.calls_of(run_dir, rank) for rank in ranks}
        return collectives.compare(
            {rank: known for rank, known in calls.items() if known is not None}
        )

    def _responsive_ranks(self) -> list[int]:
        """The ranks that live, and have imported torch."""
        return [
            rank
            for rank, observation in enumerate(self.observations)
            if observation.snapshot.beats and self._is_alive(rank)
        ]


def find_culprit(
    observed: dict[int, Observation], states: Sequence[str], stacks: Sequence[list[str]], now: float
) -> tuple[int, str]:
    """The rank that blocks the others, and the reason, which may be empty.

    In this order: a process that the kernel reports as stopped; one whose beats stopped (Python's
    lock is held); the one furthest behind; if several are, the one that does not wait inside torch.

    observed: the ranks that are alive.
    states: the state of each rank's process.
    stacks: the stack of each rank.
    """
    for rank, state in enumerate(states):
        if state in ("T", "t"):
            return rank, f"the process is {STATES[state]}"
    beating = {rank: seen for rank, seen in observed.items() if seen.snapshot.beats}
    stalled = [rank for rank, seen in beating.items() if now - seen.beat_at > STALE_SECONDS]
    if stalled and (len(stalled) < len(beating) or len(states) == 1):
        return stalled[0], HOLDS_GIL
    least = min(seen.snapshot.progress for seen in observed.values())
    behind = [rank for rank, seen in observed.items() if seen.snapshot.progress == least]
    at_work = [rank for rank in behind if stacks[rank] and not is_waiting(stacks[rank])]
    rank = (at_work or behind)[0]
    if states[rank] in STATES:
        return rank, f"the process is {STATES[states[rank]]}"
    if len(behind) == 1 or at_work:
        return rank, ""
    numbers = ", ".join(map(str, behind))
    return rank, (
        f"ranks {numbers} all wait at the same place, none is behind the others; the first is named"
    )


def find_straggler(observations: Sequence[Observation]) -> int | None:
    """The rank that works so much longer than all others in this window that they wait for it; None
    if there is none."""
    shares = [observation.work_share for observation in observations]
    *others, most = sorted(shares)
    are_training = all(observation.is_training for observation in observations)
    if others and are_training and most > others[-1] + EXCESS:
        return shares.index(most)
    return None


def warning_of(straggler: int, observations: Sequence[Observation]) -> str:
    """The warning of a straggler, for the user."""
    samples = observations[straggler].samples
    phase = max(WORK, key=lambda phase: samples[phase])
    *others, most = sorted(observation.work_share for observation in observations)
    return (
        f"warning: rank {straggler} is slower than the others: it spends {most:.0%} of its time in"
        f" data and forward, mostly {phase}; the others spend at most {others[-1]:.0%} there, and"
        " then wait for it"
    )
