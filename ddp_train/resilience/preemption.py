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
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ddp_train.distributed.world import World
from ddp_train.errors import PeersLostError
from ddp_train.resilience.failure_report import RankStatus

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SAVED = 75
UNSAVED = 143
INTERRUPTED = 130
"""Exit codes: stopped and saved (EX_TEMPFAIL of sysexits.h: try again); stopped before it could
save; by Ctrl-C."""
SAME_REQUEST_SECONDS = 0.5
"""Signals within this time are one request: SLURM and systemd signal every process, and agents
forward theirs."""
LOOK_SECONDS = 0.25
AGREE_SECONDS = 0.02
"""Polling intervals of the store: for a request; for the answers of all ranks. A look takes 0.05
ms."""
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


class StopController:
    """Decides after which step training stops. It handles signals inside `listening` only."""

    def __init__(self) -> None:
        self.limit = NEVER
        """Training asks `allows` before it goes beyond this step. It may be a proposal that
        training has passed."""
        self.last_step = NEVER
        """Agreed last step. Valid once `allows()` has returned for it."""
        self.goes_on = False
        """Whether other processes take over there at once, in another number. Valid as `last_step`
        is."""
        self.others_follow: Callable[[], bool] = bool
        """Says whether it stops only because hosts join or leave, where no launcher tells that
        through `status`."""
        self.requested = threading.Event()
        self.is_agreed = threading.Event()
        self.deciding = threading.Lock()
        self.is_over = threading.Event()
        self.is_leaving = False
        """Whether this process ends by itself, and has a failure to report before."""
        self.is_closed = False
        self.is_in_vain = False
        """Whether a rank was lost before all had agreed."""
        self.agreeing: threading.Thread | None = None
        self.signal_number = 0
        self.status = RankStatus()
        self.patience_seconds = 0.0
        self.leave: Callable[[int], Any] = os._exit

    def allows(self, step: int) -> bool:
        """Whether training continues after `step` steps. At the limit it waits until the last step
        is agreed. Raises PeersLostError if `end_waiting` was called before it was."""
        if step >= self.limit:
            self.is_agreed.wait()
            if self.is_in_vain:
                raise PeersLostError
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
        """Inside, a signal to any rank stops all ranks. Enter it in the main thread.

        After it this rank still answers requests of others. status: its `step` must be set before
        training calls `allows`. store: over a connection of its own, since a blocked connection
        blocks all its users; None for one process. patience_seconds: the longest wait for an
        agreement; after that, and on a second request, this process calls `leave(exit code)`.
        """
        self.patience_seconds = patience_seconds
        self.leave = leave
        self.status = status
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        handled = stop_signals()
        for number in handled:
            signal.signal(
                number, lambda *_: None
            )  # without a handler the interpreter does not write the number
        self.agreeing = threading.Thread(
            target=lambda: self.agree(status, world, store), daemon=True
        )
        for thread in (
            threading.Thread(target=lambda: self._read_signals(read_end), daemon=True),
            self.agreeing,
        ):
            thread.start()
        status.heeds_stop = 1
        completed = False
        try:
            yield
            completed = True
        finally:
            self.is_over.set()
            status.heeds_stop = 0
            # A late request has nothing to stop if the run is done, or has failed and only
            # completes a checkpoint.
            if completed or status.saving or self.is_leaving:
                handler = signal.SIG_IGN
            else:
                handler = signal.SIG_DFL
            for number in handled:
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            os.close(write_end)

    def close(self) -> None:
        """Answers no more requests of others, if this process goes on when the run is over: their
        store ends."""
        self.is_closed = True
        self.requested.set()
        if self.agreeing:
            self.agreeing.join(1.0)

    def request_stop(self, number: int) -> None:
        """Requests a stop of all ranks. number: the signal that caused it."""
        if not self.requested.is_set():
            timer = threading.Timer(self.patience_seconds, self._leave_without_agreement)
            timer.daemon = True
            timer.start()
            self.signal_number = number
            self.requested.set()

    def propose_step(self, status: RankStatus) -> int:
        """Sets `limit` to a step that training has not passed, and that it will stop at to ask.
        Returns it.

        Training writes `status.step` and then reads `limit`; this writes `limit` and then reads
        `status.step` again. If the step has not changed, the next read of `limit` by training sees
        the new value.
        """
        while True:
            step = status.step
            with self.deciding:
                if self.is_agreed.is_set():  # `end_at`: other ranks still wait for an answer
                    return self.last_step
                self.limit = step + 1
            if status.step == step:
                return step + 1

    def end_at(self, step: int) -> None:
        """Ends training here, after `step` steps, whatever the ranks agree on. To be called by all
        of them alike: an evaluation that a stop has cut off shows on each."""
        with self.deciding:
            self.last_step = self.limit = step
            self.is_agreed.set()

    def end_waiting(self) -> None:
        """From any thread, once a rank is lost: its answer will not come, and who waits for that is
        in no collective that would fail."""
        with self.deciding:
            self.is_in_vain = not self.is_agreed.is_set()
            self.is_agreed.set()

    def _read_signals(self, read_end: int) -> None:
        """The first thread: turns signals into requests until the pipe is closed."""
        first = math.inf
        while byte := os.read(read_end, 1):
            if byte[0] not in SIGNALS:  # SIGCHLD, for one
                continue
            now = time.monotonic()
            if now - first > SAME_REQUEST_SECONDS:
                self.leave(exit_code(byte[0]))
            elif first == math.inf:
                first = now
                log.info("asked to stop by %s", signal.Signals(byte[0]).name)
                self.request_stop(byte[0])
        os.close(read_end)

    def agree(self, status: RankStatus, world: World, store: Store | None) -> None:
        """The second thread: waits until any rank requests a stop, then agrees with all ranks on
        the last step."""
        try:
            while not self.requested.wait(LOOK_SECONDS if store else None):
                if store and store.check([REQUEST]):
                    self.request_stop(int(store.get(REQUEST)))
            if self.is_closed:
                return
            step = self.propose_step(status)
            if self.others_follow():
                status.goes_on = 1
            goes_on = bool(status.goes_on)
            if store:
                step, goes_on = agreed_step(step, self.signal_number, world, store, goes_on)
            with self.deciding:
                self.goes_on = goes_on
                if not self.is_agreed.is_set():
                    self.last_step = (
                        step  # before `limit`: training that passes `allows` must find it
                    )
                    self.limit = step
                    self.is_agreed.set()
            if not self.is_in_vain:
                log.info("asked to stop; agreed on step %d", self.last_step)
        except (
            RuntimeError
        ) as error:  # the store is gone: the run is over, or rank 0, which serves it, has ended
            if not self.is_over.is_set():
                log.info("ranks can no longer agree on a stop: %s", error)

    def _leave_without_agreement(self) -> None:
        if not self.is_agreed.is_set() and not self.is_over.is_set() and not self.status.goes_on:
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
        proposals = [f"{EARLIEST}/{rank}" for rank in range(world.size)]
        _wait_for(proposals, store)
        store.set(AGREED, f"{max(int(store.get(key)) for key in proposals)} {int(goes_on)}")
    _wait_for([AGREED], store)
    step, other_number = map(int, store.get(AGREED).split())
    return step, bool(other_number)


def _wait_for(keys: list[str], store: Store) -> None:
    while not store.check(keys):
        time.sleep(AGREE_SECONDS)


def ignore_signals() -> None:
    """Ignores stop signals in a loader process, which its rank needs until the agreed step is done.

    Agents signal whole process groups, loader processes included.
    """
    signal.set_wakeup_fd(-1)  # inherited by fork: it would write to the rank's pipe
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
