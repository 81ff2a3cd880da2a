"""Memory that outlives processes: what is whole in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from ddp_train.recovery.kept_layout import Layout, shares
from ddp_train.resilience.kept_memory import TURNS, KeptMemory, Place, state_mark


@pytest.fixture
def memory() -> Iterator[KeptMemory]:
    created = KeptMemory.create(3)
    assert created
    yield created
    created.close()


def keep(memory: KeptMemory, rank: int, step: int, changed: bool = False) -> None:
    record = memory.record(rank, TURNS[step % 2].state)
    record.open()
    record.text = f"step {step}".encode()
    record.complete(state_mark(step, changed))


def test_the_newest_step_is_one_that_all_ranks_have(memory: KeptMemory) -> None:
    assert memory.newest_step(3) is None
    for rank in range(3):
        keep(memory, rank, 4)
    keep(memory, 0, 5)
    keep(memory, 2, 5)
    assert memory.newest_step(3) == 4
    keep(memory, 1, 5)
    assert memory.newest_step(3) == 5
    memory.record(1, TURNS[1].state).open()
    assert memory.newest_step(3) == 4, "what is being written does not count"


def test_what_is_forgotten_is_kept_by_no_rank(memory: KeptMemory) -> None:
    for rank in range(3):
        keep(memory, rank, 4)
        keep(memory, rank, 5)
    facts = memory.record(0, Place.FACTS)
    facts.set_numbers(0, 3)
    facts.complete(0)
    memory.forget()
    assert memory.newest_step(3) is None and memory.ranks == 0
    for rank in range(3):
        keep(memory, rank, 2)
    assert memory.newest_step(3) == 2


def test_a_state_that_hooks_changed_on_some_ranks_is_not_whole(memory: KeptMemory) -> None:
    for step in (4, 5):
        for rank in range(3):
            keep(memory, rank, step, changed=step == 4)
    assert memory.newest_step(3) == 5
    keep(memory, 1, 5, changed=True)
    assert memory.newest_step(3) == 4


def test_what_a_killed_process_has_kept_is_there(memory: KeptMemory) -> None:
    child = os.fork()
    if not child:
        keep(memory, 0, 7)
        memory.record(0, TURNS[0].state).open()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert memory.record(0, TURNS[1].state).text == b"step 7"
    assert memory.newest_step(1) == 7
    assert memory.record(0, Place.FACTS).mark is None


def test_ranks_share_what_is_common() -> None:
    sizes = [400, 100, 100, 100, 100]
    owners = shares(sizes, 2)
    kept = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in (0, 1)
    ]
    assert kept == [400, 400]
    common = [torch.zeros(10), torch.zeros(3, dtype=torch.int64), torch.zeros(())]
    layout = Layout.of([torch.zeros(5)], common, 3)
    assert sorted(layout.owners) == [0, 1, 2]
    for number, owner in enumerate(layout.owners):
        place = layout.common[number]
        assert place.begin >= common[0].new_zeros(5).nbytes, "behind what each rank has"
        assert place.begin + common[number].nbytes <= layout.sizes[owner]
