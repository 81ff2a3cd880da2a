"""Processes that no launcher has started meet, or each says who is missing; those that differ in
what must be the same are refused."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed import preflight
from ddp_train.distributed.preflight import meet, wait_for_leader
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, LaunchError, PeerError
from tests.support.commands import (
    LAUNCH,
    SMALL,
    read,
    run,
    torchrun,
)
from tests.support.ranks import on_ranks


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


def compare(world: World, folder: str, change: dict[str, Any]) -> tuple[type, str, str]:
    """The preflight on one of three processes; `change` holds what one of them has otherwise."""
    here = change.get(world.rank, {})
    patches = [
        mock.patch.object(preflight, name, value) for name, value in here.items() if name != "words"
    ]
    port_file = Path(folder, "port")
    if world.is_leader:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.write_text(str(store.port))
    dist.barrier()
    if not world.is_leader:
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False)
    frozen = Path(folder, "config.yaml")
    frozen.write_text("frozen")
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            preflight.agree(store, world, here.get("words", ["seed=1"]), frozen, "frozen", 20.0)
        except LaunchError as error:
            return type(error), str(error), error.remedy
        finally:
            dist.barrier()  # rank 0 serves the store
    return type(None), "", ""


def compared(tmp_path: Path, **change: Any) -> tuple[type, str, str]:
    """What all three say alike if rank 2 is different."""
    answers = on_ranks(3, compare, str(tmp_path), {2: change})
    assert len(set(answers)) == 1, answers
    return answers[0]


def other_digest() -> str:
    return "0123456789ab"


class Late:
    """A clock that is a minute behind."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() - 60


def test_processes_that_agree_may_train(tmp_path: Path) -> None:
    assert compared(tmp_path)[0] is type(None)


def test_differing_words_are_refused_by_key_and_both_values(tmp_path: Path) -> None:
    kind, detail, _ = compared(tmp_path, words=["seed=2", "train.epochs=3"])
    host = os.uname().nodename
    assert kind is ConfigError
    assert (
        f"seed=1 on rank 0 ({host}), seed=2 on rank 2 ({host}): use the same overrides on all hosts"
        in detail
    )
    assert f"no train.epochs on rank 0 ({host}), train.epochs=3 on rank 2" in detail


@pytest.mark.parametrize(
    ("change", "name", "value", "remedy"),
    [
        (
            {"source_digest": other_digest},
            "ddp_train",
            "0123456789ab",
            "check out the same version",
        ),
        ({"time": Late}, "clock", "-60 s", "synchronise the clocks"),
    ],
)
def test_differing_processes_are_refused_with_a_table(
    change: dict[str, Any], name: str, value: str, remedy: str, tmp_path: Path
) -> None:
    kind, detail, advice = compared(tmp_path, **change)
    assert kind is PeerError
    heading, titles, *rows = detail.splitlines()
    assert heading == f"the processes differ in {name}"
    assert titles.split() == ["rank", "host", name]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert rows[2].endswith(value) and not rows[1].endswith(value)
    assert remedy in advice


@pytest.mark.slow
@pytest.mark.timeout(300)  # the machine may be busy
def test_a_world_smaller_than_asked_for_is_refused(tmp_path: Path) -> None:
    """What torchrun does to a host whose clock is behind: it starts without it, and exits with
    0."""
    lone = [torchrun()[0], "--nproc_per_node=2", "--no-python", "env", "PET_NNODES=2", *LAUNCH]
    done = run(f"run_dir={tmp_path}/run", *SMALL, "train.max_steps=2", command=lone)
    assert done.returncode == 1
    assert "torchrun was asked for 2 hosts, but started 1: " + os.uname().nodename in done.stderr
    failure = read(tmp_path / "run", "failure.json")
    assert (failure["kind"], failure["exit_code"], failure["step"]) == ("peer", 69, 0)
    assert not (tmp_path / "run/metrics.jsonl").exists()
