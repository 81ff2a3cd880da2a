"""The place of a rank in which it keeps a step, in memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_train.recovery.kept_layout import Layout, Views, packed
from ddp_train.resilience.kept_memory import KeptMemory, Record, StepPlaces

Numbers = tuple[float, ...] | Tensor
"""Numbers that change with each step; on a GPU [Record.NUMBERS], float64."""


class State(Protocol):
    """A state whose tensors are copied, by one layout as long as it is the same object.

    Tensors of the same shapes may come in the places of others.
    """

    @property
    def tree(self) -> Any:
        """The plain part, which stays, with a `KeptTensor` in the place of each tensor."""
        ...

    @property
    def common(self) -> list[Tensor]:
        """The tensors that are the same on all ranks: each keeps a share of them."""
        ...

    @property
    def own(self) -> Callable[[], list[Tensor]]:
        """A function that returns the tensors that each rank keeps by itself."""
        ...

    def layout(self, ranks: int) -> Layout:
        """Where each of `ranks` ranks keeps which of the tensors."""
        ...


@dataclass(frozen=True)
class KeptRecords:
    """Where one of the two places of a rank is, and how the ranks share what they keep."""

    places: StepPlaces
    rank: int
    ranks: int
    state: Record
    beside: Record

    @classmethod
    def of(cls, memory: KeptMemory, places: StepPlaces, rank: int, ranks: int) -> KeptRecords:
        return cls(
            places=places,
            rank=rank,
            ranks=ranks,
            state=memory.record(rank, places.state),
            beside=memory.record(rank, places.beside),
        )


class KeptStep:
    """One of the two places of a rank in which it keeps a step."""

    def __init__(self, records: KeptRecords) -> None:
        self.records = records
        self.mark: int | None = None
        """The mark of the state that was written last, see `state_mark`."""
        self.written: State | None = None
        """The state whose tree is written here."""
        self.here: list[int] = []
        """The numbers of the common tensors that this rank keeps."""
        self.sources: list[Tensor] = []
        """These tensors."""
        self.targets: list[Tensor] = []
        """Their places, and those of the tensors that this rank alone has."""

    @property
    def places(self) -> StepPlaces:
        return self.records.places

    def wait(self) -> None:
        """Wait until what was written is whole."""

    def wait_for_all(self, memory: KeptMemory) -> None:
        """Wait until it is whole in the memory of all ranks of the host.

        On the CPU it is: the gradients of this step came from ranks that had kept the last one.
        """

    def open(self) -> None:
        """Take the mark away, before the content changes."""
        self.records.state.open()

    def drop(self) -> None:
        """Keep nothing, until the next step is written."""
        self.wait()
        self.records.state.open()
        self.records.beside.open()
        self.mark = None

    def write(
        self, mark: int, state: State, numbers: Numbers = (), beside: bytes | None = None
    ) -> None:
        """Keep a state, behind `open`.

        mark: see `state_mark`.
        beside: see `StepPlaces`; None if there is nothing.
        """
        if self.written is state:
            self.sources = [state.common[number] for number in self.here]
        if self.written is not state or self._have_moved():
            self._lay_out(state)
        if beside is not None:
            self.records.beside.open()
            self.records.beside.text = beside
            self.records.beside.complete(mark)
        self.mark = mark
        self._copy(mark, state, numbers)

    def _copy(self, mark: int, state: State, numbers: Numbers) -> None:
        """Copy the tensors and the numbers, and set the mark."""
        sources = [*self.sources, *state.own()]
        if sources:  # of few tensors a rank may have none to keep
            with torch.no_grad():
                torch._foreach_copy_(self.targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        assert not isinstance(numbers, Tensor), "they are on the host"
        record = self.records.state
        record.set_numbers(*numbers)
        record.complete(mark)

    def _have_moved(self) -> bool:
        """Whether sources lie elsewhere than when their copies were laid out.

        On the CPU that is no matter: each copy looks where they are.
        """
        return False

    def _lay_out(self, state: State) -> None:
        """Write the tree, and find the places of the tensors that this rank keeps."""
        records = self.records
        layout = state.layout(records.ranks)
        records.state.text = packed((state.tree, layout))
        views = self._views(layout)
        owners = enumerate(layout.owners)
        self.here = [number for number, owner in owners if owner == records.rank]
        self.sources = [state.common[number] for number in self.here]
        self.targets = [views.common(number) for number in self.here]
        self.targets += [views.own(number) for number in range(len(layout.own))]
        self.written = state

    def _views(self, layout: Layout) -> Views:
        return Views.on_host(self.records.state, layout, self.records.rank)
