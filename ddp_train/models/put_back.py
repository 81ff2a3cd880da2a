"""Passes that are thrown away, and what keeps them from leaving something behind.

A run computes some passes before its first step: it tries a loss, warms up DDP, counts operations.
`leaving_nothing` puts back what the user's code has changed in one of them, in its place, so that a
run on three processes, which makes more of them, begins as one on one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import random
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import _lru_cache_wrapper
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_train.data.datasets import BatchSource
from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.data.user_dataset import UserDataset, parts_of
from ddp_train.distributed.training_step import thrown_away
from ddp_train.models.generators import get_state, is_generator, set_state
from ddp_train.models.python_state import (
    MOST_ITEMS,
    State,
    attributes_of,
    changed,
    is_beside_models,
    look_through,
)
from ddp_train.text import with_article

MOST_BYTES = 2**27
"""The largest array or tensor that is kept, unless it is a parameter or buffer: data sets may be
globals too."""
_MISSING = object()
log = logging.getLogger(__name__)


@contextlib.contextmanager
def leaving_nothing(what: str, roots: Mapping[str, Any], on_copies: bool = False) -> Iterator[None]:
    """A context whose passes leave the state of objects and generators as it was.

    Put back are weights, buffers and gradients; attributes and what they hold, in classes, closures
    and globals of the user's modules too; generators of torch, numpy and Python. What has changed
    all the same is named in a warning.

    what: the pass, for that warning.
    roots: the objects that it calls, by their names.
    on_copies: it calls copies of them: weights and buffers need not be kept.
    """
    before = look_through(roots, MOST_ITEMS)
    kept = Kept(before, roots.values(), on_copies)
    try:
        with kept.generators():
            yield
    finally:
        kept.put_back()
        left = _left_behind(before, look_through(roots, MOST_ITEMS))
        if left:
            log.warning(
                "%s has changed %s, which cannot be restored and stays changed; keep such state in"
                " a buffer, a number, a list or a dict",
                what,
                ", ".join(left[:3]),
            )


@contextlib.contextmanager
def reading_ahead(source: BatchSource) -> Iterator[None]:
    """A context whose reads of a data set leave it as it was, as `leaving_nothing` does."""
    if not isinstance(source, UserDataset):
        yield
        return
    with contextlib.ExitStack() as stack:
        if source.epochs:
            stack.enter_context(source.epochs.unchanged())
        if isinstance(source.dataset, NumberedStream):
            stack.enter_context(source.dataset.unchanged())
        stack.enter_context(leaving_nothing("reading a sample before training", parts_of(source)))
        yield


def _left_behind(before: State, after: State) -> list[str]:
    """The paths of what has changed, but for what modules hold that were imported meanwhile."""
    imported = [f"{module}." for module in after.modules - before.modules]
    imported += [f"{kind.__name__}." for kind in after.classes - before.classes]
    paths = changed(before.found, after.found)
    return [path for path in paths if not path.startswith(tuple(imported))]


class Kept:
    """The contents of objects at one moment."""

    def __init__(self, state: State, roots: Iterable[Any], on_copies: bool = False) -> None:
        """state: has met the objects.

        roots: the modules among them bring their parameters and buffers.
        on_copies: those stay as they are.
        """
        self.on_copies = on_copies
        self.holders: list[Holder] = []
        self.contents: list[Callable[[], None]] = []
        """Put back what an object holds in itself, each."""
        self.iterators: list[KeptIterator] = []
        self.devices: set[int] = set()
        """Numbers of the GPUs of parameters and buffers."""
        self._met: set[int] = set()
        objects = [value for _, value in state.seen.values()]
        modules = [value for value in (*roots, *objects) if isinstance(value, nn.Module)]
        for module in _all_modules(modules):
            self._keep_module(module)
        for value in objects:
            # Any object may raise anything. What is not kept is named if it changes.
            with contextlib.suppress(Exception):
                self._keep(value)
        for kind in state.classes:
            self.holders.append(ClassHolder(kind))
        for name in state.modules:
            self.holders.append(MappingHolder(vars(sys.modules[name]), is_namespace=True))

    @contextlib.contextmanager
    def generators(self) -> Iterator[None]:
        """A context after which the global generators are as before."""
        numpy_state = np.random.get_state()
        python_state = random.getstate()
        try:
            with torch.random.fork_rng(sorted(self.devices)), thrown_away():
                yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)

    def put_back(self) -> None:
        """Put all back in its place."""
        moved = {id(kept.iterator): kept.copy for kept in self.iterators if kept.has_moved()}
        for holder in self.holders:
            with contextlib.suppress(Exception):  # as in `__init__`
                holder.put_back(moved)
        with torch.no_grad():
            for put_back in self.contents:
                with contextlib.suppress(Exception):
                    put_back()

    def _keep_module(self, module: nn.Module) -> None:
        self._met.add(id(module))
        if any(map(is_lazy, module.parameters(recurse=False))):
            return  # it becomes another layer in its first pass, for good
        self.holders.append(MappingHolder(vars(module)))
        for part in vars(module).values():
            if isinstance(part, dict):
                self._met.add(id(part))
                self.holders.append(MappingHolder(part))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_cuda:
                self.devices.add(tensor.get_device())
            if not self.on_copies:
                self._keep_tensor(tensor)

    def _keep(self, value: Any) -> None:
        """Keep what an object holds, in the way of its kind."""
        is_code = isinstance(value, type | ModuleType) or is_beside_models(value)
        if id(value) in self._met or is_code:
            return
        self._met.add(id(value))
        if isinstance(value, Tensor):
            if value.nbytes <= MOST_BYTES:
                self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= MOST_BYTES and value.flags.writeable:
                self.contents.append(functools.partial(_set_array, value, value.copy()))
        elif isinstance(value, MutableMapping):
            self.holders.append(MappingHolder(value))
        elif isinstance(value, list | deque):
            self.holders.append(SequenceHolder(value))
        elif isinstance(value, set):
            self.contents.append(functools.partial(_set_set, value, value.copy()))
        elif isinstance(value, bytearray):
            self.contents.append(functools.partial(_set_bytes, value, bytes(value)))
        elif isinstance(value, Iterator):
            self._keep_iterator(value)
        elif is_generator(value):
            self.contents.append(functools.partial(set_state, value, get_state(value)))
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self.holders.append(CellHolder(cell))
        if isinstance(value, _lru_cache_wrapper) and not value.cache_info().currsize:
            self.contents.append(value.cache_clear)
        self._keep_attributes(value)

    def _keep_tensor(self, tensor: Tensor) -> None:
        self._met.add(id(tensor))
        gradient = None
        if tensor.is_leaf:
            gradient = tensor.grad
            tensor.grad = None  # else a pass would add to it
        content = tensor.detach().clone()
        self.contents.append(functools.partial(_set_tensor, tensor, content, gradient))

    def _keep_iterator(self, iterator: Iterator[Any]) -> None:
        self.iterators.append(KeptIterator(iterator))

    def _keep_attributes(self, value: Any) -> None:
        own = getattr(value, "__dict__", {})
        if isinstance(own, dict):
            self.holders.append(MappingHolder(own))
        in_slots = {name: item for name, item in attributes_of(value).items() if name not in own}
        if in_slots:
            self.holders.append(SlotsHolder(value, in_slots))


class Holder(ABC):
    """A container and the objects that it held when the Holder was made, to be put back into it."""

    @abstractmethod
    def put_back(self, moved: Mapping[int, Any]) -> None:
        """Let the container hold the same objects as before.

        moved: iterators that have moved meanwhile, by their `id`, each with a copy at the old
            place. The copy is put back in place of the iterator.
        """


class MappingHolder(Holder):
    """Holds and puts back the items of a dict, or the names of a module or an object."""

    def __init__(self, mapping: MutableMapping[Any, Any], is_namespace: bool = False) -> None:
        """is_namespace: names with two underscores are Python's own."""
        self.mapping = mapping
        self.is_namespace = is_namespace
        self.content = self._now()

    def _now(self) -> dict[Any, Any]:
        if type(self.mapping) is dict:
            content = dict(self.mapping)
        else:
            content = dict(self.mapping.items())  # not by `[key]`, which a class may answer anew
        if self.is_namespace:
            content = {name: item for name, item in content.items() if name[:2] != "__"}
        return content

    def put_back(self, moved: Mapping[int, Any]) -> None:
        wanted = self.content
        if moved:
            wanted = {key: moved.get(id(value), value) for key, value in wanted.items()}
        now = self._now()
        if _are_same(now.values(), wanted.values()) and list(now) == list(wanted):
            return  # at the speed of C: it may be a data set of millions
        for key in now.keys() - wanted.keys():
            # Python sets a module in its package once, and would not miss it there.
            if not (self.is_namespace and isinstance(now[key], ModuleType)):
                del self.mapping[key]
        for key, value in wanted.items():
            if now.get(key, _MISSING) is not value:
                self.mapping[key] = value
        # Names are looked up while this is done, by other threads too, and have no order.
        if not self.is_namespace and list(self.mapping) != list(wanted):
            self.mapping.clear()
            self.mapping.update(wanted)


class SequenceHolder(Holder):
    """Holds and puts back the items of a list or a deque."""

    def __init__(self, sequence: list[Any] | deque[Any]) -> None:
        self.sequence = sequence
        self.items = list(sequence)

    def put_back(self, moved: Mapping[int, Any]) -> None:
        wanted = self.items
        if moved:
            wanted = [moved.get(id(value), value) for value in wanted]
        if _are_same(self.sequence, wanted):
            return
        self.sequence.clear()
        self.sequence.extend(wanted)


class ClassHolder(Holder):
    """Holds and puts back the attributes of a class, but for names that begin with `__`."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.items = self._now()

    def _now(self) -> dict[str, Any]:
        return {name: item for name, item in vars(self.kind).items() if name[:2] != "__"}

    def put_back(self, moved: Mapping[int, Any]) -> None:
        now = self._now()
        for name in now.keys() - self.items.keys():
            delattr(self.kind, name)
        for name, value in self.items.items():
            wanted = moved.get(id(value), value)
            if now.get(name, _MISSING) is not wanted:
                setattr(self.kind, name, wanted)


class SlotsHolder(Holder):
    """Holds and puts back those attributes of an object that are in `__slots__`."""

    def __init__(self, value: Any, items: dict[str, Any]) -> None:
        self.value = value
        self.items = items

    def put_back(self, moved: Mapping[int, Any]) -> None:
        for name, item in self.items.items():
            wanted = moved.get(id(item), item)
            if getattr(self.value, name, _MISSING) is not wanted:
                with contextlib.suppress(AttributeError):  # a frozen one's
                    setattr(self.value, name, wanted)


class CellHolder(Holder):
    """Holds and puts back the variable of a closure, which `nonlocal` may change."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell
        self.content = _content(cell)

    def put_back(self, moved: Mapping[int, Any]) -> None:
        wanted = moved.get(id(self.content), self.content)
        if wanted is not _MISSING and _content(self.cell) is not wanted:
            self.cell.cell_contents = wanted


class KeptIterator:
    """An iterator with a copy of it. Raises TypeError if it cannot be copied."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.copy = _copy_of(iterator)
        self.place = _place_of(iterator)

    def has_moved(self) -> bool:
        return _place_of(self.iterator) != self.place


def _copy_of(value: Any) -> Any:
    """An iterator at the same place over the same objects; anything else as it is."""
    if not isinstance(value, Iterator):
        return value
    make, arguments, *state = _reduced(value)
    copy = make(*map(_copy_of, arguments))
    if state and state[0] is not None:
        inner = state[0]
        copy.__setstate__(tuple(map(_copy_of, inner)) if isinstance(inner, tuple) else inner)
    return copy


def _place_of(value: Any) -> Any:
    """Something that is another one when an iterator has moved."""
    if isinstance(value, tuple):
        return tuple(map(_place_of, value))
    if isinstance(value, Iterator):
        return tuple(map(_place_of, _reduced(value)))
    if isinstance(value, int | float):
        return value
    if isinstance(value, list | deque):
        return id(value), len(value)
    return id(value)


def _reduced(iterator: Iterator[Any]) -> tuple[Any, ...]:
    """The parts from which pickle would make it again. Raises TypeError if it could not."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        raise TypeError(f"{with_article(type(iterator).__name__)} is of a class of its own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, until Python 3.14
        return tuple(iterator.__reduce__())  # type: ignore[arg-type]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    """True if two collections hold the same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _all_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with those inside, each once."""
    found: dict[int, nn.Module] = {}
    for module in modules:
        if id(module) not in found:
            found |= {id(inner): inner for inner in module.modules()}
    return list(found.values())


def _set_tensor(tensor: Tensor, content: Tensor, gradient: Tensor | None) -> None:
    if tensor.is_leaf:
        tensor.grad = gradient
    if tensor.shape != content.shape or tensor.dtype != content.dtype:
        tensor.data = content
        return
    if not _are_equal(tensor.detach(), content):
        tensor.detach().copy_(content)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """False too for kinds of numbers that cannot be compared."""
    try:
        return torch.equal(one, other)
    except (RuntimeError, NotImplementedError):
        return False


def _set_array(array: np.ndarray, content: np.ndarray) -> None:
    array[...] = content


def _set_set(value: set[Any], content: set[Any]) -> None:
    if value != content:
        value.clear()
        value.update(content)


def _set_bytes(value: bytearray, content: bytes) -> None:
    value[:] = content
