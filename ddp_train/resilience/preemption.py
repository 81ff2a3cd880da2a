"""An agreed stop: one process is told to stop, and all of them stop training after one and the same step.

A Python signal handler never runs while its process waits in a collective, so nothing happens in one here. Two threads
serve each process. One waits where the interpreter's C handler leaves the numbers of signals, and never touches the
network, which a stopped peer can block. The other looks a few times a second whether any process wants to stop, and
agrees on the step through the key-value store. There is no collective for it, and a training step pays a comparison.
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
from ddp_train.resilience.failure_report import RankStatus

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SAVED, UNSAVED, INTERRUPTED = 75, 143, 130
"""Exit codes: stopped and saved (EX_TEMPFAIL of sysexits.h: try again); stopped before it could save; by Ctrl-C."""
SAME_REQUEST_SECONDS = 0.5
"""Signals this close together are one request: SLURM and systemd signal every process, agents hand on theirs."""
LOOK_SECONDS, AGREE_SECONDS = 0.25, 0.02
"""Between two looks at the store: has anybody asked; have all answered. A look takes 0.05 ms."""
REQUEST, EARLIEST, AGREED = "stop/request", "stop/earliest", "stop/agreed"
NEVER = sys.maxsize
log = logging.getLogger(__name__)


class Store(Protocol):
    """What is asked of the key-value store: of torch's, whose keys all processes share."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class StopController:
    """Where training must stop. By itself it is a brake that nobody can pull; `listening` listens to signals."""

    def __init__(self) -> None:
        self.limit = NEVER
        """Training goes no further than this without asking. It may be a guess that training has passed already."""
        self.last_step = NEVER
        """The step after which all stop. Whoever has come so far, by the leave of `allows`, sees it."""
        self.requested, self.is_agreed, self.is_over = threading.Event(), threading.Event(), threading.Event()
        self.number, self.patience_seconds = 0, 0.0
        self.leave: Callable[[int], Any] = os._exit

    def allows(self, step: int) -> bool:
        """Whether training goes on after `step` steps. Who has reached the limit waits for the agreement."""
        if step >= self.limit:
            self.is_agreed.wait()
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
        """Inside, a signal to any process stops all; later this one still answers the others. In the main thread.

        position: its `step` must be set before training asks how far it may go. store: with a connection of its own,
        since a blocked one blocks all who share it; None where there is one process. patience_seconds: after that long
        without an agreement this process leaves, by `leave(exit code)`, as it does at a second request.
        """
        self.patience_seconds, self.leave = patience_seconds, leave
        numbers, arriving = os.pipe()
        os.set_blocking(arriving, False)
        signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)
        listened = heard()
        for number in listened:
            signal.signal(number, lambda *_: None)  # without a handler the interpreter does not note the number
        for work in (lambda: self._listen(numbers), lambda: self.agree(status, world, store)):
            threading.Thread(target=work, daemon=True).start()
        completed = False
        try:
            yield
            completed = True
        finally:
            self.is_over.set()
            # A late request has nothing to stop where all is done, or where a failed process only writes what it has.
            afterwards = signal.SIG_IGN if completed or status.saving else signal.SIG_DFL
            for number in listened:
                signal.signal(number, afterwards)
            signal.set_wakeup_fd(-1)
            os.close(arriving)

    def request_stop(self, number: int) -> None:
        """Asks for a stop, in the name of a signal."""
        if not self.requested.is_set():
            patience = threading.Timer(self.patience_seconds, self._give_up)
            patience.daemon = True
            patience.start()
            self.number = number
            self.requested.set()

    def propose_step(self, status: RankStatus) -> int:
        """Sets a limit that training has not passed and will see. Returns it.

        Training writes `status.step` and then reads `limit`; this writes `limit` and then reads `status.step`
        again. If that has not moved, the next one to read `limit` finds it.
        """
        while True:
            step = status.step
            self.limit = step + 1
            if status.step == step:
                return self.limit

    def _listen(self, numbers: int) -> None:
        first = math.inf
        while byte := os.read(numbers, 1):
            if byte[0] not in SIGNALS:  # SIGCHLD, for one
                continue
            now = time.monotonic()
            if now - first > SAME_REQUEST_SECONDS:
                self.leave(exit_code(byte[0]))
            elif first == math.inf:
                first = now
                log.info("asked to stop by %s", signal.Signals(byte[0]).name)
                self.request_stop(byte[0])
        os.close(numbers)

    def agree(self, status: RankStatus, world: World, store: Store | None) -> None:
        """Waits until some process asks for a stop, and agrees with all of them on the step. In a thread of its own."""
        try:
            while not self.requested.wait(LOOK_SECONDS if store else None):
                if store and store.check([REQUEST]):
                    self.request_stop(int(store.get(REQUEST)))
            propose_step = self.propose_step(status)
            self.last_step = self.limit = (
                agreed_step(propose_step, self.number, world, store) if store else propose_step
            )
            self.is_agreed.set()
            log.info("asked to stop; agreed on step %d", self.last_step)
        except RuntimeError as error:  # the store is gone: the run is over, or the process that served it
            if not self.is_over.is_set():
                log.info("no stop can be agreed on any more: %s", error)

    def _give_up(self) -> None:
        if not self.is_agreed.is_set() and not self.is_over.is_set():
            log.error("no agreement on a stop within %g s: leaving without it", self.patience_seconds)
            self.leave(exit_code(self.number))


def heard() -> list[signal.Signals]:
    """The signals that ask for a stop, without those that this process was started to ignore, as nohup does."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def exit_code(number: int) -> int:
    """Of a process that a signal stopped before it could save."""
    return INTERRUPTED if number in (signal.SIGINT, signal.SIGHUP) else UNSAVED


def agreed_step(propose_step: int, number: int, world: World, store: Store) -> int:
    """The largest of all processes' claims. Waits for them, for as long as it takes."""
    store.set(REQUEST, str(number))
    store.set(f"{EARLIEST}/{world.rank}", str(propose_step))
    if world.is_leader:
        claims = [f"{EARLIEST}/{rank}" for rank in range(world.size)]
        _wait_for(claims, store)
        store.set(AGREED, str(max(int(store.get(key)) for key in claims)))
    _wait_for([AGREED], store)
    return int(store.get(AGREED))


def _wait_for(keys: list[str], store: Store) -> None:
    while not store.check(keys):
        time.sleep(AGREE_SECONDS)


def ignore_signals() -> None:
    """For a process that serves one that was told to stop: it is needed until the agreed step is done.

    Agents signal whole process groups, in which loader processes are.
    """
    signal.set_wakeup_fd(-1)  # inherited by fork: it would report to the other's listener
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
