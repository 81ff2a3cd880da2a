"""The stop signals of a launcher: what was received, and when it is time to hurry. Torch-free."""

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


class StopRequests:
    """The stop signals that the launcher has received. The handlers only record them."""

    def __init__(self, program_ends: bool = False) -> None:
        """program_ends: after `listening`. A later signal, which has nothing to stop, must not hide
        the exit code."""
        self.program_ends = program_ends
        self.received: list[int] = []
        self.repeated = False
        """Whether a second request came: end at once."""
        self._first_time = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Records all stop signals inside; restores the previous handlers after it, if the program
        continues."""
        before = {number: signal.signal(number, self._record) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.program_ends else handler)

    def forward(self) -> None:
        """Raises the first signal again for the previous handler, if there was one. Call it after
        `listening`."""
        handler = signal.getsignal(self.received[0]) if self.received else None
        if callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(self.received[0])

    def _record(self, number: int, _: object) -> None:
        self._first_time = self._first_time or time.monotonic()
        self.repeated = time.monotonic() - self._first_time > SAME_REQUEST_SECONDS
        self.received.append(number)

    def exit_code(self, code: int) -> int:
        """INTERRUPTED if the first signal came from a terminal (SIGINT, SIGHUP), else `code` (SAVED
        or UNSAVED)."""
        if self.received and exit_code(self.received[0]) == INTERRUPTED:
            return INTERRUPTED
        return code

    def print_stopped(
        self, config: Config, saved: bool, translate: Callable[[str], str] = str
    ) -> None:
        """Says that the run was stopped, and how to continue, where no worker has. translate: see
        `Workload`."""
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # the cursor, which rank 0's progress bar has hidden
        by = f" by {signal.Signals(self.received[0]).name}" if self.received else ""
        if saved or places(Path(str(config.run_dir))):
            how = "" if saved else " before it could save"
            text = f"stopped{by}{how}; {config.words_to_resume} resumes from its last checkpoint"
        else:
            text = f"stopped{by}; nothing was saved"
        print(translate(text), file=sys.stderr)
