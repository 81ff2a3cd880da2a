"""How a state lies in the places of the ranks: where each tensor is, and what lies beside them."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_train.resilience.kept_memory import TURNS, KeptMemory, Record

ALIGNMENT = 64
"""Tensors begin at multiples of it, in bytes."""


class KeptTensor(NamedTuple):
    """Stands for a tensor of a state."""

    own: bool
    """Whether each rank has another one; else all have the same."""
    number: int
    """Its number among the tensors of that kind."""


class KeptNorm(NamedTuple):
    """Stands for the norm of the last gradients, a scalar that each step makes anew."""

    dtype: torch.dtype


class KeptAt(NamedTuple):
    """A tensor in the place of a rank."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    """Its first byte in the room of the place."""


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a state lie in the places of the ranks."""

    own: list[KeptAt]
    """The same in the place of each rank."""
    common: list[KeptAt]
    owners: list[int]
    """The rank that keeps each of the common ones."""
    sizes: list[int]
    """Bytes in the place of each rank."""

    @classmethod
    def of(
        cls,
        own: Sequence[Tensor],
        common: Sequence[Tensor],
        ranks: int,
        of_leader: Collection[int] = (),
    ) -> Layout:
        """The layout of tensors that each rank has of its own, and of tensors that all ranks have.

        of_leader: the positions in `common` of tensors that rank 0 must keep.
        """
        own_at: list[KeptAt] = []
        end = 0
        for tensor in own:
            own_at.append(KeptAt(tensor.dtype, tensor.shape, end))
            end += aligned(tensor.nbytes)
        sizes = [end] * ranks
        owners = shares([tensor.nbytes for tensor in common], ranks, of_leader)
        common_at: list[KeptAt] = []
        for tensor, owner in zip(common, owners, strict=True):
            common_at.append(KeptAt(tensor.dtype, tensor.shape, sizes[owner]))
            sizes[owner] += aligned(tensor.nbytes)
        return cls(own_at, common_at, owners, sizes)


class Views:
    """The tensors of one place of a rank."""

    def __init__(self, content: Tensor, layout: Layout) -> None:
        """content: the bytes of the place beside its text."""
        self.content = content
        self.layout = layout

    @classmethod
    def on_host(cls, record: Record, layout: Layout, rank: int) -> Views:
        memory = record.room(max(1, layout.sizes[rank]))
        return cls(torch.frombuffer(memory, dtype=torch.uint8), layout)

    def own(self, number: int) -> Tensor:
        """The tensor of this number among those that each rank has of its own."""
        return self._view(self.layout.own[number])

    def common(self, number: int) -> Tensor:
        """The tensor of this number among those that all ranks have; this rank must keep it."""
        return self._view(self.layout.common[number])

    def _view(self, kept: KeptAt) -> Tensor:
        count = kept.shape.numel()
        flat = self.content[kept.begin : kept.begin + count * kept.dtype.itemsize]
        return flat.view(kept.dtype).view(kept.shape)


class KeptPlace:
    """The place in which a rank has kept a state, once all processes have ended."""

    def __init__(
        self, memory: KeptMemory, held: Mapping[tuple[int, int], Tensor], rank: int, mark: int
    ) -> None:
        """
        held: the memory on GPUs by rank and place, as bytes; empty on CPUs.
        mark: of the state, see `KeptMemory.newest_state`.
        """
        self.places = next(one for one in TURNS if memory.record(rank, one.state).mark == mark)
        self.record = memory.record(rank, self.places.state)
        self.tree, self.layout = unpacked(self.record.text)
        on_device = held.get((rank, self.places.state))
        if on_device is None:
            self.views = Views.on_host(self.record, self.layout, rank)
        else:
            self.views = Views(on_device.cpu(), self.layout)


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def shares(sizes: Sequence[int], ranks: int, of_leader: Collection[int] = ()) -> list[int]:
    """Which rank keeps which of the tensors that are the same on all ranks, so that each keeps
    about as many bytes.

    sizes: bytes of each tensor.
    of_leader: the numbers of tensors that rank 0 must keep.

    Returns a rank for each tensor.
    """
    kept = [0] * ranks
    kept[0] = sum(sizes[place] for place in of_leader)
    owners = [0] * len(sizes)
    others = [place for place in range(len(sizes)) if place not in of_leader]
    for place in sorted(others, key=lambda place: -sizes[place]):
        owner = kept.index(min(kept))
        owners[place] = owner
        kept[owner] += sizes[place]
    return owners


def filled(tree: Any, find: Callable[[Any], Tensor]) -> Any:
    """Copy a tree of dicts, lists and tuples, with tensors in their places.

    find: returns the tensor for a `KeptTensor` or a `KeptNorm` of the tree.
    """
    if isinstance(tree, KeptTensor | KeptNorm):
        return find(tree)
    if isinstance(tree, dict):
        return {key: filled(item, find) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([filled(item, find) for item in tree])
    return tree


def packed(value: Any) -> bytes:
    """Plain data, tensors and the classes of this module as bytes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpacked(content: bytes) -> Any:
    """The data that `packed` has turned into bytes. Runs no code of theirs."""
    with torch.serialization.safe_globals([KeptTensor, KeptNorm, KeptAt, Layout]):
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
