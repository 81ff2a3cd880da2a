"""Memory of GPUs that the launcher holds for its workers, by the descriptors that they send it.
Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

MESSAGE_BYTES = 256


@dataclass(frozen=True)
class Held:
    """The memory of one place of a rank."""

    descriptor: int
    device: int
    size: int
    """In bytes."""


def held_name(rank: int, place: int) -> str:
    """The variable under which the descriptor of a place is handed on."""
    return f"DDP_TRAIN_HELD_{rank}_{place}"


def send(connection: socket.socket, rank: int, place: int, held: Held) -> None:
    """Hand memory to the launcher, in place of what it held for that place before."""
    message = json.dumps([rank, place, held.device, held.size]).encode()
    socket.send_fds(connection, [message], [held.descriptor])


class HeldDevices:
    """The launcher's side."""

    def __init__(self) -> None:
        self.connection, self.workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.connection.setblocking(False)
        self.held: dict[tuple[int, int], Held] = {}
        """By rank and place."""

    def take(self) -> None:
        """Take over what workers have sent."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors, *_ = socket.recv_fds(self.connection, MESSAGE_BYTES, 1)
                rank, place, device, size = json.loads(message)
                self._let_go(rank, place)
                self.held[rank, place] = Held(descriptors[0], device, size)

    def let_go(self, held: Mapping[tuple[int, int], Held]) -> None:
        """Give memory back, unless a worker has put other memory in its place."""
        for (rank, place), one in held.items():
            if self.held.get((rank, place)) is one:
                self._let_go(rank, place)

    def forget(self) -> None:
        """Give all memory back."""
        self.take()
        for rank, place in list(self.held):
            self._let_go(rank, place)

    def close(self) -> None:
        self.forget()
        self.connection.close()
        self.workers_end.close()

    def _let_go(self, rank: int, place: int) -> None:
        held = self.held.pop((rank, place), None)
        if held:
            os.close(held.descriptor)
