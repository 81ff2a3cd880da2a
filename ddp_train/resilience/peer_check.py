"""Under torchrun no process watches all hosts: after a failed collective the ranks find out which
of them is missing.

Each rank that saw the failure writes its position into the store, and reads those of all ranks some
seconds later. A rank that hangs writes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.environment import store_address
from ddp_train.distributed.world import World
from ddp_train.errors import HangError
from ddp_train.resilience.failure_report import Failure, is_timeout
from ddp_train.resilience.heartbeat import RankStatus, StatusSnapshot

HOST = "host"
POSITION = "peer_check"
STORE_SECONDS = 2.0
"""Limit of each access to the store: if its host was cut off, a request neither returns nor
fails."""


def register(store: Store, world: World) -> None:
    """Writes the host of this rank into the store, at the start, when all ranks are present."""
    store.delete_key(
        f"{POSITION}/{world.rank}"
    )  # of an earlier attempt, if several hosts share a store
    store.set(f"{HOST}/{world.rank}", socket.gethostname())


def respond(store: Store, world: World, status: RankStatus) -> bool:
    """Writes this rank's step and phase into the store. Returns whether the store has them."""
    key = f"{POSITION}/{world.rank}"

    def write() -> bool:
        store.set(key, json.dumps([status.step, status.phase]))
        return store.check(
            [key]
        )  # writing alone succeeds even if the other end of the connection is gone

    return bool(_within_limit(write))


def attribute_failure(
    failure: Failure, error: BaseException, store: Store, world: World
) -> Failure:
    """Attributes this rank's failure to the first rank that did not respond, else to the one that
    is furthest behind.

    error: what the collective raised here. A time-out is a hang (exit code 71), a broken connection
    is not (70).
    """

    def read() -> dict[int, tuple[str, list[Any] | None]]:
        return {
            rank: (
                store.get(f"{HOST}/{rank}").decode(),
                json.loads(store.get(f"{POSITION}/{rank}"))
                if store.check([f"{POSITION}/{rank}"])
                else None,
            )
            for rank in range(world.size)
        }

    found = _within_limit(read)
    if found is None:
        culprit = 0
        host = store_address()
        step = None
        phase = "unknown"
        finding = f"the store at {host} does not respond: the host of rank 0 is down or cut off"
    elif missing := [rank for rank, (_, position) in found.items() if position is None]:
        culprit = missing[0]
        host = found[missing[0]][0]
        step = None
        phase = "unknown"
        ranks = " and ".join(f"rank {rank} on {found[rank][0]}" for rank in missing)
        finding = f"{ranks} did not respond to the peer check"
    else:
        positions = {
            rank: StatusSnapshot(1, at[0], 0, at[1]) for rank, (_, at) in found.items() if at
        }
        culprit = min(positions, key=lambda rank: positions[rank].progress)
        host = found[culprit][0]
        step = positions[culprit].step
        phase = positions[culprit].phase
        finding = (
            f"all ranks responded to the peer check; rank {culprit} on {host} is furthest behind, "
            f"in {positions[culprit].where}"
        )
    changes: dict[str, Any] = {"rank": culprit, "host": host, "step": step, "phase": phase}
    if is_timeout(error):
        changes |= {"kind": HangError.kind, "exit_code": HangError.exit_code}
    return dataclasses.replace(
        failure,
        **changes,
        detail=f"{finding}; {failure.detail}",
        remedy="look at that rank's host and log; if it is only slow, raise launch.timeout_seconds",
        log=str(Path(failure.log).with_name(f"rank_{culprit}.log")),
    )


def _within_limit(access: Callable[[], Any]) -> Any:
    """The result of an access to the store; None if it fails or takes longer than STORE_SECONDS."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(access())
        except (dist.DistError, RuntimeError):  # the store is gone
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return results[0] if results else None
