"""A function run in a forked child process, for checks that may block for ever on a file server or
a driver.

Torch-free. A thread would not do: a process cannot exit while one of its threads waits in the
kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from ddp_train.linux import end_with_parent, state_of
from ddp_train.text import first_line

END_SECONDS = 2.0
"""Time limit for a process to exit after SIGKILL. One that waits in the kernel for a device (state
D) does not exit."""


class NoAnswerError(Exception):
    """The check did not finish in time. `str(error)` gives the time and says whether its process is
    still there."""


class IsolatedCheck:
    """A call check(*arguments) in a child process. Its return value comes back as JSON, dataclasses
    as dicts."""

    def __init__(self, check: Callable[..., Any], *arguments: Any) -> None:
        self.began = time.monotonic()
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_in_child(writer, check, arguments)
        os.close(writer)

    def answer(self, deadline: float) -> Any:
        """The return value. May be called once; a result written before the deadline can be read
        after it.

        deadline: in time.monotonic() seconds. Raises NoAnswerError if there is no result by then,
        RuntimeError if the check raised an exception or its process died.
        """
        text = self._read(deadline)
        waited = f"no answer within {time.monotonic() - self.began:.0f} s"
        state = self._kill()
        if text is None:
            survives = f", and process {self.pid} survives SIGKILL (state {state})" if state else ""
            raise NoAnswerError(waited + survives)
        if not text:
            raise RuntimeError("the process of this check died")
        succeeded, value = json.loads(text)
        if not succeeded:
            raise RuntimeError(value)
        return value

    def _read(self, deadline: float) -> bytes | None:
        """Everything the child wrote until it closed the pipe, None if it did not close it by the
        deadline."""
        ready = select.poll()
        ready.register(self.reader, select.POLLIN)
        text = b""
        try:
            while ready.poll(1000 * max(0.0, deadline - time.monotonic())):
                part = os.read(self.reader, 2**16)
                if not part:
                    return text
                text += part
            return None
        finally:
            os.close(self.reader)

    def _kill(self) -> str:
        """Send SIGKILL. Returns the process state (one letter) if it survives END_SECONDS, else an
        empty string."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                return state_of(self.pid)
            time.sleep(0.005)
        return ""


def _run_in_child(writer: int, check: Callable[..., Any], arguments: tuple[Any, ...]) -> NoReturn:
    """Run the check, write [succeeded, value] as JSON, exit. Closes every other descriptor of the
    parent."""
    try:
        end_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in {0, 1, 2} - {writer}:
            os.dup2(null, descriptor)
        os.closerange(3, writer)
        os.closerange(max(3, writer + 1), os.sysconf("SC_OPEN_MAX"))
        try:
            text = json.dumps([True, check(*arguments)], default=asdict)
        except Exception as error:  # noqa: BLE001  reported by the parent
            text = json.dumps([False, f"{type(error).__name__}: {first_line(error)}"])
        with contextlib.suppress(BrokenPipeError), open(writer, "w") as pipe:
            pipe.write(text)
    finally:
        os._exit(0)
