"""Standard output and error without a reader: `python launch.py | head -1`, a closed terminal, a
full disk."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import Any, TextIO

log = logging.getLogger(__name__)


class TolerantStream:
    """A text stream whose write errors do not raise: the run continues and its output is lost (logs
    still have it)."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            return self._discard(error, len(text))

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._discard(error, 0)

    def _discard(self, error: OSError, count: int) -> int:
        """Redirect the stream to /dev/null, since buffered text would fail again at exit. Returns
        `count`."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)
        quiet = isinstance(error, BrokenPipeError)  # the reader closed the pipe on purpose
        log.log(logging.INFO if quiet else logging.WARNING, "output is lost: %s", error)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that was closed before the start (`>&-`).

    Otherwise the next file or socket would get its number, and all that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def tolerate_closed_streams() -> None:
    """Wrap standard output and standard error in `TolerantStream`, for the rest of this process."""
    open_closed_streams()
    sys.stdout = TolerantStream(sys.stdout)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stderr = TolerantStream(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]


def show_stack_on_request() -> None:
    """Write the launcher's stack on SIGUSR2, as workers do: without that the signal would end the
    run. To be called after `tolerate_closed_streams`."""
    faulthandler.register(signal.SIGUSR2, 2)
