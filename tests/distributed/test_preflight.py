"""Processes that no launcher has started meet, or each says who is missing."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed import preflight
from ddp_train.distributed.preflight import meet, wait_for_leader
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError


def test_all_ranks_hear_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "NOTE_SECONDS", 0.05)
    store = HashStore()
    heard: list[str] = []

    def enter(rank: int) -> None:
        try:
            meet(store, World(rank, 3, rank, 3), 0.3)
        except PeerError as error:
            heard.append(str(error))

    second = threading.Thread(target=enter, args=[1])
    second.start()
    enter(0)
    second.join()
    assert len(heard) == 2 and heard[0] == heard[1]
    assert "rank 2 of 3 did not respond within 0.3 s" in heard[0]
    assert capsys.readouterr().err == "note: rank 0 waits for rank 2 of 3, for 0 s at most\n"


def test_all_ranks_meet() -> None:
    store = HashStore()
    second = threading.Thread(target=meet, args=[store, World(1, 2, 1, 2), 5.0])
    second.start()
    meet(store, World(0, 2, 0, 2), 5.0)
    second.join(5.0)
    assert not second.is_alive()


def test_a_rank_without_rank_0_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "NOTE_SECONDS", 0.05)
    with pytest.raises(OSError, match="refused"):
        wait_for_leader(World(1, 2, 1, 2), "127.0.0.1", 9, 0.2)
    told = "note: rank 1 of 2 waits for rank 0 at 127.0.0.1:9, for 0 s at most\n"
    assert capsys.readouterr().err == told
