"""Tables with a row for each sample, which a loop fills by its batches: losses, priorities, the
outputs of a model.

Each process has other samples, and so other rows of its table. What reads the rows of all, or those
that another process wrote in the epoch before, reads another number on each.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.models.loop_variables import loop_variables
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.tensor_tree import attributes_of, tensors

LOOKS = 3
"""Steps that are looked at."""
ENOUGH = 2
"""Steps in which rows were changed: in one it may be chance that they have this batch's numbers."""
DEEPEST = 4
"""Levels at which a variable may hold a table: `trainer.memory.bank` is on the third."""
MOST_ITEMS = 64
"""The most items of a list or dict that are looked into."""
MOST_OBJECTS = 20_000
MOST_COLUMNS = 16
"""Numbers of a row that are looked at: who writes a row writes all of it."""
MOST_ROWS = 2**24
MOST_OBJECT_ROWS = 2**20
"""Of a list or a dict, whose rows are looked at one by one: 0.1 s for a million."""
MOST_COPIED = 2**24
"""Numbers of a tensor or array with gaps, of which rows are cut out of a copy."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
NOT_LOOKED_INTO = (str, bytes, type, types.ModuleType, types.FunctionType, types.MethodType)
LOCAL_ROWS = (
    "%s: each process has filled in the rows of its own samples alone. So code that reads other"
    " rows, or adds rows up, finds different numbers on each process. Fill in the rows of all"
    " processes: rows, _ = ddp_train.all_gather(indices); table[rows] ="
    " ddp_train.all_gather(losses.detach())[0]. If each epoch fills the table again, use table ="
    " run.sum(table) at its end instead"
)

Rows = dict[int, float]
"""A number for each row of a table, which is another one once the row has changed."""


class RowTables:
    """Finds the tables that each process fills by its own samples, and keeps none of them.

    A table is a tensor, an array or a list with at least one row for each sample, or a dict by
    numbers. It is found by the name that the user's variables have for it.
    """

    def __init__(self) -> None:
        self.looks = 0
        """Steps that were looked at."""
        self.before: dict[str, np.ndarray | Rows] = {}
        """The rows of each table at the begin of the step, by the name of the table."""
        self.numbers: list[set[int]] = []
        """Numbers of the samples of this process in this step: those of the data set, and all that
        a batch has one of for each sample."""
        self.own: dict[str, int] = {}
        """How often each table has changed in rows of this process's samples alone."""
        self.others: set[str] = set()
        """The tables that have changed in other rows too, or were added up over the processes."""
        self.sizes: dict[str, int] = {}
        """The number of rows of each table."""
        self.samples = 0
        """Samples of the smallest data set that is trained on; 0 if nobody knows."""

    @property
    def is_complete(self) -> bool:
        return self.looks >= LOOKS

    def begin(self, facts: list[Mapping[str, Any]]) -> None:
        """To be called when a step begins. facts: of the loaders, see `Feed`."""
        sizes = [facts_of_one["samples"] for facts_of_one in facts if "samples" in facts_of_one]
        self.samples = min(sizes, default=0)
        self.numbers = []
        self.before = {}
        if self.samples and not self.is_complete:
            self.before = self._tables()

    def see_batch(self, numbers: np.ndarray, batch: Any) -> None:
        """Take note of a batch of this process, before it is handed out.

        numbers: of its samples in the data set, [n].
        """
        if self.is_complete or not len(numbers):
            return
        self.numbers.append({*numbers.tolist()})
        for tensor in tensors(batch):
            is_number = not tensor.is_floating_point() and not tensor.is_complex()
            if tensor.shape == (len(numbers),) and is_number:
                self.numbers.append({*tensor.tolist()})

    def see_sum(self, value: Any) -> None:
        """Called when a value is added up over all processes."""
        shape = getattr(value, "shape", ())
        if not self.looks or not shape:
            return
        self.others |= {name for name, size in self.sizes.items() if size == shape[0]}

    def end(self) -> None:
        """To be called when a step ends."""
        if self.is_complete or not self.samples:
            return
        self.looks += 1
        if not self.before or not self.numbers:
            return
        for name, rows in self._tables().items():
            before = self.before.get(name)
            if before is None or type(before) is not type(rows):
                continue
            changed = _changed(before, rows)
            if not changed:
                continue
            if any(changed <= numbers for numbers in self.numbers):
                self.own[name] = self.own.get(name, 0) + 1
                self.sizes[name] = len(rows)
            else:
                self.others.add(name)
        self.before = {}

    def apart(self, device: str) -> list[str]:
        """The tables that have only the rows of each process now, at the end of an epoch.

        A collective: every process must call it.
        """
        found = [
            name for name, count in self.own.items() if count >= ENOUGH and name not in self.others
        ]
        of_ranks = [json.loads(text) for text in texts_from_all_ranks(json.dumps(found), device)]
        names = sorted({name for of_rank in of_ranks for name in of_rank})
        if not names:
            return []
        tables = self._tables()
        refused = self.others
        digests = {name: _digest(tables.get(name)) for name in names if name not in refused}
        texts = texts_from_all_ranks(json.dumps(digests), device)
        digests_of_ranks = [json.loads(text) for text in texts]
        return [
            name
            for name in names
            if all(name in digests for digests in digests_of_ranks)
            and len({digests[name] for digests in digests_of_ranks}) > 1
        ]

    def _tables(self) -> dict[str, np.ndarray | Rows]:
        """The rows of all tables that the user's variables hold now, by names."""
        found: dict[str, np.ndarray | Rows] = {}
        for name, value in _values_within(loop_variables(_is_name)):
            if name in found:
                continue  # of the innermost function
            rows = rows_of(value, self.samples)
            if rows is not None:
                found[name] = rows
        return found


def warning_of(names: list[str]) -> str:
    """What people are told of tables that have only the rows of each process."""
    return LOCAL_ROWS % ", ".join(names)


def rows_of(value: Any, samples: int) -> np.ndarray | Rows | None:
    """A number for each row of a table; None for what is none.

    samples: the least number of rows, but for a dict, which may be filled while it is used.
    """
    if isinstance(value, dict):
        return _rows_of_dict(value)
    if isinstance(value, list):
        if not samples <= len(value) <= MOST_OBJECT_ROWS or not _is_number(value[0]):
            return None
        if not all(map(_is_number, value)):
            return None
        return np.array(value, dtype=np.float64)
    if isinstance(value, np.ndarray):
        if isinstance(value, np.memmap) or value.dtype.kind not in "biuf" or not value.ndim:
            return None
        if not samples <= len(value) <= MOST_ROWS:
            return None
        if not value.flags.c_contiguous and value.size > MOST_COPIED:
            return None
        columns = value.reshape(len(value), -1)[:, :MOST_COLUMNS].astype(np.float64)
        return columns @ np.linspace(1, 2, columns.shape[1])
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return None
    if not value.ndim or not samples <= len(value) <= MOST_ROWS or value.is_complex():
        return None
    if value.is_nested or not value.numel():
        return None
    if not value.is_contiguous() and value.numel() > MOST_COPIED:
        return None
    with torch.no_grad():
        columns = value.detach().reshape(len(value), -1)[:, :MOST_COLUMNS].cpu().double().numpy()
    return columns @ np.linspace(1, 2, columns.shape[1])


def _rows_of_dict(table: dict[Any, Any]) -> Rows | None:
    rows: Rows = {}
    if len(table) > MOST_OBJECT_ROWS:
        return None
    for key, value in list(table.items()):
        if type(key) is bool or not isinstance(key, int | np.integer):
            return None
        if isinstance(value, Tensor | np.ndarray):
            numbers = torch.as_tensor(value).detach().reshape(-1)[:MOST_COLUMNS]
            value = float(numbers.double().sum())
        if not _is_number(value):
            return None
        rows[int(key)] = float(value)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)


def _changed(before: np.ndarray | Rows, now: np.ndarray | Rows) -> set[int]:
    """The numbers of the rows that have changed; none if the table is of another size."""
    if isinstance(before, dict):
        assert isinstance(now, dict)
        return {number for number, value in now.items() if before.get(number) != value}
    assert isinstance(now, np.ndarray)
    if before.shape != now.shape:
        return set()
    differs = (before != now) & ~(np.isnan(before) & np.isnan(now))
    return {*np.flatnonzero(differs).tolist()}


def _digest(rows: np.ndarray | Rows | None) -> str:
    content = b""
    if isinstance(rows, dict):
        content = json.dumps(sorted(rows.items())).encode()
    elif rows is not None:
        content = rows.tobytes()
    return hashlib.sha256(content).hexdigest()


def _is_name(name: str) -> bool:
    return not name.startswith("__")


def _values_within(variables: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Variables, and what their attributes, lists and dicts hold, each with its name in code.

    Parameters and buffers of modules are left out: those of models are compared elsewhere.
    """
    waiting = deque((name, value, DEEPEST) for name, value in variables)
    seen: set[int] = set()
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return
        name, value, levels = waiting.popleft()
        yield name, value
        if not levels or id(value) in seen or isinstance(value, NOT_LOOKED_INTO):
            continue
        if isinstance(value, Tensor | np.ndarray | np.generic | int | float):
            continue
        if isinstance(value, Wrapped):
            value = value.module
        elif type(value).__module__.startswith("ddp_train."):
            continue
        seen.add(id(value))
        waiting += [(f"{name}{place}", item, levels - 1) for place, item in _parts_of(value)]


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, each with how code says it: `.table`, `['table']`, `[0]`."""
    if isinstance(value, Mapping):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"[{key!r}]", item) for key, item in list(value.items()) if type(key) is str]
    if isinstance(value, list | tuple):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"[{place}]", item) for place, item in enumerate(value)]
    attributes = attributes_of(value)
    if isinstance(value, nn.Module):
        attributes = {
            name: item for name, item in attributes.items() if name not in OF_EVERY_MODULE
        }
        attributes |= dict(value.named_children())
    return [(f".{name}", item) for name, item in attributes.items()]
