"""Which rank is named under torchrun, where no process watches all."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ddp_train.distributed.world import World
from ddp_train.resilience import peer_check
from ddp_train.resilience.failure import (
    failure_from,
)
from ddp_train.resilience.heartbeat import RankStatus
from tests.support.ranks import on_ranks


def place_in_line(world: World) -> Any:
    """What each rank makes of a time-out; all of them answer."""
    store = dist.distributed_c10d._get_default_store()
    status = RankStatus(step=7, phase="backward")
    if world.rank == 2:
        status.phase = "data"
    peer_check.register(store, world)
    dist.barrier()
    error = RuntimeError("Timed out waiting 6000ms for recv operation to complete")
    failure = failure_from(error, world.rank, status, Path("logs/rank_0.log"), "")
    assert peer_check.respond(store, world, status)
    dist.barrier()  # in place of the patience of a worker
    return peer_check.attribute_failure(failure, error, store, world)


def test_the_peer_check_names_the_rank_furthest_behind() -> None:
    for failure in on_ranks(3, place_in_line):
        assert (failure.kind, failure.rank, failure.step, failure.phase) == ("hang", 2, 7, "data")
        assert failure.log == "logs/rank_2.log"


def test_a_lost_store_points_at_the_host_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    wishes = (
        "This is typically caused by a remote worker crashing. Check the logs of the remote worker."
        " GLHF!"
    )
    error = RuntimeError(f"Connection closed by peer [10.0.0.1]:1234. {wishes}")
    failure = failure_from(
        error, 1, RankStatus(step=3, phase="backward"), Path("logs/rank_1.log"), ""
    )
    store = mock.Mock(
        **{
            "get.side_effect": dist.DistNetworkError("gone"),
            "set.side_effect": dist.DistStoreError("x"),
        }
    )
    assert not peer_check.respond(store, World(1, 2, 0, 1), RankStatus())
    failure = peer_check.attribute_failure(failure, error, store, World(1, 2, 0, 1))
    assert (failure.kind, failure.exit_code, failure.rank, failure.host) == ("peer", 70, 0, "node0")
    assert "does not respond" in failure.detail and "closed by peer" in failure.detail
    assert "GLHF" not in failure.detail
