"""The connections of a process to its peers, and how to break them: a collective that waits ends with an error then."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_of_groups: set[int] = set()
"""The sockets that process groups have opened, by number."""


@contextlib.contextmanager
def noting_sockets() -> Iterator[None]:
    """Around the making of a process group. The store's connection, trackers' and loaders' are not among them."""
    before = _sockets()
    yield
    _of_groups.update(_sockets() - before)


def _sockets() -> set[int]:
    """The numbers of the sockets that this process has open; none where there is no /proc."""
    try:
        return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.is_socket()}
    except OSError:
        return set()


def break_connections() -> None:
    """Ends every collective of this process with an error, from any thread, and lets those of its peers fail too.

    gloo fails only the pair whose socket broke: who waits for a living peer that has given up itself waits until the
    timeout. `ProcessGroup.abort` does nothing for gloo (torch 2.13 and 2.15). The listening socket must stay open:
    without it gloo's own thread ends the process by SIGABRT.
    """
    for number in _of_groups:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:  # no socket, or closed
            if one.type == socket.SOCK_STREAM and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)  # never close: gloo owns the number
