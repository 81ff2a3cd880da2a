"""One sweep at a time in a directory: a lock as that of a run."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from ddp_train.config.external_checks import unwritten
from ddp_train.errors import ConfigError
from ddp_train.linux import state_of
from ddp_train.resilience import run_lock

REMAINS_SECONDS = 20.0
"""For what is left of a sweep that was killed to end: a process with CUDA takes seconds."""


@contextlib.contextmanager
def alone(sweep_dir: Path) -> Iterator[None]:
    """Holds the directory of a sweep. Raises ConfigError if another sweep does."""
    path = sweep_dir / run_lock.FILE
    try:
        held = run_lock.acquire(path, REMAINS_SECONDS if _is_left_behind(path) else 0.0)
    except run_lock.LockHeldError as error:
        remedy = "wait for it, stop it, or name another run_dir"
        raise ConfigError(
            [f"run_dir={sweep_dir}: another sweep is in it, {error}; {remedy}"]
        ) from None
    except OSError as error:
        raise unwritten(sweep_dir, error) from None
    try:
        yield
    finally:
        held.release()


def _is_left_behind(lock: Path) -> bool:
    """Whether whoever took a lock on this host is dead: processes of a sweep that was killed hold
    it until they end."""
    owner = run_lock.owner(lock)
    return owner.get("host") == socket.gethostname() and state_of(int(owner["pid"])) in ("", "Z")
