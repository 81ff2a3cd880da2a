"""Requests for another number of processes, on the side of the launcher. Torch-free.

`ddp-train resize` sends them.
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

MESSAGE_SECONDS = 1.0
"""How long either side may take to send or accept a message. The answer to a request comes when the
change is done."""
MAX_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Request:
    """A request that was accepted and has not been answered."""

    count: int
    connection: socket.socket
    at: float
    """When it came, by `time.monotonic`."""
    time: float
    """The same moment by `time.time`."""


class RequestListener:
    """Accepts requests, one at a time."""

    def __init__(self, run_dir: Path, refusal: Callable[[int], str]) -> None:
        """refusal: says why there cannot be that many processes; empty if there can."""
        self.refusal = refusal
        self.pending: Request | None = None
        owner = run_lock.owner(run_dir / run_lock.FILE)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address_of(owner))
        self.listener.listen()

    def wait(self, seconds: float) -> None:
        """Wait for a request, and accept or refuse it."""
        readable, _, _ = select.select([self.listener], [], [], seconds)
        if not readable:
            return
        connection, _ = self.listener.accept()
        try:
            _, user = peer_of(connection)
            if user not in (os.geteuid(), 0):
                raise PermissionError("another user")
            count = int(receive(connection)["processes"])
        except (OSError, ValueError, KeyError, TypeError):  # a lost connection, another message
            connection.close()
            return
        reason = self.refusal(count)
        if self.pending:
            processes = counted(self.pending.count, "process")
            reason = f"the run is changing to {processes} already; ask again when it has done so"
        if reason:
            _send_answer(connection, False, reason)
        else:
            self.pending = Request(count, connection, time.monotonic(), time.time())

    def answer(self, done: bool, text: str) -> None:
        """Answer the request that is pending, if there is one."""
        if self.pending:
            _send_answer(self.pending.connection, done, text)
            self.pending = None

    def close(self) -> None:
        self.answer(False, "the run ended before the change; run its command again to resume it")
        self.listener.close()


def _send_answer(connection: socket.socket, done: bool, text: str) -> None:
    with connection, contextlib.suppress(OSError):  # the other end may be gone
        connection.settimeout(MESSAGE_SECONDS)
        connection.sendall(json.dumps({"done": done, "text": text}).encode() + b"\n")


def receive(connection: socket.socket, seconds: float | None = MESSAGE_SECONDS) -> dict[str, Any]:
    """A line of JSON. Raises OSError or ValueError."""
    connection.settimeout(seconds)
    with connection.makefile("rb") as stream:
        message = json.loads(stream.readline(MAX_MESSAGE_BYTES))
    if not isinstance(message, dict):
        raise ValueError("not a mapping")
    return message


def address_of(owner: dict[str, str]) -> str:
    """The address of the launcher that holds a run's lock. owner: see `run_lock.owner`."""
    return f"\0ddp-train-{owner.get('id')}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user
