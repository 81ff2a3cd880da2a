"""Standard output and standard error that may go away: `python launch.py | head -1`, a closed terminal, a full disk."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

log = logging.getLogger(__name__)


class Output:
    """A text stream that nobody may be reading any more. The run goes on, what it says is lost; its log has it too."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            return self._lost(error, len(text))

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._lost(error, 0)

    def _lost(self, error: OSError, count: int) -> int:
        """From now on into nothing: whatever is still buffered would fail again at exit."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.stream.fileno())
        os.close(nothing)
        quiet = isinstance(error, BrokenPipeError)  # the reader has seen enough: no news to him
        log.log(logging.INFO if quiet else logging.WARNING, "output is lost: %s", error)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def tolerate_closed_streams() -> None:
    """Of standard output and standard error, for the rest of this process."""
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
