"""Who works in a folder: a lock that the kernel takes back when its holder dies, and a file that says who holds it."""

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
    """A lock that this process holds until `release`, or until it ends in whatever way."""

    file: TextIO

    def release(self) -> None:
        self.file.close()


class LockHeldError(Exception):
    """Somebody else holds the lock; `str(error)` says who."""


def acquire(path: Path, patience_seconds: float = 0.0) -> Lock:
    """Locks `path`, a file that is made if need be, waiting so long for another holder to go.

    Raises LockHeldError if it does not, and OSError where there can be no such file or the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    deadline = time.monotonic() + patience_seconds
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
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now, "id": os.urandom(8).hex()}))
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
    """What the last holder wrote: pid, host, since, id. Empty if nobody did, or is just about to."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def described(who: dict[str, str]) -> str:
    """An owner, for a message."""
    return f"process {who.get('pid', '?')} on {who.get('host', '?')}, since {who.get('since', '?')}"


def check_owner(run_dir: Path, expected: dict[str, str]) -> None:
    """Raises OwnershipLostError if the run directory has changed hands since its owner was `expected`.

    A lock can be lost without a word: a network file system gives it to another host when this one was cut off for
    longer than the lease (NFSv4: 90 s). Whoever comes back from there must not write any more.
    """
    now = owner(run_dir / FILE)
    if now != expected:
        raise OwnershipLostError(
            f"{run_dir} belongs to another run now: {described(now)}",
            "nothing was written; that run goes on from the checkpoints that are there",
        )
