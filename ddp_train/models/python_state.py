"""The state that code keeps beside parameters and buffers.

It is in attributes, in classes, and in the globals of modules.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.models.generators import get_state, is_generator
from ddp_train.resilience.failure_report import is_foreign
from ddp_train.tensor_tree import attributes_of
from ddp_train.text import with_article

MOST_ITEMS = 64
"""The most items of a list or dict that are inspected one by one."""
MOST_NUMBERS = 2**20
"""The most numbers of a tensor that are inspected, evenly spread."""
MOST_MAPPED_BYTES = 2**27
"""The largest array in a file whose numbers are inspected: each is read from the disk."""
DEPTH = 5
"""Objects within objects that are inspected."""
DEPTH_OF_GLOBALS = 3
DEPTH_OF_CLASSES = 1
PLAIN = (int, float, complex, str, bytes, type(None))
CODE = (type, ModuleType, FunctionType, classmethod, staticmethod, property, MemberDescriptorType)
"""Attributes of a class that are no state."""
OUR_PACKAGES = frozenset({"ddp_train", "ddp_lab"})
SHARED = frozenset(
    {
        "_asyncio",
        "_io",
        "_queue",
        "_socket",
        "_thread",
        "asyncio",
        "concurrent",
        "logging",
        "multiprocessing",
        "os",
        "queue",
        "socket",
        "threading",
    }
)
"""Python's modules whose classes other threads, processes or the system share: their objects change
beside a forward pass, and break if they are put back meanwhile."""
ATTRIBUTES_OF_TORCH = (
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_is_full_backward_hook",
    "_compiled_call_impl",
)
"""Attributes of every torch module."""


def is_users(file: str) -> bool:
    """True for a source file that is not of these packages, of what is installed, or of Python."""
    return file.endswith(".py") and not is_foreign(file)


def defined_by_user(module: str) -> bool:
    """True if a module's source file is the user's."""
    return is_users(getattr(sys.modules.get(module), "__file__", None) or "")


def state_of(roots: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The state that objects keep beside parameters and buffers.

    It is in attributes of them and of what they hold, in their classes and forward hooks, and in
    the globals of the user's modules that they come from.

    roots: the objects, by names.
    known: objects that are not looked into where they are met, by names.

    Returns digests by paths, as a person would write them.
    """
    return look_through(roots, known=known).found


def look_through(
    roots: Mapping[str, Any],
    most_items: int = MOST_NUMBERS,
    known: Mapping[str, Any] | None = None,
) -> State:
    """The state of objects as `state_of` has it, and the places of tensors.

    most_items: of a list or dict that are looked at.
    """
    state = State(most_items)
    for name, value in (known or {}).items():
        state.seen[id(value)] = name, value
    for name, root in roots.items():
        state.walk(name, root, DEPTH)
    done: set[str] = set()
    while state.modules - done:  # one leads to those that it imports
        module = min(state.modules - done)
        done.add(module)
        state.walk_globals(module)
    return state


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths whose value has changed, or is new."""
    return [path for path, value in after.items() if before.get(path) != value]


def replaced(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths whose value has changed. A cache that was None, or not there, was only filled."""
    return [path for path in changed(before, after) if before.get(path, "None") != "None"]


def attribute_of(path: str) -> str:
    """The path of the attribute that an item belongs to: `task.rates` of `task.rates[0]`."""
    return path.partition("[")[0]


class State:
    """The state of objects, path by path."""

    def __init__(self, most_items: int = MOST_NUMBERS) -> None:
        """most_items: of a list or dict that are looked at."""
        self.most_items = most_items
        self.found: dict[str, str] = {}
        """Digests by paths."""
        self.tensors: dict[str, tuple[str, int]] = {}
        """The type of the device of each tensor, and its address there."""
        self.modules: set[str] = set()
        """The user's modules whose objects or functions were met."""
        self.classes: set[type] = set()
        """The user's classes that were met."""
        self.seen: dict[int, tuple[str, Any]] = {}
        """By the ids of objects: the path at which each was first met, and the object, so that its
        id does not come again."""

    def walk(self, path: str, value: Any, depth: int) -> None:
        """Inspect a value, and what it holds.

        path: its name, as a person would write it.
        depth: objects within objects to inspect.
        """
        try:
            if isinstance(value, PLAIN):
                self.found[path] = repr(value)
            elif id(value) in self.seen:
                first_path, _ = self.seen[id(value)]
                self.found[path] = f"as {first_path}"
            elif depth >= 0:
                self.seen[id(value)] = path, value
                self._walk(path, value, depth)
        except Exception:  # noqa: BLE001  any object may raise anything when it is inspected
            self.found[path] = f"{with_article(type(value).__name__)} that cannot be looked at"

    def walk_globals(self, module: str) -> None:
        """Inspect the globals of a module of the user's, and note those that it imports from."""
        for name, value in list(vars(sys.modules[module]).items()):
            if name.startswith("__"):
                continue
            if isinstance(value, ModuleType):
                self._note_module(value.__name__)
            elif isinstance(value, type):
                self._note_module(value.__module__)
                if defined_by_user(value.__module__):
                    self._walk_class(value)
            elif isinstance(value, FunctionType):
                self._note_module(value.__module__)
                if defined_by_user(value.__module__):
                    self.walk(f"{module}.{name}", value, DEPTH_OF_GLOBALS)
            elif not isinstance(value, nn.Module):
                self.walk(f"{module}.{name}", value, DEPTH_OF_GLOBALS)

    def _note_module(self, module: str) -> None:
        if defined_by_user(module):
            self.modules.add(module)

    def _walk(self, path: str, value: Any, depth: int) -> None:
        digest = _digest(value)
        if digest is not None:
            self.found[path] = digest
        elif isinstance(value, Tensor):
            self._add_tensor(path, value)
        elif isinstance(value, Mapping):
            items = [(f"[{_key(key)}]", item) for key, item in _first_items(value.items())]
            self._walk_items(path, items, value.values(), len(value), depth)
        elif isinstance(value, list | tuple | deque):
            items = [(f"[{place}]", item) for place, item in enumerate(_first_items(value))]
            self._walk_items(path, items, value, len(value), depth)
        elif isinstance(value, set | frozenset):
            plain = sorted(repr(item) for item in value if isinstance(item, PLAIN))
            self.found[path] = f"{len(value)} items {_hash(b'', *plain)}"
        elif isinstance(value, MethodType):
            self.walk(path, value.__self__, depth)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self.walk(f"{path}.{name}", getattr(value, name), depth - 1)
        elif isinstance(value, FunctionType):
            self._walk_function(path, value, depth)
        elif isinstance(value, GeneratorType):
            self._walk_generator(path, value, depth)
        elif isinstance(value, Iterator):
            self.found[path] = f"{operator.length_hint(value, -1)} left"
        elif isinstance(value, type | BuiltinFunctionType | torch.dtype):
            self.found[path] = getattr(value, "__qualname__", str(value))
        elif not isinstance(value, ModuleType) and not is_beside_models(value):
            self._walk_object(path, value, depth)

    def _add_tensor(self, path: str, tensor: Tensor) -> None:
        self.found[path] = _hash_tensor(tensor)
        place = tensor.data_ptr() if tensor.layout == torch.strided else 0
        self.tensors[path] = (tensor.device.type, place)

    def _walk_items(
        self,
        path: str,
        items: list[tuple[str, Any]],
        values: Iterable[Any],
        count: int,
        depth: int,
    ) -> None:
        """Inspect the first items of a collection one by one, and the rest together."""
        rest = itertools.islice(values, MOST_ITEMS, self.most_items)
        self.found[path] = f"{count} items{_hash_of_plain(rest)}"
        for name, item in items:
            self.walk(path + name, item, depth - 1)

    def _walk_generator(self, path: str, generator: GeneratorType, depth: int) -> None:
        frame = generator.gi_frame
        self.found[path] = f"at {frame and frame.f_lasti}"
        if frame is not None:
            for name, item in frame.f_locals.items():
                self.walk(f"{path}.{name}", item, depth - 1)

    def _walk_function(self, path: str, function: FunctionType, depth: int) -> None:
        self.found[path] = f"{function.__module__}.{function.__qualname__}"
        self._note_module(function.__module__)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self.walk(f"{path}.{name}", cell.cell_contents, depth - 1)
        for place, default in enumerate(function.__defaults__ or ()):
            self.walk(f"{path}.default {place}", default, depth - 1)
        for name, item in vars(function).items():
            self.walk(f"{path}.{name}", item, depth - 1)

    def _walk_object(self, path: str, value: Any, depth: int) -> None:
        for kind in type(value).__mro__:
            if defined_by_user(kind.__module__):
                self.modules.add(kind.__module__)
                self._walk_class(kind)
        is_module = isinstance(value, nn.Module)
        is_torchs = is_module and type(value).__module__.startswith("torch.")
        for name, item in attributes_of(value).items():
            if is_module and _is_of_every_module(name):
                continue
            # A private attribute or a tensor of torch's own layers, as weight norm's weight.
            if is_torchs and (name.startswith("_") or isinstance(item, Tensor)):
                continue
            self.walk(f"{path}.{name}", item, depth - 1)
        if is_module:
            self._walk_module(path, value, depth)

    def _walk_class(self, kind: type) -> None:
        """Inspect the values that a class of the user's holds itself."""
        if kind in self.classes:
            return
        self.classes.add(kind)
        for name, item in list(vars(kind).items()):
            if not name.startswith("__") and not isinstance(item, CODE):
                self.walk(f"{kind.__name__}.{name}", item, DEPTH_OF_CLASSES)

    def _walk_module(self, path: str, module: nn.Module, depth: int) -> None:
        """Inspect the forward hooks and the children of a module."""
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for place, hook in enumerate(hooks):
            self.walk(f"{path}'s hook {place}", hook, depth - 1)
        for name, child in module.named_children():
            self.walk(f"{path}.{name}", child, DEPTH)


def is_beside_models(value: Any) -> bool:
    """True for objects that change beside a forward pass: ours, and those that are SHARED.

    Modules and tasks of ours are a model's all the same.
    """
    kind = type(value)
    if isinstance(value, nn.Module) or kind.__module__.startswith("ddp_train.tasks."):
        return False
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return packages[0] in OUR_PACKAGES or not SHARED.isdisjoint(packages)


def _key(key: Any) -> str:
    """A key of a dict, for a path."""
    return repr(key) if isinstance(key, (*PLAIN, tuple)) else type(key).__name__


def _is_of_every_module(name: str) -> bool:
    """True for an attribute that every torch module has."""
    return name in ATTRIBUTES_OF_TORCH or name.endswith("_hooks") or "_hooks_" in name


def _first_items(items: Iterable[Any]) -> list[Any]:
    """A copy of the first items: to inspect one may change the collection."""
    return list(itertools.islice(items, MOST_ITEMS))


def _hash_of_plain(items: Iterable[Any]) -> str:
    """A hash of the plain ones among items that are not inspected one by one; "" without any."""
    plain = [repr(item) for item in items if isinstance(item, PLAIN)]
    if not plain:
        return ""
    return f" {_hash(b'', *plain)}"


def _hash_tensor(tensor: Tensor) -> str:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _hash(b"", _hash_tensor(tensor.values()), _hash_tensor(tensor.indices()))
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    stride = max(1, len(flat) // MOST_NUMBERS)
    numbers = flat[::stride].cpu().contiguous()
    kind = str(tensor.dtype)
    if tensor.is_floating_point():
        # torchvision's detectors convert their anchors to the dtype of a batch.
        numbers = numbers.double()
        kind = "floating-point"
    content = numbers.view(torch.uint8).numpy().tobytes() if numbers.numel() else b""
    return _hash(content, tuple(tensor.shape), kind)


def _digest(value: Any) -> str | None:
    """A digest of a value that is not a tensor and holds nothing else; None for others."""
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return f"{value.size} objects"
        if isinstance(value, np.memmap) and value.nbytes > MOST_MAPPED_BYTES:
            return f"{value.shape} in a file"
        flat = value.reshape(-1)
        stride = max(1, len(flat) // MOST_NUMBERS)
        return _hash(flat[::stride].tobytes(), value.shape)
    if is_generator(value):
        return digest_of_generator(value)
    if isinstance(value, np.generic | bytearray | itertools.count):
        return repr(value)
    if type(value).__module__ == "itertools":
        return type(value).__name__  # nothing of it can be seen without a step
    return None


def digest_of_generator(generator: Any) -> str:
    """A digest of the state of a generator of random numbers."""
    state = get_state(generator)
    if isinstance(state, Tensor):
        return _hash(state.numpy().tobytes())
    return _hash(b"", state)


def _hash(content: bytes, *more: Any) -> str:
    return hashlib.sha256(content + repr(more).encode()).hexdigest()
