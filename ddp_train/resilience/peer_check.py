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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.environment import store_address
from ddp_train.distributed.world import World
from ddp_train.errors import HangError
from ddp_train.resilience.failure import Failure, is_timeout
from ddp_train.resilience.heartbeat import RankStatus, StatusSnapshot

HOST = "host"
POSITION = "peer_check"
STORE_SECONDS = 2.0
"""Limit of each access to the store: if its host was cut off, a request neither returns nor
fails."""


@dataclass(frozen=True)
class Peer:
    """Entries of the store about a rank."""

    rank: int
    host: str
    position: StatusSnapshot | None
    """Its step and phase; None if it did not respond."""


@dataclass(frozen=True)
class Culprit:
    """The rank to which a failure is attributed, and why."""

    rank: int
    host: str
    step: int | None
    phase: str
    finding: str


def register(store: Store, world: World) -> None:
    """Write the host of this rank into the store, at the start, when all ranks are present."""
    # The position may be that of an earlier attempt, if several hosts share a store.
    store.delete_key(f"{POSITION}/{world.rank}")
    store.set(f"{HOST}/{world.rank}", socket.gethostname())


def hosts_of_ranks(store: Store, world: World) -> list[str]:
    """The name of each rank's host, once all ranks are registered."""
    return [store.get(f"{HOST}/{rank}").decode() for rank in range(world.size)]


def respond(store: Store, world: World, status: RankStatus) -> bool:
    """Write this rank's step and phase into the store. Returns whether the store has them."""
    key = f"{POSITION}/{world.rank}"

    def write() -> bool:
        store.set(key, json.dumps([status.step, status.phase]))
        # Writing alone succeeds even if the other end of the connection is gone.
        return store.check([key])

    return bool(_within_limit(write))


def attribute_failure(
    failure: Failure, error: BaseException, store: Store, world: World
) -> Failure:
    """Attribute this rank's failure to the first rank that did not respond, else to the one that is
    furthest behind.

    error: what the collective raised here. A time-out is a hang (exit code 71), a broken connection
        is not (70).
    """
    peers = _within_limit(lambda: [_read_peer(store, rank) for rank in range(world.size)])
    culprit = _unreachable_store() if peers is None else find_culprit(peers)
    changes: dict[str, Any] = {}
    if is_timeout(error):
        changes = {"kind": HangError.kind, "exit_code": HangError.exit_code}
    return dataclasses.replace(
        failure,
        rank=culprit.rank,
        host=culprit.host,
        step=culprit.step,
        phase=culprit.phase,
        detail=f"{culprit.finding}; {failure.detail}",
        remedy="look at that rank's host and log; if the rank is only slow, raise"
        " launch.timeout_seconds",
        log=str(Path(failure.log).with_name(f"rank_{culprit.rank}.log")),
        **changes,
    )


def _read_peer(store: Store, rank: int) -> Peer:
    host = store.get(f"{HOST}/{rank}").decode()
    key = f"{POSITION}/{rank}"
    if not store.check([key]):
        return Peer(rank, host, None)
    step, phase = json.loads(store.get(key))
    return Peer(rank, host, StatusSnapshot(beats=1, step=step, batches=0, phase=phase))


def _unreachable_store() -> Culprit:
    host = store_address()
    finding = f"the store at {host} does not respond: the host of rank 0 is down or cut off"
    return Culprit(0, host, None, "unknown", finding)


def find_culprit(peers: list[Peer]) -> Culprit:
    """The first rank that did not respond, else the one that is furthest behind."""
    missing = [peer for peer in peers if peer.position is None]
    if missing:
        names = " and ".join(f"rank {peer.rank} on {peer.host}" for peer in missing)
        finding = f"{names} did not respond to the peer check"
        return Culprit(missing[0].rank, missing[0].host, None, "unknown", finding)
    positions = {peer: peer.position for peer in peers if peer.position}
    last, position = min(positions.items(), key=lambda item: item[1].progress)
    finding = (
        f"all ranks responded to the peer check; rank {last.rank} on {last.host} is furthest"
        f" behind, in {position.where}"
    )
    return Culprit(last.rank, last.host, position.step, position.phase, finding)


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
