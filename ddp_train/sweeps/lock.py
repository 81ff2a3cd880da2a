"""The lock of a sweep's directory, as that of a run: one sweep at a time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from ddp_train.config.run_directory import unwritten
from ddp_train.errors import ConfigError
from ddp_train.linux import state_of
from ddp_train.resilience import run_lock
from ddp_train.text import shell_word

REMAINS_SECONDS = 20.0
"""Time for the processes of a killed sweep to end: one with CUDA takes seconds."""


@contextlib.contextmanager
def sweep_lock(sweep_dir: Path) -> Iterator[None]:
    """Hold the directory of a sweep. Raises ConfigError if another sweep does."""
    path = sweep_dir / run_lock.FILE
    patience = REMAINS_SECONDS if _owner_is_dead(path) else 0.0
    try:
        lock = run_lock.acquire(path, patience)
    except run_lock.LockHeldError as error:
        elsewhere = shell_word("run_dir", f"{sweep_dir}_new")
        remedy = f"wait until that sweep ends, stop it, or use {elsewhere}"
        raise ConfigError(
            [f"run_dir={sweep_dir}: another sweep is in it, {error}; {remedy}"]
        ) from None
    except OSError as error:
        raise unwritten(sweep_dir, error) from None
    try:
        yield
    finally:
        lock.release()


def _owner_is_dead(path: Path) -> bool:
    """Whether the owner of a lock on this host is dead: its processes hold it until they end."""
    owner = run_lock.owner(path)
    return owner.get("host") == socket.gethostname() and state_of(int(owner["pid"])) in ("", "Z")
