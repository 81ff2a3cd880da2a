"""The endpoint where hosts meet once that of `launch.rdzv_endpoint` is lost. Torch-free.

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
RETRY_SECONDS = 0.5


def is_reachable(endpoint: str) -> bool:
    """Whether something listens at an endpoint. It is tried twice: a packet may be lost."""
    name, _, port = endpoint.rpartition(":")
    for _ in range(2):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((name, int(port)), CONNECT_SECONDS),
        ):
            return True
        time.sleep(RETRY_SECONDS)
    return False


def chosen(run_dir: Path) -> str | None:
    """The endpoint that the launchers of a running run have chosen; None if they have not."""
    try:
        content = json.loads((run_dir / FILE).read_text())
        host_lock = run_dir / "hosts" / content["host"]
        is_alive = (
            run_lock.is_held(host_lock) and run_lock.owner(host_lock).get("id") == content["id"]
        )
        return str(content["endpoint"]) if is_alive else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose(run_dir: Path, lost: str, here: str) -> str:
    """Choose another endpoint than the lost one, and return it.

    It is `here`, unless another launcher was faster. Raises LockHeldError.
    """
    with run_lock.acquire(run_dir / LOCK, LOCK_SECONDS):
        other = chosen(run_dir)
        if other and other != lost:
            return other
        host = socket.gethostname()
        owner = run_lock.owner(run_dir / "hosts" / host)
        content = {"endpoint": here, "host": host, "id": owner.get("id")}
        write_text(run_dir / FILE, json.dumps(content))
        return here
