"""States that a rank keeps in turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ddp_train.recovery.kept_layout import Layout, Views, unpacked
from ddp_train.recovery.state_keeper import StateKeeper
from ddp_train.resilience.kept_memory import TURNS, KeptMemory


class Weights:
    """A state of two tensors that all ranks have, one that rank 0 keeps, and one of each rank."""

    tree = None

    def __init__(self) -> None:
        self.common = [torch.zeros(4), torch.zeros(3), torch.zeros(1)]
        self.buffer = torch.zeros(2)

    def own(self) -> list[Tensor]:
        return [self.buffer]

    def layout(self, ranks: int) -> Layout:
        return Layout.of(self.own(), self.common, ranks, of_leader={2})


@pytest.fixture
def memory() -> Iterator[KeptMemory]:
    created = KeptMemory.create(2)
    assert created
    yield created
    created.close()


def keep(keepers: list[StateKeeper], states: list[Weights], mark: int) -> None:
    for rank, (keeper, state) in enumerate(zip(keepers, states, strict=True)):
        for tensor in state.common:
            tensor.fill_(mark)
        state.buffer.fill_(100 * rank + mark)
        with keeper.turn() as kept:
            kept.write(mark, state, beside=f"{rank} at {mark}".encode())


def test_the_state_before_counts_while_the_next_is_written(memory: KeptMemory) -> None:
    keepers = [StateKeeper(memory, rank, 2, "cpu") for rank in range(2)]
    states = [Weights(), Weights()]
    for keeper in keepers:
        keeper.begin({})
    for mark in (1, 2, 3):
        keep(keepers, states, mark)
    assert memory.newest_state(2) == 3
    for keeper in keepers:
        keeper.take_back()
    assert memory.newest_state(2) == 2
    with keepers[0].turn() as kept:
        assert memory.newest_state(2) == 2, "it lies in the other place"
        kept.write(4, states[0])
    assert memory.newest_state(2) == 2, "rank 1 has not kept it"


def test_ranks_share_out_what_they_keep(memory: KeptMemory) -> None:
    keepers = [StateKeeper(memory, rank, 2, "cpu") for rank in range(2)]
    for keeper in keepers:
        keeper.begin({})
    keep(keepers, [Weights(), Weights()], 5)
    places = next(one for one in TURNS if memory.record(0, one.state).mark == 5)
    views = []
    for rank in range(2):
        record = memory.record(rank, places.state)
        _, layout = unpacked(record.text)
        views.append(Views.on_host(record, layout, rank))
        assert views[rank].own(0).tolist() == [100 * rank + 5] * 2
        assert memory.record(rank, places.beside).text == f"{rank} at 5".encode()
    owners = views[0].layout.owners
    assert owners[2] == 0 and set(owners) == {0, 1}
    for number, owner in enumerate(owners):
        assert set(views[owner].common(number).tolist()) == {5}
