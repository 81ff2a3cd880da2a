"""What code keeps beside parameters and buffers: in attributes, in its classes, in the globals of its modules."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PACKAGE = str(Path(__file__).resolve().parent.parent)
MOST_ITEMS = 64
"""Items of a list or dict that are looked at."""
MOST_NUMBERS = 2**20
"""Numbers of a tensor that are looked at; of a larger one, as many, evenly spread."""
DEPTH = 5
TENSOR = "tensor "
"""With which the digest of a tensor begins."""
PLAIN = (int, float, complex, str, bytes, type(None))
_OF_MODULES = (
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_compiled_call_impl",
)


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is neither of this package, nor installed, nor Python's."""
    if not file.endswith(".py") or file.startswith(PACKAGE):
        return False
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(part in file for part in ("site-packages", "dist-packages")) and not file.startswith(tuple(places))


def defined_by_user(module: str) -> bool:
    return is_users(getattr(sys.modules.get(module), "__file__", None) or "")


def state_of(roots: Mapping[str, Any]) -> dict[str, str]:
    """What objects keep beside parameters and buffers: attributes of them and of what they hold, of their classes, and
    the globals of the user's modules that they come from. Paths, as a person would write them, and digests."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    modules: set[str] = set()
    for name, root in roots.items():
        _walk(name, root, found, seen, modules, DEPTH)
    for module in sorted(modules):
        for name, value in list(vars(sys.modules[module]).items()):
            if not (name.startswith("__") or isinstance(value, ModuleType | type | FunctionType | nn.Module)):
                _walk(f"{module}.{name}", value, found, seen, set(), 2)
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths whose value has changed, or is new."""
    return [path for path, value in after.items() if before.get(path) != value]


def _walk(path: str, value: Any, found: dict[str, str], seen: set[int], modules: set[str], depth: int) -> None:
    if isinstance(value, PLAIN):
        found[path] = repr(value)
        return
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if (digest := _digest(value)) is not None:
        found[path] = digest
    elif isinstance(value, Mapping):
        found[path] = f"{len(value)} items"
        for key, item in list(value.items())[:MOST_ITEMS]:
            _walk(f"{path}[{key!r}]", item, found, seen, modules, depth - 1)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        found[path] = f"{len(value)} items"
        for place, item in enumerate(list(value)[:MOST_ITEMS] if not isinstance(value, set | frozenset) else ()):
            _walk(f"{path}[{place}]", item, found, seen, modules, depth - 1)
    elif isinstance(value, MethodType):
        _walk(path, value.__self__, found, seen, modules, depth)
    elif isinstance(value, FunctionType):
        modules |= {value.__module__} if defined_by_user(value.__module__) else set()
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            _walk(f"{path}.{name}", cell.cell_contents, found, seen, modules, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        _walk_object(path, value, found, seen, modules, depth)


def _walk_object(path: str, value: Any, found: dict[str, str], seen: set[int], modules: set[str], depth: int) -> None:
    for kind in type(value).__mro__:
        if defined_by_user(kind.__module__):
            modules.add(kind.__module__)
            for name, item in list(vars(kind).items()):
                if not name.startswith("__") and isinstance(item, (*PLAIN, list, dict, set, deque)):
                    _walk(f"{kind.__name__}.{name}", item, found, seen, modules, 1)
    is_module = isinstance(value, nn.Module)
    torchs_own = is_module and type(value).__module__.startswith("torch.")
    for name, item in {} if torchs_own else dict(vars(value)).items():
        if not (is_module and (name in _OF_MODULES or name.endswith("_hooks") or "_hooks_" in name)):
            _walk(f"{path}.{name}", item, found, seen, modules, depth - 1)
    for name, child in value.named_children() if is_module else ():
        _walk(f"{path}.{name}", child, found, seen, modules, DEPTH)


def _digest(value: Any) -> str | None:
    """None: not one thing, but several."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // MOST_NUMBERS)].cpu().contiguous()
        content = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
        return TENSOR + _hashed(content, tuple(value.shape))
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return f"{len(value)} objects"
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
    return repr(value) if type(value).__module__ == "itertools" else None


def _hashed(content: bytes, *more: Any) -> str:
    return hashlib.sha256(content + repr(more).encode()).hexdigest()
