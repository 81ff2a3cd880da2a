"""What code keeps beside parameters and buffers: in attributes, in its classes, in the globals of
its modules."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{CHECKOUT / name}/" for name in ("ddp_train", "ddp_lab"))
MOST_ITEMS = 64
"""Items of a list or dict that are looked at."""
MOST_NUMBERS = 2**20
"""Numbers of a tensor that are looked at; of a larger one, as many, evenly spread."""
DEPTH = 5
PLAIN = (int, float, complex, str, bytes, type(None))
_OF_MODULES = (
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_is_full_backward_hook",
    "_compiled_call_impl",
)


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is neither of these packages, nor installed, nor Python's."""
    if not file.endswith(".py") or file.startswith(OURS):
        return False
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(
        part in file for part in ("site-packages", "dist-packages")
    ) and not file.startswith(tuple(places))


def defined_by_user(module: str) -> bool:
    return is_users(getattr(sys.modules.get(module), "__file__", None) or "")


def state_of(roots: Mapping[str, Any]) -> dict[str, str]:
    """What objects keep beside parameters and buffers: attributes of them and of what they hold, of
    their classes, what their forward hooks hold, and the globals of the user's modules that they
    come from. Paths, as a person would write them, and digests."""
    return look_through(roots).found


def look_through(roots: Mapping[str, Any]) -> State:
    """As `state_of`, with the places of tensors."""
    state = State()
    for name, root in roots.items():
        state.walk(name, root, DEPTH)
    for module in sorted(state.modules):
        for name, value in list(vars(sys.modules[module]).items()):
            if not (
                name.startswith("__")
                or isinstance(value, ModuleType | type | FunctionType | nn.Module)
            ):
                state.walk(f"{module}.{name}", value, 2)
    return state


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths whose value has changed, or is new."""
    return [path for path, value in after.items() if before.get(path) != value]


class State:
    """What was found, path by path."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.tensors: dict[str, tuple[str, int]] = {}
        """The type of the device of each tensor, and where it begins there."""
        self.modules: set[str] = set()
        """The user's, whose objects or functions were met."""
        self.seen: dict[int, tuple[str, Any]] = {}
        """By the ids of objects: where each was first met, and the object, so that its id does not
        come again."""

    def walk(self, path: str, value: Any, depth: int) -> None:
        try:
            if isinstance(value, PLAIN):
                self.found[path] = repr(value)
            elif id(value) in self.seen:
                self.found[path] = f"as {self.seen[id(value)][0]}"
            elif depth >= 0:
                self.seen[id(value)] = path, value
                self._walk(path, value, depth)
        except Exception:  # noqa: BLE001  objects of anyone's may raise anything when they are looked at
            self.found[path] = f"a {type(value).__name__} that cannot be looked at"

    def _walk(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.found[path] = _hash_of_tensor(value)
            self.tensors[path] = (
                value.device.type,
                value.data_ptr() if value.layout == torch.strided else 0,
            )
        elif (digest := _digest(value)) is not None:
            self.found[path] = digest
        elif isinstance(value, Mapping):
            self.found[path] = f"{len(value)} items{_tail(value.values())}"
            for key, item in itertools.islice(list(value.items()), MOST_ITEMS):
                self.walk(f"{path}[{key!r}]", item, depth - 1)
        elif isinstance(value, list | tuple | deque):
            self.found[path] = f"{len(value)} items{_tail(value)}"
            for place, item in enumerate(itertools.islice(list(value), MOST_ITEMS)):
                self.walk(f"{path}[{place}]", item, depth - 1)
        elif isinstance(value, set | frozenset):
            self.found[path] = (
                f"{len(value)} items"
                f" {_hashed(b'', *sorted(repr(i) for i in value if _is_plain(i)))}"
            )
        elif isinstance(value, MethodType):
            self.walk(path, value.__self__, depth)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self.walk(f"{path}.{name}", getattr(value, name), depth - 1)
        elif isinstance(value, FunctionType):
            self._walk_function(path, value, depth)
        elif isinstance(value, GeneratorType):
            self.found[path] = f"at {value.gi_frame and value.gi_frame.f_lasti}"
            for name, item in (value.gi_frame.f_locals if value.gi_frame else {}).items():
                self.walk(f"{path}.{name}", item, depth - 1)
        elif isinstance(value, Iterator):
            self.found[path] = f"{operator.length_hint(value, -1)} left"
        elif isinstance(value, type | BuiltinFunctionType | torch.dtype):
            self.found[path] = getattr(value, "__qualname__", str(value))
        elif not isinstance(value, ModuleType):
            self._walk_object(path, value, depth)

    def _walk_function(self, path: str, value: FunctionType, depth: int) -> None:
        self.found[path] = f"{value.__module__}.{value.__qualname__}"
        self.modules |= {value.__module__} if defined_by_user(value.__module__) else set()
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self.walk(f"{path}.{name}", cell.cell_contents, depth - 1)
        for place, default in enumerate(value.__defaults__ or ()):
            self.walk(f"{path}.default {place}", default, depth - 1)
        for name, item in vars(value).items():
            self.walk(f"{path}.{name}", item, depth - 1)

    def _walk_object(self, path: str, value: Any, depth: int) -> None:
        is_module = isinstance(value, nn.Module)
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                attributes |= {name: getattr(value, name)} if hasattr(value, name) else {}
            if defined_by_user(kind.__module__):
                self.modules.add(kind.__module__)
                for name, item in list(vars(kind).items()):
                    if not name.startswith("__") and isinstance(
                        item, (*PLAIN, list, dict, set, deque)
                    ):
                        self.walk(f"{kind.__name__}.{name}", item, 1)
        torchs_own = is_module and type(value).__module__.startswith("torch.")
        for name, item in attributes.items():
            if is_module and (name in _OF_MODULES or name.endswith("_hooks") or "_hooks_" in name):
                continue
            if not (
                torchs_own and (name.startswith("_") or isinstance(item, Tensor))
            ):  # as weight norm's weight
                self.walk(f"{path}.{name}", item, depth - 1)
        if is_module:
            for place, hook in enumerate(
                (*value._forward_pre_hooks.values(), *value._forward_hooks.values())
            ):
                self.walk(f"{path}'s hook {place}", hook, depth - 1)
            for name, child in value.named_children():
                self.walk(f"{path}.{name}", child, DEPTH)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def _tail(values: Iterable[Any]) -> str:
    """Of the items that are not looked at one by one, those that are plain."""
    rest = [
        repr(item) for item in itertools.islice(values, MOST_ITEMS, MOST_NUMBERS) if _is_plain(item)
    ]
    return f" {_hashed(b'', *rest)}" if rest else ""


def _hash_of_tensor(tensor: Tensor) -> str:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _hashed(b"", _hash_of_tensor(tensor.values()), _hash_of_tensor(tensor.indices()))
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    some = flat[:: max(1, len(flat) // MOST_NUMBERS)].cpu().contiguous()
    content = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
    return _hashed(content, tuple(tensor.shape), tensor.dtype)


def _digest(value: Any) -> str | None:
    """None: not one thing, but several."""
    if isinstance(value, np.generic | bytearray):
        return repr(value)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return f"{value.size} objects"
        flat = value.reshape(-1)
        return _hashed(flat[:: max(1, len(flat) // MOST_NUMBERS)].tobytes(), value.shape)
    if isinstance(value, torch.Generator):
        return _hashed(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if type(value).__module__ == "itertools":
        return repr(value)
    return None


def _hashed(content: bytes, *more: Any) -> str:
    return hashlib.sha256(content + repr(more).encode()).hexdigest()
