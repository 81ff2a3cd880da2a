"""A host is lost: what the survivors leave in the run directory for the processes that follow.
Torch-free.

No launcher watches several hosts, and the store may die with one of them. The survivors agree
through files alone: one after the other they look whether their step is saved, and save it if not.
The kernel, or the file server, passes the lock on when the one that holds it dies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_train.resilience import run_lock
from ddp_train.resilience.whole_files import write_text

FILE = "lost.json"
LOCK = "survivors.lock"
LOCK_SECONDS = 10.0
"""The longest that a survivor waits for another one. torchrun's agent kills it 30 s after it has
told it to stop."""
log = logging.getLogger(__name__)


@contextlib.contextmanager
def one_at_a_time(run_dir: Path) -> Iterator[None]:
    """A context that one survivor at a time is in. One that has waited too long enters too:
    checkpoints are renamed into place whole."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(run_lock.acquire(run_dir / LOCK, LOCK_SECONDS))
        except run_lock.LockHeldError as error:
            log.warning("%s is still held by %s; waiting no longer", run_dir / LOCK, error)
        yield


def note_loss(run_dir: Path, step: int | None = None, rank: int | None = None) -> None:
    """Note the last step that a survivor had completed, or which rank was lost.

    To be called by one process at a time. The first loss since a step was done counts for its time
    and its rank, the highest step for what was reached.
    """
    if step is None and not (run_dir / FILE).exists():
        return  # before training: nothing is lost
    noted_before = _read(run_dir) or {"rank": None, "step": 0, "time": time.time()}
    first_rank = noted_before["rank"]
    content = {
        "rank": rank if first_rank is None else first_rank,
        "step": max(noted_before["step"], step or 0),
        "time": noted_before["time"],
    }
    write_text(run_dir / FILE, json.dumps(content))


def noted_loss(run_dir: Path) -> dict[str, Any] | None:
    """The loss that was noted, with the keys of `lost_ranks.Loss`; None if none was."""
    content = _read(run_dir)
    if content:
        seconds_ago = max(0.0, time.time() - content["time"])
        content["at"] = time.monotonic() - seconds_ago
    return content


def forget_loss(run_dir: Path) -> None:
    """Remove the note, once a step was done again."""
    (run_dir / FILE).unlink(missing_ok=True)


def _read(run_dir: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((run_dir / FILE).read_text())
        return {
            "rank": content["rank"],
            "step": int(content["step"]),
            "time": float(content["time"]),
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read: %s; the lost steps are not counted", run_dir / FILE, error)
        return None
