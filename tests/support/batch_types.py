"""Batches of the types that people's collate functions return."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Texts:
    ids: Tensor
    count: int
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class Frozen:
    rows: Tensor


class Attributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that moves itself, and drops what is beside it."""

    def __init__(self, data: Any, words: Any = None) -> None:
        super().__init__(data)
        self.words = words

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        self.data = {
            name: item.to(device, non_blocking=non_blocking) if isinstance(item, Tensor) else item
            for name, item in self.data.items()
        }
        return self


class Kept(MutableMapping[str, Any]):
    """A mapping whose copy has the same storage."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]

    def __setitem__(self, name: str, part: Any) -> None:
        self.parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Store(Kept):
    """As that of PyTorch Geometric's Data: it knows whose it is."""

    def __init__(self, owner: Any, parts: dict[str, Any]) -> None:
        super().__init__(parts)
        self.owner = weakref.ref(owner)

    def __copy__(self) -> Store:
        other = Store(self, dict(self.parts))
        other.owner = self.owner
        return other


class Graphs:
    """As PyTorch Geometric's Batch: nodes, edges and targets of some graphs."""

    def __init__(self, **items: Any) -> None:
        self.store = Store(self, items)

    def __copy__(self) -> Graphs:
        other = Graphs.__new__(Graphs)
        other.store = copy.copy(self.store)
        other.store.owner = weakref.ref(other)
        return other

    def __getattr__(self, name: str) -> Any:
        if name != "store" and name in self.store:
            return self.store[name]
        raise AttributeError(name)

    def to(self, device: Any, *others: Any) -> Graphs:
        for name, item in list(self.store.items()):
            if isinstance(item, Tensor):
                self.store[name] = item.to(device, *others)
        return self


class InPlace:
    """Moves itself in place, returns nothing, and takes no further argument."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, place: Any) -> None:
        self.x = self.x.to(place)


class Forgetful(InPlace):
    """Leaves its targets where they are."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x)
        self.y = y


class Unknown:
    """Holds tensors, and says nothing of devices."""

    def __init__(self, x: Tensor) -> None:
        self.parts = {"x": [x]}


def batch_of(count: int) -> dict[str, Any]:
    """A batch of so many copies of one sample, in many types."""
    ids = torch.ones(count, 6, dtype=torch.int64)
    return {
        "pair": Pair(torch.ones(count, 3), torch.ones(count, dtype=torch.int64)),
        "dataclass": Texts(torch.ones(count, 6), count),
        "frozen": Frozen(torch.ones(count, 2)),
        "ordered": OrderedDict(x=torch.ones(count, 2)),
        "default": defaultdict(list, x=torch.ones(count, 2)),
        "read only": MappingProxyType({"x": torch.ones(count, 2)}),
        "attributes": Attributes(x=torch.ones(count, 2)),
        "mapping": UserDict(x=torch.ones(count, 2)),
        "kept": Kept({"x": torch.ones(count, 2)}),
        "encoding": Encoding({"ids": ids, "mask": ids}, [object()] * count),
        "graphs": Graphs(
            x=torch.ones(3 * count, 2),
            edges=torch.ones(2, 4 * count, dtype=torch.int64),
            first=3 * torch.arange(count + 1),
            count=count,
        ),
        "in place": InPlace(torch.ones(count)),
        "packed": pack_sequence([torch.ones(3, 2)] * count),
        "boxes": [{"box": torch.ones(4)}] * count,
        "names": ["a"] * count,
        "array": np.ones((count, 2), np.float32),
        "key": "fixed",
        "nothing": None,
    }
