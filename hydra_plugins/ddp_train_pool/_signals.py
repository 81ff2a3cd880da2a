"""Stop signals of a sweep: recorded while jobs run, and handed on to them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from hydra_plugins.ddp_train_pool._jobs import SIGNALS, Job

KILLING = 3
"""The number of signals from which on jobs are killed."""


class StopSignals:
    """Signals that the process of a sweep has received. The handlers only record them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._handed_on = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals inside, and restore the previous handlers."""
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        # nohup ignores SIGHUP, and so does a sweep under it
        recorded = [number for number in SIGNALS if handlers[number] != signal.SIG_IGN]
        for number in recorded:
            signal.signal(number, lambda number, _: self.received.append(number))
        try:
            yield
        finally:
            for number in recorded:
                signal.signal(number, handlers[number])

    def hand_on(self, jobs: list[Job]) -> None:
        """Send jobs the newest signal that they have not had; the third one kills them."""
        if len(self.received) == self._handed_on:
            return
        self._handed_on = len(self.received)
        number = self.received[-1]
        if self._handed_on >= KILLING:
            number = signal.SIGKILL
        for job in jobs:
            job.send(number)

    def raise_first(self) -> None:
        """Raise the first signal again, for the handler of before.

        That raises KeyboardInterrupt, or ends this process.
        """
        if self.received:
            signal.raise_signal(self.received[0])
