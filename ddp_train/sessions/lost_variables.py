"""Variables of a loop that its losses depend on, and that no checkpoint holds.

A hidden state that goes from batch to batch, a pool of earlier images, the number of a pass,
rollouts or a copy of the model that were made at the beginning of the epoch: a run that is resumed
inside of an epoch begins without them. A threshold, a running centre, a weight of a loss that goes
on from epoch to epoch is lost at the end of one too. They are found in the code of the loop over
batches, of the functions that it calls, and of the loop over epochs.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.carried_names import EpochNames, LoopCode, LoopNames
from ddp_train.sessions.frame_names import value_of
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.tensor_tree import tensors

LOST = (
    "%s: in no checkpoint, and the losses need it. A run that is resumed inside of an epoch begins"
    " without it, and ends with other weights. Keep it in an object with state_dict and"
    " load_state_dict that run.resume gets; or, if each epoch makes it anew, resume at the"
    " beginning of an epoch: run.epochs(..., whole=True)"
)
LOST_OVER_EPOCHS = (
    "%s: in no checkpoint, and later epochs need it. A run that is resumed begins without it, and"
    " ends with other weights. Keep it in an object with state_dict and load_state_dict that"
    " run.resume gets"
)
MOST_ITEMS = 10_000
"""The longest list or dict that is looked into."""
MOST_TENSORS = 1_000
LIBRARIES = ("torch", "ddp_train", "builtins", "collections", "numpy")
"""Modules whose objects are no pools of a user's."""
Pool = list[tuple[Tensor, int]]
"""The tensors that an object holds, and how often each was changed."""


class LostVariables:
    """Finds such variables, at the ends of the first two steps, and around epochs."""

    def __init__(self, saved: Collection[Any]) -> None:
        """saved: the models, as `run.wrap` returned them, and the objects that run.resume got."""
        self.saved = saved
        self.known = {id(item) for item in saved}
        self.known |= {id(item.module) for item in saved if isinstance(item, Wrapped)}
        self.pools: dict[str, Pool] | None = None
        """The pools of objects that the loop uses, after the first step; None before."""
        self.pools_of_epochs: dict[str, Pool] = {}
        """Those that the loop over epochs uses, as they were at the last look."""
        self.told: set[str] = set()

    def look_over_epochs(self) -> list[str]:
        """The names that the loop over epochs carries into later ones, but for those told before.

        To be called between two epochs, or before the first one.
        """
        for frame in user_frames():
            loop = LoopCode.of_frame(frame).loop_names()
            if loop is None:
                continue
            places = self._saved_places()
            now = self._pools_of_used(loop, frame, places)
            names = self._carried(loop, frame, places, self.pools_of_epochs, now)
            self.pools_of_epochs = now
            return self._not_told(names)
        return []

    def look(self) -> list[str] | None:
        """The names, once it was called after two steps; None before."""
        frames = list(user_frames())
        for place, frame in enumerate(frames):
            code = LoopCode.of_frame(frame)
            loop = code.loop_names()
            if loop is None:
                continue
            places = self._saved_places()
            now = self._pools_of_used(loop, frame, places)
            if self.pools is None:
                self.pools = now
                return None
            names = self._carried(loop, frame, places, self.pools, now)
            values = [value_of(name, frame) for name in loop.reaching]
            names |= self._names_of_epoch(code.epoch_names(code.head), frame, values, places)
            for outer in frames[place + 1 :]:
                epoch = LoopCode.of_frame(outer).epoch_names(outer.f_lineno)
                names |= self._names_of_epoch(epoch, outer, values, places)
            return self._not_told(names)
        return []

    def _not_told(self, names: set[str]) -> list[str]:
        """The names that were not told, without those of attributes of objects among them."""
        new = names - self.told
        self.told |= names
        return sorted(name for name in new if not _owners(name) & new)

    def _carried(
        self,
        loop: LoopNames,
        frame: types.FrameType,
        saved_places: set[int],
        before: dict[str, Pool],
        now: dict[str, Pool],
    ) -> set[str]:
        """Names that a loop carries from one pass to the next. before, now: its pools."""
        names = {name for name in loop.carried if self._is_lost(name, frame, saved_places)}
        return names | {name for name in now if _goes_on(before.get(name, []), now[name])}

    def _names_of_epoch(
        self,
        epoch: EpochNames,
        frame: types.FrameType,
        values: list[Any],
        saved_places: set[int],
    ) -> set[str]:
        """Names that an epoch has set in a frame before the loop, and those that count its passes.

        values: those that the losses of the loop depend on.
        """
        needed = {id(value) for value in values}
        needed_places = set().union(*map(_places_of, values))
        names = epoch.passes
        for name in epoch.made_from(lambda name: isinstance(value_of(name, frame), Wrapped)):
            value = value_of(name, frame)
            is_needed = id(value) in needed or _places_of(value) & needed_places
            if is_needed and self._is_lost(name, frame, saved_places):
                names.add(name)
        return names

    def _saved_places(self) -> set[int]:
        """Where the tensors lie that saved modules and objects hold."""
        places = set()
        for item in self.saved:
            places |= _places_of(item)
        return places

    def _pools_of_used(
        self, loop: LoopNames, frame: types.FrameType, places: set[int]
    ) -> dict[str, Pool]:
        pools = {}
        for name in loop.used:
            value = value_of(name, frame)
            if _may_hold(value) and not self._is_saved(name, frame):
                found = islice(tensors(value), MOST_TENSORS)
                own = [tensor for tensor in found if _place(tensor) not in places]
                pools[name] = [(tensor, tensor._version) for tensor in own]
        return pools

    def _is_lost(self, name: str, frame: types.FrameType, saved_places: set[int]) -> bool:
        """Whether a name has numbers or tensors that are not saved."""
        value = value_of(name, frame)
        if self._is_saved(name, frame) or isinstance(value, bool):
            return False
        return isinstance(value, int | float) or not _places_of(value) <= saved_places

    def _is_saved(self, name: str, frame: types.FrameType) -> bool:
        """Whether run.resume got the value of a name, or the object that it is an attribute of."""
        return any(id(value_of(one, frame)) in self.known for one in {name, *_owners(name)})


def _goes_on(before: Pool, now: Pool) -> bool:
    """Whether a pool has more tensors than a step before, or the same ones that were changed.

    Where all are others they may be of the step alone, as the perturbations of SAM.
    """
    versions = {id(tensor): version for tensor, version in before}
    was_changed = any(versions.get(id(tensor), version) != version for tensor, version in now)
    return was_changed or len(now) > len(before) > 0


def _owners(name: str) -> set[str]:
    """The objects that an attribute belongs to: of `self.net.rows` `self` and `self.net`."""
    words = name.split(".")
    return {".".join(words[:count]) for count in range(1, len(words))}


def _places_of(value: Any) -> set[int]:
    """Where the tensors lie that a value holds, which is no long list."""
    if isinstance(value, list | dict) and len(value) > MOST_ITEMS:
        return set()
    if isinstance(value, nn.Module):
        return {_place(held) for held in (*value.parameters(), *value.buffers())}
    return set(map(_place, tensors(value)))


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
