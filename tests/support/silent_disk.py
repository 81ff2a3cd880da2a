"""A file server that takes every request and answers none: a FUSE file system, as root. Who asks
waits in the kernel.

Once a request was taken not even SIGKILL ends the process that waits (state D), until the server is
gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_train.linux import end_with_parent

INIT = 26  # linux/fuse.h, as all that follows
IN_HEADER = "IIQQIIII"
OUT_HEADER = "IiQ"
INIT_OUT = "IIIIHHIIHHI28x"
MOST_BYTES = 2**17
LIMIT_SECONDS = 60
"""Then it is gone, also where a test that went wrong waits for it."""


def why_none() -> str:
    """Why there can be none here; empty if there can."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs root and /dev/fuse"
    return ""


def silent_disk(folder: Path) -> Callable[[], Any]:
    """Mounts it at `folder`, in this process's mounts. It is gone when this process is, and who
    waits for it too.

    `folder`.asked is there as soon as somebody has asked for anything.
    """

    def prepare() -> None:
        folder.mkdir()
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                end_with_parent()
                _serve(folder, writer)
            finally:
                os._exit(1)
        os.close(writer)
        assert os.read(reader, 1), "the file system could not be mounted"

    return prepare


def _serve(folder: Path, mounted: int) -> None:
    signal.alarm(LIMIT_SECONDS)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"silent", str(folder).encode(), b"fuse", 0, options) == 0, os.strerror(
        ctypes.get_errno()
    )
    os.write(mounted, b"x")
    while True:
        request = os.read(device, MOST_BYTES + 4096)
        _, kind, unique, *_ = struct.unpack_from(IN_HEADER, request)
        if kind == INIT:
            body = struct.pack(INIT_OUT, 7, 31, 0, 0, 12, 10, MOST_BYTES, 1, 32, 0, 0)
            os.write(device, struct.pack(OUT_HEADER, 16 + len(body), 0, unique) + body)
        else:
            folder.with_suffix(".asked").touch()
