"""The connections of a process to its peers, and how to break them: a collective that waits ends
then.

gloo's ends with an error. NCCL's ends as if it had succeeded, with garbage, and so do all that are
queued behind it: a flag that is set before says so, to kernels and to the host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_train.errors import PeersLostError

_group_sockets: set[int] = set()
"""The sockets that process groups have opened, by number."""
_breaking = threading.Lock()
_stop_flag: list[StopFlag] = []
"""The flag of this process, once there is one."""


class _HostMemory:
    """float32 numbers in pinned host memory, by their address there, which kernels may read
    (unified addressing)."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<f4",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


class StopFlag:
    """A number that is 1 from before an abort of collectives, once peers are lost: it keeps what
    they left out of the weights.

    It lies in host memory, where a kernel reads it when it runs. A copy to the device would not get
    there: it waits until the queue of launches has room, and that is full behind the collective
    that never ends (two H200, torch 2.11).
    """

    def __init__(self, device: str) -> None:
        self.host = torch.zeros((), pin_memory=True)
        self.on_device: Tensor = torch.as_tensor(_HostMemory(self.host), device=device)

    @property
    def is_set(self) -> bool:
        return bool(self.host)


def watch_for_losses(device: str) -> StopFlag | None:
    """Let the host check a flag after each collective of this package that it reads, from here on.

    Returns the flag of this process, for the kernels that update weights; None if they could not
    read it.
    """
    if not _stop_flag:
        flag = StopFlag(device)
        if flag.on_device.data_ptr() != flag.host.data_ptr():  # a copy, which would be 0 for ever
            return None
        _stop_flag.append(flag)
    return _stop_flag[0]


def check_peers() -> None:
    """Raise PeersLostError once connections are broken on purpose. Without a flag for that, as
    on CPUs, this does nothing."""
    if _stop_flag and _stop_flag[0].is_set:
        raise PeersLostError


def trusted(tensor: Tensor) -> Tensor:
    """The result of a collective, unchanged. Where losses are watched for, this waits for the
    device, and raises PeersLostError if the collective may have been aborted."""
    if _stop_flag and tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
        check_peers()
    return tensor


@contextlib.contextmanager
def noting_sockets() -> Iterator[None]:
    """A context that notes the sockets that a process group opens.

    The connections of the store, of trackers and of loaders are not among them.
    """
    before = _sockets()
    yield
    _group_sockets.update(_sockets() - before)


def _sockets() -> set[int]:
    """The numbers of the sockets that this process has open; none where there is no /proc."""
    try:
        return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.is_socket()}
    except OSError:
        return set()


def break_connections() -> None:
    """End every collective of this process, from any thread, and let those of its peers fail too.

    gloo fails only the pair whose socket broke: a rank that waits for a living peer that has given
    up itself waits until the timeout. `ProcessGroup.abort` does nothing for gloo (torch 2.13 and
    2.15). The listening socket must stay open: without it gloo's own thread ends the process by
    SIGABRT.

    NCCL is aborted by a thread that nobody waits for: it comes to an end only when the last
    captured graph with a collective is gone (two H200, torch 2.11). Kernels end within milliseconds
    each.
    """
    if not _stop_flag:
        _shut_sockets()
        return
    with _breaking:
        if _stop_flag[0].is_set:
            return
        _stop_flag[0].host.fill_(1)
    # All groups at once: one after the other they would wait for each other (pytorch#119797,
    # nccl#1013).
    threading.Thread(
        target=dist.distributed_c10d._abort_process_group, name="abort", daemon=True
    ).start()


def _shut_sockets() -> None:
    for number in _group_sockets:
        # OSError: it is not a socket, or closed.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if copy.type == socket.SOCK_STREAM and not is_listening:
                copy.shutdown(socket.SHUT_RDWR)  # never close: gloo owns the number
