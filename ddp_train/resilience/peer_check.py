"""Under torchrun nobody watches all hosts: after a collective failed, those who are left find out who is not.

Each of them answers in the store, and reads the answers of all some seconds later. A rank that hangs cannot answer.
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

STORE_SECONDS = 2.0
"""For all that is asked of the store: one whose host was cut off answers never, not even with an error."""


def announce(store: Store, world: World) -> None:
    """Says on which host this rank is. At the start, when everybody is there."""
    store.delete_key(f"roll_call/{world.rank}")  # of an earlier attempt, where hosts share a store
    store.set(f"host/{world.rank}", socket.gethostname())


def answer(store: Store, world: World, status: RankStatus) -> bool:
    """Says that this rank is alive, and where it is. Returns whether the store has it."""
    key = f"roll_call/{world.rank}"

    def write() -> bool:
        store.set(key, json.dumps([status.step, status.phase]))
        return store.check([key])  # writing alone succeeds on a connection whose other end is gone

    return bool(_in_time(write))


def blame(failure: Failure, error: BaseException, store: Store, world: World) -> Failure:
    """The failure of this rank, laid at the door of those who gave no answer, or of the last in line.

    A collective that timed out is a hang (exit code 71); one that broke off is not (70).
    """

    def read() -> dict[int, tuple[str, list[Any] | None]]:
        return {
            rank: (
                store.get(f"host/{rank}").decode(),
                json.loads(store.get(f"roll_call/{rank}")) if store.check([f"roll_call/{rank}"]) else None,
            )
            for rank in range(world.size)
        }

    roll = _in_time(read)
    if roll is None:
        culprit, host, step, phase = 0, store_address(), None, "unknown"
        said = f"the store at {host} gives no answer: the host of rank 0 is gone, or cut off"
    elif absent := [rank for rank, (_, place) in roll.items() if place is None]:
        culprit, host, step, phase = absent[0], roll[absent[0]][0], None, "unknown"
        said = " and ".join(f"rank {rank} on {roll[rank][0]}" for rank in absent) + " did not answer the roll call"
    else:
        places = {rank: StatusSnapshot(1, place[0], 0, place[1]) for rank, (_, place) in roll.items() if place}
        culprit = min(places, key=lambda rank: places[rank].progress)
        host, step, phase = roll[culprit][0], places[culprit].step, places[culprit].phase
        said = f"all ranks answered the roll call; the last is rank {culprit} on {host}, in {places[culprit].where}"
    named: dict[str, Any] = {"rank": culprit, "host": host, "step": step, "phase": phase}
    if is_timeout(error):
        named |= {"kind": HangError.kind, "exit_code": HangError.exit_code}
    remedy = "look at that process, its host and its log; raise launch.timeout_seconds if it is only slow"
    log = str(Path(failure.log).with_name(f"rank_{culprit}.log"))
    return dataclasses.replace(failure, **named, detail=f"{said}; {failure.detail}", remedy=remedy, log=log)


def _in_time(ask: Callable[[], Any]) -> Any:
    """What the store says, None if it says nothing in time."""
    said: list[Any] = []

    def try_it() -> None:
        try:
            said.append(ask())
        except (dist.DistError, RuntimeError):  # gone: that is an answer too
            return

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return said[0] if said else None
