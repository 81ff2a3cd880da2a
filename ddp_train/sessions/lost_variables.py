"""Variables of a loop that its losses depend on, and that no checkpoint holds.

A hidden state that goes from batch to batch, a pool of earlier images, the number of a pass,
rollouts or a copy of the model that were made at the beginning of the epoch: a run that is resumed
inside of an epoch begins without them. They are found in the function that has the loop over
batches: what its caller made, and what a method that it calls keeps, is not.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.carried_names import LoopNames, names_of_loop
from ddp_train.sessions.carried_numbers import code_of, names_of, run_names, value_of
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.tensor_tree import tensors

LOST = (
    "%s: in no checkpoint, and the losses need it. A run that is resumed inside of an epoch begins"
    " without it, and ends with other weights. Keep it in an object with state_dict and"
    " load_state_dict that run.resume gets; or, if each epoch makes it anew, resume at the"
    " beginning of an epoch: run.epochs(..., whole=True)"
)
MOST_ITEMS = 10_000
"""Of a list or dict that is looked into."""
MOST_TENSORS = 1_000
LIBRARIES = ("torch", "ddp_train", "builtins", "collections", "numpy")
"""Modules whose objects are no pools of a user's."""
Pool = list[tuple[Tensor, int]]
"""The tensors that an object holds, and how often each was changed."""


class LostVariables:
    """Finds such variables, at the ends of the first two steps."""

    def __init__(self, saved: Collection[Any]) -> None:
        """saved: the models, as `run.wrap` returned them, and the objects that run.resume got."""
        self.saved = saved
        self.known = {id(item) for item in saved}
        self.known |= {id(item.module) for item in saved if isinstance(item, Wrapped)}
        self.pools: dict[str, Pool] | None = None
        """Of the objects that the loop uses, after the first step; None before."""

    def look(self) -> list[str] | None:
        """The names, once it was called after two steps; None before."""
        for frame in user_frames():
            loop = names_of_loop(code_of(frame), frame.f_lineno, run_names(frame))
            if loop is None:
                continue
            places = self._saved_places()
            now = self._pools_of_used(loop, frame, places)
            if self.pools is None:
                self.pools = now
                return None
            names = self._lost_names(loop, frame, places)
            names += [name for name in now if _goes_on(self.pools.get(name, []), now[name])]
            return sorted({*names, *loop.passes})
        return []

    def _lost_names(self, loop: LoopNames, frame: types.FrameType, places: set[int]) -> list[str]:
        of_model = names_of(frame, lambda value: isinstance(value, Wrapped))
        return [
            name
            for name in loop.carried | loop.made_from(of_model)
            if not self._is_saved(name, frame) and _is_lost(value_of(name, frame), places)
        ]

    def _saved_places(self) -> set[int]:
        """Where the tensors lie that saved modules and objects hold."""
        places = set()
        for item in self.saved:
            held = item.parameters() if isinstance(item, nn.Module) else tensors(item)
            places |= {_place(tensor) for tensor in held}
        return places

    def _pools_of_used(
        self, loop: LoopNames, frame: types.FrameType, places: set[int]
    ) -> dict[str, Pool]:
        pools = {}
        for name in loop.used:
            value = value_of(name, frame)
            if name != "self" and _may_hold(value) and not self._is_saved(name, frame):
                found = islice(tensors(value), MOST_TENSORS)
                own = [tensor for tensor in found if _place(tensor) not in places]
                pools[name] = [(tensor, tensor._version) for tensor in own]
        return pools

    def _is_saved(self, name: str, frame: types.FrameType) -> bool:
        """Whether run.resume got the value of a name, or the object that it is an attribute of."""
        words = name.split(".")
        owners = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        return any(id(value_of(owner, frame)) in self.known for owner in owners)


def _goes_on(before: Pool, now: Pool) -> bool:
    """Whether a pool has more tensors than a step before, or the same ones that were changed.

    Where all are others they may be of the step alone, as the perturbations of SAM.
    """
    versions = {id(tensor): version for tensor, version in before}
    was_changed = any(versions.get(id(tensor), version) != version for tensor, version in now)
    return was_changed or len(now) > len(before) > 0


def _is_lost(value: Any, saved_places: set[int]) -> bool:
    """True for numbers, tensors and what holds some, but for what lies where saved tensors do."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return True
    found = value.parameters() if isinstance(value, nn.Module) else tensors(value)
    return any(_place(tensor) not in saved_places for tensor in found)


def _place(tensor: Tensor) -> int:
    """The address of its memory, of which a view has the same; its own where it has none."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _may_hold(value: Any) -> bool:
    """Whether an object may be a pool of tensors: a list, a dict, one of a class of the user's."""
    if isinstance(value, list | dict):
        return len(value) <= MOST_ITEMS
    if isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    return not type(value).__module__.startswith(LIBRARIES) and hasattr(value, "__dict__")
