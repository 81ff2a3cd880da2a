"""Preemption: after a signal to any process, all ranks stop training after the same step and save
there.

A Python signal handler does not run while its process waits in a collective, so the handlers do
nothing. Two threads of each process do the work. The first reads signal numbers from the pipe to
which the interpreter's C handler writes them; it never uses the network, which a stopped peer can
block. The second checks the key-value store a few times a second for a stop request, and agrees
with the other ranks on the last step through the store. There is no collective for it, and a
training step pays a comparison.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ddp_train.distributed.world import World
from ddp_train.resilience.heartbeat import RankStatus

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SAVED = 75
"""Exit code: stopped and saved (EX_TEMPFAIL of sysexits.h: try again)."""
UNSAVED = 143
"""Exit code: stopped before it could save."""
INTERRUPTED = 130
"""Exit code: stopped by Ctrl-C, or as its terminal was closed."""
SAME_REQUEST_SECONDS = 0.5
"""Signals within this time are one request: SLURM and systemd signal every process, and agents
forward theirs."""
LOOK_SECONDS = 0.25
"""Polling interval of the store for a request. A look takes 0.05 ms."""
AGREE_SECONDS = 0.02
"""Polling interval of the store for the answers of all ranks."""
REQUEST = "stop/request"
EARLIEST = "stop/earliest"
AGREED = "stop/agreed"
NEVER = sys.maxsize
log = logging.getLogger(__name__)


class Store(Protocol):
    """The methods used of torch's key-value store, whose keys all processes share."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Phase(enum.Enum):
    """A phase of a stop on which the ranks agree."""

    TRAINING = "no rank is asked to stop"
    REQUESTED = "a rank is asked to stop; the last step is not known"
    DECIDED = "the last step is known"


class Event(enum.Enum):
    """An event that takes a stop from one phase to the next."""

    REQUEST = "a signal, or another rank's request in the store"
    AGREEMENT = "all ranks agree on the last step"
    CUT_OFF = "an evaluation was cut off: all ranks end at its step"


NEXT_PHASE = {
    (Phase.TRAINING, Event.REQUEST): Phase.REQUESTED,
    (Phase.TRAINING, Event.CUT_OFF): Phase.DECIDED,
    (Phase.REQUESTED, Event.AGREEMENT): Phase.DECIDED,
    (Phase.REQUESTED, Event.CUT_OFF): Phase.DECIDED,
}
"""In every other case the phase stays."""


class Stage(enum.IntEnum):
    """The part of its work that this process has come to; it only rises."""

    LISTENING = 0
    """It trains, and obeys signals."""
    LEAVING = 1
    """It ends with a failure that it still has to report: no later signal must end it."""
    OVER = 2
    """It ignores signals; it still answers the requests of other ranks."""
    CLOSED = 3
    """It answers nobody."""


class StopController:
    """Decides after which step training stops. It handles signals inside `listening` only."""

    def __init__(self) -> None:
        self.limit = NEVER
        """Training asks `allows` before it goes beyond this step. It may be a proposal that
        training has passed."""
        self.last_step = NEVER
        """The agreed last step. Valid once `allows()` has returned for it."""
        self.goes_on = False
        """Whether other processes take over there at once, in another number. Valid as `last_step`
        is."""
        self.others_follow: Callable[[], bool] = bool
        """Returns whether this process stops only because hosts join or leave, where no launcher
        says so through `status`."""
        self.phase = Phase.TRAINING
        self.stage = Stage.LISTENING
        self.requested = threading.Event()
        """Set by the first request. It wakes the second thread."""
        self.settled = threading.Event()
        """Set once the last step is known, for which training waits at the limit."""
        self.deciding = threading.Lock()
        """Held while `phase`, `limit` and `last_step` change together."""
        self.agreeing: threading.Thread | None = None
        self.signal_number = 0
        self.status = RankStatus()
        self.patience_seconds = 0.0
        self.leave: Callable[[int], Any] = os._exit

    def allows(self, step: int) -> bool:
        """Whether training continues after `step` steps. At the limit this waits until the last
        step is known.

        Raises PeersLostError if `end_waiting` was called before it was.
        """
        if step >= self.limit:
            self.settled.wait()
        return step < self.limit

    @contextlib.contextmanager
    def listening(
        self,
        status: RankStatus,
        world: World,
        store: Store | None,
        patience_seconds: float,
        leave: Callable[[int], Any],
    ) -> Iterator[None]:
        """A context in which a signal to any rank stops all ranks. Enter it in the main thread.

        After it this rank still answers requests of others.

        status: its `step` must be set before training calls `allows`.
        store: over a connection of its own, since a blocked connection blocks all its users; None
            for one process.
        patience_seconds: the longest wait for an agreement. After that, and on a second request,
            this process calls `leave(exit code)`.
        """
        self.patience_seconds = patience_seconds
        self.leave = leave
        self.status = status
        numbers = stop_signals()
        write_end = self._receive(numbers)
        self.agreeing = threading.Thread(
            target=self.agree, args=(status, world, store), daemon=True
        )
        self.agreeing.start()
        status.heeds_stop = 1
        completed = False
        try:
            yield
            completed = True
        finally:
            is_leaving = self.stage is Stage.LEAVING
            self._rise(Stage.OVER)
            status.heeds_stop = 0
            # A late request has nothing to stop if the run is done, or has failed and only
            # completes a checkpoint.
            ignores = completed or status.saving or is_leaving
            for number in numbers:
                signal.signal(number, signal.SIG_IGN if ignores else signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.close(write_end)

    def _receive(self, numbers: Sequence[signal.Signals]) -> int:
        """Start the thread that reads signals. Returns the end of the pipe that they are written
        to."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in numbers:  # without a handler the interpreter does not write the number
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._read_signals, args=(read_end,), daemon=True).start()
        return write_end

    def leave_after_report(self) -> None:
        """Let the failure of this process decide how it ends, whatever is requested; a signal that
        comes before the report is ignored."""
        self._rise(Stage.LEAVING)

    def close(self) -> None:
        """Answer no more requests of others, for a process that continues when the run is over: the
        store ends with the run."""
        self._rise(Stage.CLOSED)
        self.requested.set()
        if self.agreeing:
            self.agreeing.join(1.0)

    def _rise(self, stage: Stage) -> None:
        self.stage = max(self.stage, stage)

    def _advance(self, event: Event) -> None:
        """Take the stop to its next phase. To be called with `deciding` held."""
        self.phase = NEXT_PHASE.get((self.phase, event), self.phase)
        if self.phase is Phase.DECIDED:
            self.settled.set()

    def request_stop(self, number: int) -> None:
        """Request a stop of all ranks.

        number: the signal that caused it.
        """
        if self.requested.is_set():
            return
        self.signal_number = number
        with self.deciding:
            self._advance(Event.REQUEST)
        timer = threading.Timer(self.patience_seconds, self._leave_without_agreement)
        timer.daemon = True
        timer.start()
        self.requested.set()

    def propose_step(self, status: RankStatus) -> int:
        """Set `limit` to a step that training has not passed, and that it will stop at to ask, and
        return it.

        Training writes `status.step` and then reads `limit`; this writes `limit` and then reads
        `status.step` again. If the step has not changed, the next read of `limit` by training sees
        the new value.
        """
        while True:
            step = status.step
            with self.deciding:
                if self.phase is Phase.DECIDED:  # `end_at`: other ranks still wait for an answer
                    return self.last_step
                self.limit = step + 1
            if status.step == step:
                return step + 1

    def end_at(self, step: int) -> None:
        """End training here, after `step` steps, whatever the ranks agree on.

        To be called by all of them alike: an evaluation that a stop has cut off shows on each.
        """
        with self.deciding:
            self.last_step = self.limit = step
            self._advance(Event.CUT_OFF)

    def _read_signals(self, read_end: int) -> None:
        """Turn signals into requests until the pipe is closed. The first thread."""
        first = math.inf
        while byte := os.read(read_end, 1):
            number = byte[0]
            if number not in SIGNALS:  # SIGCHLD, for one
                continue
            now = time.monotonic()
            if now - first > SAME_REQUEST_SECONDS:
                self.leave(exit_code(number))
            elif first == math.inf:
                first = now
                log.info("asked to stop by %s", signal.Signals(number).name)
                self.request_stop(number)
        os.close(read_end)

    def agree(self, status: RankStatus, world: World, store: Store | None) -> None:
        """Wait until any rank requests a stop, then agree with all ranks on the last step. The
        second thread."""
        try:
            self._wait_for_request(store)
            if self.stage is Stage.CLOSED:
                return
            step = self.propose_step(status)
            if self.others_follow():
                status.goes_on = 1
            goes_on = bool(status.goes_on)
            if store:
                step, goes_on = agreed_step(step, self.signal_number, world, store, goes_on)
            with self.deciding:
                self.goes_on = goes_on
                if self.phase is Phase.REQUESTED:
                    # `last_step` before `limit`: training that passes `allows` must find it
                    self.last_step = step
                    self.limit = step
                    self._advance(Event.AGREEMENT)
            if self.phase is Phase.DECIDED:
                log.info("asked to stop; agreed on step %d", self.last_step)
        except RuntimeError as error:
            # the store is gone: the run is over, or rank 0, which serves it, has ended
            if self.stage is Stage.LISTENING:
                log.info("ranks can no longer agree on a stop: %s", error)

    def _wait_for_request(self, store: Store | None) -> None:
        """Wait for a signal to this process, or for another rank's request in the store."""
        while not self.requested.wait(LOOK_SECONDS if store else None):
            if store and store.check([REQUEST]):
                self.request_stop(int(store.get(REQUEST)))

    def _leave_without_agreement(self) -> None:
        is_waiting = self.phase is Phase.REQUESTED and self.stage is Stage.LISTENING
        if is_waiting and not self.status.goes_on:
            log.error(
                "the ranks did not agree on a last step within %g s: exiting without saving",
                self.patience_seconds,
            )
            self.leave(exit_code(self.signal_number))


def stop_signals() -> list[signal.Signals]:
    """The signals that request a stop, except those that this process was started to ignore, as by
    nohup."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def exit_code(number: int) -> int:
    """The exit code of a process that signal `number` stopped before it could save."""
    if number in (signal.SIGINT, signal.SIGHUP):
        return INTERRUPTED
    return UNSAVED


def agreed_step(
    proposed_step: int, number: int, world: World, store: Store, goes_on: bool = False
) -> tuple[int, bool]:
    """The largest step that any rank proposes, and rank 0's `goes_on`. Waits for all ranks, without
    a limit.

    number: the signal, which is passed on to ranks that have not received it.
    """
    store.set(REQUEST, str(number))
    store.set(f"{EARLIEST}/{world.rank}", str(proposed_step))
    if world.is_leader:
        keys = [f"{EARLIEST}/{rank}" for rank in range(world.size)]
        _wait_for(keys, store)
        last_step = max(int(store.get(key)) for key in keys)
        store.set(AGREED, f"{last_step} {int(goes_on)}")
    _wait_for([AGREED], store)
    step, leader_goes_on = map(int, store.get(AGREED).split())
    return step, bool(leader_goes_on)


def _wait_for(keys: list[str], store: Store) -> None:
    while not store.check(keys):
        time.sleep(AGREE_SECONDS)


def ignore_signals() -> None:
    """Ignore stop signals in a loader process, which its rank needs until the agreed step is done.

    Agents signal whole process groups, loader processes included.
    """
    signal.set_wakeup_fd(-1)  # inherited by fork: it would write to the rank's pipe
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
