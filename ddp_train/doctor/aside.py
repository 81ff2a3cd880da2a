"""What may wait without end, for a file server or a driver, goes on in a child process that can be left behind.

Torch-free. A thread would not do: while one waits in the kernel, its process cannot end.
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
"""For a process to die of SIGKILL. One that waits in the kernel for a device (state D) does not."""


class StuckError(Exception):
    """There was no answer in time. `str(error)` says how long that was, and whether the process is there still."""


class Aside:
    """look(*arguments) in a child process, from now on. What it returns comes as JSON, dataclasses as their values."""

    def __init__(self, look: Callable[..., Any], *arguments: Any) -> None:
        self.began = time.monotonic()
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _tell(writer, look, arguments)
        os.close(writer)

    def answer(self, deadline: float) -> Any:
        """What it returned; to be asked once. deadline: by time.monotonic; what is there by then can be had later too.

        Raises StuckError if there is none, RuntimeError if it raised anything or died.
        """
        said = self._read(deadline)
        waited = f"no answer within {time.monotonic() - self.began:.0f} s"
        state = self._end()
        if said is None:
            raise StuckError(waited + (f", and process {self.pid} does not die (state {state})" if state else ""))
        if not said:
            raise RuntimeError("the process that looked died")
        well, value = json.loads(said)
        if not well:
            raise RuntimeError(value)
        return value

    def _read(self, deadline: float) -> bytes | None:
        """All that it says, None if that takes too long."""
        ready, said = select.poll(), b""
        ready.register(self.reader, select.POLLIN)
        try:
            while ready.poll(1000 * max(0.0, deadline - time.monotonic())):
                part = os.read(self.reader, 2**16)
                if not part:
                    return said
                said += part
            return None
        finally:
            os.close(self.reader)

    def _end(self) -> str:
        """The state in which it goes on in spite of SIGKILL; empty if it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                return state_of(self.pid)
            time.sleep(0.005)
        return ""


def _tell(writer: int, look: Callable[..., Any], arguments: tuple[Any, ...]) -> NoReturn:
    """In the child: looks, tells, ends. It keeps nothing open that somebody else may wait for."""
    try:
        end_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in {0, 1, 2} - {writer}:
            os.dup2(null, descriptor)
        os.closerange(3, writer)
        os.closerange(max(3, writer + 1), os.sysconf("SC_OPEN_MAX"))
        try:
            said = json.dumps([True, look(*arguments)], default=asdict)
        except Exception as error:  # noqa: BLE001  it is told to the parent
            said = json.dumps([False, f"{type(error).__name__}: {first_line(error)}"])
        with contextlib.suppress(BrokenPipeError), open(writer, "w") as pipe:
            pipe.write(said)
    finally:
        os._exit(0)
