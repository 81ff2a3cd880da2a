"""The checkpoint of a session's step that all ranks of a host have kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoints.training_state import TrainingState
from ddp_train.checkpoints.writer import Snapshot
from ddp_train.distributed.replicas import check_norms
from ddp_train.recovery.kept_layout import KeptPlace, KeptTensor, Views
from ddp_train.recovery.packing import unpacked
from ddp_train.resilience.kept_memory import KeptMemory, marked_step
from ddp_train.tasks.logged_numbers import LoggedNumbers
from ddp_train.tensor_tree import tensors


@dataclass(frozen=True)
class RankState:
    """A step as one rank has kept it, beside the tensors."""

    of_all: bytes
    """The state that is the same on all ranks, packed; see `SessionKeeper`."""
    lasting: bytes
    """The part of it that seldom changes, packed."""
    buffers: int
    """How many of its own tensors are buffers of the models: the first ones."""
    buffers_of_copies: int
    """How many of the following ones are buffers of copies of them."""
    gradients: dict[str, Any]
    """Gradients that the next step needs, by the names of their parameters, see `as_saved`."""
    norms: Tensor
    """The norms of the parameters: [n], see `distributed.replicas`."""
    logged: list[Any]
    """Rows of numbers that no exchange has, see `LoggedNumbers.kept`."""
    samples: int
    """Samples since the last exchange of numbers."""


@dataclass(frozen=True)
class Buffers:
    """Buffers of a checkpoint."""

    of_ranks: Tensor
    """The floating-point ones of each rank: [ranks, n], float64."""
    saved: list[Tensor]
    """All of them, as they stand in the weights."""


class KeptSession:
    """A session's step as all ranks of a host have kept it."""

    def __init__(
        self,
        memory: KeptMemory,
        held: Mapping[tuple[int, int], Tensor],
        ranks: int,
        mark: int,
    ) -> None:
        """
        held: the memory on GPUs by rank and place, as bytes; empty on CPUs.
        mark: see `KeptMemory.newest_state`.
        """
        self.step = marked_step(mark)
        self.views: list[Views] = []
        self.owners: list[int] = []
        """The rank that has kept each of the common tensors."""
        self.ranks: list[RankState] = []
        for rank in range(ranks):
            place = KeptPlace(memory, held, rank, mark)
            self.views.append(place.views)
            self.owners = place.layout.owners
            text = memory.record(rank, place.places.beside).text
            self.ranks.append(RankState(**unpacked(text, partial(_own, place.views))))
        first = self.ranks[0]
        self.buffers = self._buffers(0, first.buffers)
        self.buffers_of_copies = self._buffers(first.buffers, first.buffers_of_copies)

    def snapshot(self) -> Snapshot:
        """The checkpoint of the step.

        Raises ModelError if the weights of the processes have come apart.
        """
        first = self.ranks[0]
        lasting = unpacked(first.lasting, self._tensor)
        check_norms(lasting["names"], torch.stack([rank.norms for rank in self.ranks]))
        state = unpacked(first.of_all, self._tensor)
        session = {
            **state["session"],
            **lasting["session"],
            "gradients": self._gradients(),
            "numbers": self._numbers(state["numbers"]),
            "buffers_of_copies": self.buffers_of_copies.of_ranks,
        }
        objects = {
            name: unpacked(content, self._tensor) for name, content in state["objects"].items()
        }
        training = TrainingState(objects, self.buffers.of_ranks, session=session)
        return Snapshot(
            step=self.step,
            model=unpacked(state["model"], self._tensor),
            training=training.as_dict(),
            manifest=lasting["manifest"],
        )

    def _tensor(self, kept: KeptTensor) -> Tensor:
        """A tensor of the state. Of buffers that differ between ranks it is the mean."""
        if not kept.own:
            # A copy: torch saves no views of the same memory as different types.
            return self.views[self.owners[kept.number]].common(kept.number).clone()
        buffers = [*self.buffers.saved, *self.buffers_of_copies.saved]
        return buffers[kept.number].clone()

    def _buffers(self, first: int, count: int) -> Buffers:
        """Some buffers, as `averaged_buffers` has them.

        first, count: the numbers of their tensors.
        """
        numbers = range(first, first + count)
        saved = [self.views[0].own(number) for number in numbers]
        are_floating = [buffer.is_floating_point() for buffer in saved]
        floating = list(compress(numbers, are_floating))
        rows = []
        for views in self.views:
            parts = [views.own(number).double().flatten() for number in floating]
            rows.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64))
        of_ranks = torch.stack(rows)
        if bool(((of_ranks == of_ranks[0]) | of_ranks.isnan()).all()):
            return Buffers(of_ranks, saved)
        means = iter(of_ranks.mean(0).split([self.views[0].own(n).numel() for n in floating]))
        saved = [
            next(means).view_as(buffer).to(buffer.dtype) if is_floating else buffer
            for buffer, is_floating in zip(saved, are_floating, strict=True)
        ]
        return Buffers(of_ranks, saved)

    def _gradients(self) -> dict[str, Any]:
        """The gradients of all ranks, as `sessions.gradients.exchanged` has them: the mean where a
        rank has its own."""
        of_ranks = [rank.gradients for rank in self.ranks]
        first = of_ranks[0]
        if all(_are_equal(first, other) for other in of_ranks):
            return first
        means = {}
        for name in dict.fromkeys(name for gradients in of_ranks for name in gradients):
            there = [_dense(gradients[name]) for gradients in of_ranks if name in gradients]
            means[name] = torch.stack(there).sum(0) / len(of_ranks)
        return means

    def _numbers(self, of_all: dict[str, Any]) -> dict[str, Any]:
        """The numbers that are in no line yet, see `SessionNumbers.state`."""
        logged = LoggedNumbers("cpu")
        logged.load_state(of_all["logged"])
        logged.add_kept([rank.logged for rank in self.ranks])
        samples = sum(rank.samples for rank in self.ranks)
        return {"samples_seen": of_all["samples_seen"] + samples, "logged": logged.state()}


def _own(views: Views, kept: KeptTensor) -> Tensor:
    return views.own(kept.number).clone()


def _are_equal(gradients: dict[str, Any], others: dict[str, Any]) -> bool:
    if gradients.keys() != others.keys():
        return False
    return all(
        torch.equal(one, other)
        for name in gradients
        for one, other in zip(tensors(gradients[name]), tensors(others[name]), strict=True)
    )


def _dense(gradient: Any) -> Tensor:
    """A gradient as `as_saved` has it."""
    if isinstance(gradient, Tensor):
        return gradient
    sparse = torch.sparse_coo_tensor(
        gradient["places"], gradient["values"], gradient["shape"], check_invariants=True
    )
    return sparse.to_dense()
