"""The lock of a run directory: an flock, which the kernel releases when its holder dies. The file
names the holder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ddp_train.errors import OwnershipLostError

FILE = "lock.json"
POLL_SECONDS = 0.1


@dataclass
class Lock:
    """A lock that this process holds until `release`, or until it ends."""

    file: TextIO

    def release(self) -> None:
        self.file.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LockHeldError(Exception):
    """Another process holds the lock; `str(error)` names it."""


def acquire(path: Path, timeout_seconds: float = 0.0) -> Lock:
    """Lock the file `path`, which is created if it does not exist.

    Raises LockHeldError if another process holds it for longer than `timeout_seconds`, and OSError
    if the file cannot be created or the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise LockHeldError(described(owner(path))) from None
            time.sleep(POLL_SECONDS)
        except OSError:
            file.close()
            raise
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "id": os.urandom(8).hex(),
    }
    file.truncate(0)
    file.write(json.dumps(holder))
    file.flush()
    os.fsync(file.fileno())
    return Lock(file)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def owner(path: Path) -> dict[str, str]:
    """pid, host, since and id of the last holder. Empty if there was none, or while the holder is
    still writing it."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def described(holder: dict[str, str]) -> str:
    """A holder, for a message."""
    pid = holder.get("pid", "?")
    host = holder.get("host", "?")
    since = holder.get("since", "?")
    return f"process {pid} on {host}, since {since}"


def check_owner(run_dir: Path, expected: dict[str, str]) -> None:
    """Raise OwnershipLostError if the owner of the run directory is no longer `expected`.

    A lock can be lost without notice: a network file system gives it to another host if this one
    was cut off for longer than the lease (NFSv4: 90 s). When this host is back, it must not write
    any more. Whoever takes the lock writes the file: if there is none, somebody has removed it, and
    nobody has taken over.
    """
    path = run_dir / FILE
    now = owner(path)
    if now != expected and path.exists():
        raise OwnershipLostError(
            f"{run_dir} belongs to another run now: {described(now)}",
            "leave the folder to that run, which resumes from the checkpoints there; this"
            " process has written nothing since",
        )
