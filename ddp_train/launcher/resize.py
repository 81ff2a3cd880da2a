"""Requests for another number of processes, on the side of the launcher. `ddp-train resize` sends
them. Torch-free.

The launcher listens on a socket whose name is the random id of its lock, in the abstract namespace
of this host: the kernel removes it with the process, and knows who is at the other end. Nothing is
written to the run directory for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.resilience import run_lock
from ddp_train.text import counted

WORD_SECONDS = 1.0
"""For what one side says at once; the answer to a request comes when the change is done."""
LONGEST = 4096
_CREDENTIALS = struct.Struct("3i")


@dataclass
class Asked:
    """A request that was accepted and has not been answered yet."""

    count: int
    connection: socket.socket
    at: float
    time: float

    def answer(self, done: bool, text: str) -> None:
        _answer(self.connection, done, text)


class Requests:
    """Takes requests, one at a time."""

    def __init__(self, run_dir: Path, refusal: Callable[[int], str]) -> None:
        """refusal: why the number cannot be that; empty if it can."""
        self.refusal = refusal
        self.asked: Asked | None = None
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address(run_lock.owner(run_dir / run_lock.FILE)))
        self.listener.listen()

    def wait(self, seconds: float) -> None:
        """In place of sleeping: takes a request if one comes meanwhile."""
        if not select.select([self.listener], [], [], seconds)[0]:
            return
        connection = self.listener.accept()[0]
        try:
            if other_end(connection)[1] not in (os.geteuid(), 0):
                raise PermissionError("another user")
            count = int(received(connection)["processes"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # another user, a lost connection, other words
            connection.close()
            return
        why = self.refusal(count)
        if self.asked:
            why = (
                f"it is just changing to {counted(self.asked.count, 'process')}; ask again when"
                " that is done"
            )
        if why:
            _answer(connection, False, why)
        else:
            self.asked = Asked(count, connection, time.monotonic(), time.time())

    def answer(self, done: bool, text: str) -> None:
        """The request that was accepted, if there is one."""
        if self.asked:
            self.asked.answer(done, text)
            self.asked = None

    def close(self) -> None:
        self.answer(False, "the run ended before the change; give its command again to resume it")
        self.listener.close()


def _answer(connection: socket.socket, done: bool, text: str) -> None:
    with connection, contextlib.suppress(OSError):  # it need not be there any more
        connection.settimeout(WORD_SECONDS)
        connection.sendall(json.dumps({"done": done, "text": text}).encode() + b"\n")


def received(connection: socket.socket, seconds: float | None = WORD_SECONDS) -> dict[str, Any]:
    """A line of JSON. Raises OSError or ValueError."""
    connection.settimeout(seconds)
    with connection.makefile("rb") as stream:
        found = json.loads(stream.readline(LONGEST))
    if not isinstance(found, dict):
        raise ValueError("not a mapping")
    return found


def address(owner: dict[str, str]) -> str:
    return f"\0ddp-train-{owner.get('id')}"


def other_end(connection: socket.socket) -> tuple[int, int]:
    """Its process and its user."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user
