"""Where the hosts of a run meet once the host of `launch.rdzv_endpoint` is lost. Torch-free.

torchrun's rendezvous is a store on one host. With a range of hosts the launchers of the others,
which share the run directory, name another host: the first to enter. The file holds for as long as
that host's launcher lives.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

from ddp_train.resilience import run_lock
from ddp_train.resilience.whole_files import write_text

FILE = "meeting_point.json"
LOCK = "meeting_point.lock"
LOCK_SECONDS = 30.0
CONNECT_SECONDS = 2.0


def is_reachable(endpoint: str) -> bool:
    """Whether something listens there. Asked twice: a packet may be lost."""
    name, _, port = endpoint.rpartition(":")
    for _ in range(2):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((name, int(port)), CONNECT_SECONDS),
        ):
            return True
        time.sleep(0.5)
    return False


def chosen(run_dir: Path) -> str | None:
    """The endpoint that the launchers of a running run have chosen; None if they have not."""
    try:
        found = json.loads((run_dir / FILE).read_text())
        held = run_dir / "hosts" / found["host"]
        alive = run_lock.is_held(held) and run_lock.owner(held).get("id") == found["id"]
        return str(found["endpoint"]) if alive else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose(run_dir: Path, lost: str, here: str) -> str:
    """Another endpoint than the lost one: `here`, unless another launcher was faster. Raises
    LockHeldError."""
    lock = run_lock.acquire(run_dir / LOCK, LOCK_SECONDS)
    try:
        if (other := chosen(run_dir)) and other != lost:
            return other
        host = socket.gethostname()
        owner = run_lock.owner(run_dir / "hosts" / host)
        write_text(
            run_dir / FILE, json.dumps({"endpoint": here, "host": host, "id": owner.get("id")})
        )
        return here
    finally:
        lock.release()
