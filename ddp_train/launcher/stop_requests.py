"""The stop signals that a launcher has received. Torch-free."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddp_train.checkpoints.layout import places
from ddp_train.options.schema import Config
from ddp_train.resilience.preemption import (
    INTERRUPTED,
    SAME_REQUEST_SECONDS,
    exit_code,
    stop_signals,
)

SHOW_CURSOR = "\x1b[?25h"


class StopRequests:
    """Records the stop signals of a launcher. Its handlers do nothing else."""

    def __init__(self, program_ends: bool = False) -> None:
        """Record nothing before `listening`.

        program_ends: whether the program ends after `listening`. A later signal, which has
            nothing to stop, must not hide the exit code.
        """
        self.program_ends = program_ends
        self.received: list[int] = []
        self.repeated = False
        """Whether a second request came, which asks to end at once."""
        self._first_time = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record all stop signals inside.

        Restores the previous handlers after it, if the program continues.
        """
        previous = {number: signal.signal(number, self._record) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_IGN if self.program_ends else handler)

    def forward(self) -> None:
        """Raise the first signal again for the previous handler, if there was one.

        Call it after `listening`.
        """
        handler = signal.getsignal(self.received[0]) if self.received else None
        if callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(self.received[0])

    def _record(self, number: int, _: object) -> None:
        now = time.monotonic()
        self._first_time = self._first_time or now
        self.repeated = now - self._first_time > SAME_REQUEST_SECONDS
        self.received.append(number)

    def exit_code(self, code: int) -> int:
        """The exit code of a stopped run.

        INTERRUPTED if the first signal came from a terminal (SIGINT, SIGHUP), else `code`.

        code: SAVED or UNSAVED.
        """
        if self.received and exit_code(self.received[0]) == INTERRUPTED:
            return INTERRUPTED
        return code

    def print_stopped(
        self, config: Config, saved: bool, translate: Callable[[str], str] = str
    ) -> None:
        """Print that the run was stopped, and how to continue, where no worker has.

        saved: whether this stop has saved. translate: see `Workload`.
        """
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # rank 0's progress bar has hidden it
        by = f" by {signal.Signals(self.received[0]).name}" if self.received else ""
        if saved:
            text = f"stopped{by}; {config.words_to_resume} resumes from its last checkpoint"
        elif places(Path(str(config.run_dir))):
            text = (
                f"stopped{by} before it could save; {config.words_to_resume} resumes from its last"
                " checkpoint"
            )
        else:
            text = f"stopped{by}; nothing was saved"
        print(translate(text), file=sys.stderr)
