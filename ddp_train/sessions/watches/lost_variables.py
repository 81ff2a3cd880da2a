"""Variables of a loop that its losses depend on, and that no checkpoint holds.

A hidden state that goes from batch to batch, a pool of earlier images, the number of a pass,
rollouts or a copy of the model that were made at the beginning of the epoch: a run that is resumed
inside of an epoch begins without them. A threshold, a running centre, a weight of a loss that goes
on from epoch to epoch is lost at the end of one too. A mask that is made from the weights between
two loops over epochs is made again, from others. They are found in the code of the loop over
batches, of the functions that it calls, and of the loop over epochs.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.session_objects import has_torchs_state
from ddp_train.sessions.watches.carried_names import LoopCode, LoopNames
from ddp_train.sessions.watches.code_names import as_code, containers_of, owners_of
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.tensor_tree import attributes_of, tensors

LOST = (
    "%s: in no checkpoint, but training needs it. A run that is resumed inside of an epoch"
    " starts without it, and ends with other weights. Keep it in an object with state_dict and"
    " load_state_dict, and pass that to run.resume (a count of steps is run.step). If each epoch"
    " creates it again, you can save only at the end of epochs instead: run.epochs(...,"
    " whole=True)"
)
LOST_OVER_EPOCHS = (
    "%s: in no checkpoint, but later epochs need it. A resumed run starts without it, and ends"
    " with other weights. Keep it in an object with state_dict and load_state_dict, and pass that"
    " to run.resume (a count of steps is run.step)"
)
MADE_AGAIN = (
    "%s: made from the model after run.resume, outside of the epochs. A resumed run makes it again,"
    " from the weights that it resumes with, and ends with other weights. Make it before"
    " run.resume, or keep it in an object with state_dict and load_state_dict, pass that to"
    " run.resume, and fill it only if it is empty"
)
MOST_ITEMS = 10_000
"""The longest list or dict that is looked into."""
MOST_TENSORS = 1_000
LIBRARIES = ("torch", "ddp_train", "builtins", "collections", "numpy")
"""Modules whose objects are no pools of a user's."""
DEEPEST = 3
"""Lists and dicts within each other whose numbers are looked at."""


@dataclass(frozen=True)
class Pool:
    """What an object holds, at one moment."""

    tensors: list[tuple[Tensor, int]]
    """Each with how often it was changed."""
    numbers: list[float]

    def goes_on_in(self, now: Pool) -> bool:
        """Whether it has more tensors or other numbers now, or the same tensors were changed.

        Where all tensors are others they may be of the step alone, as the perturbations of SAM.
        """
        versions = {id(tensor): version for tensor, version in self.tensors}
        was_changed = any(versions.get(id(one), version) != version for one, version in now.tensors)
        has_more = len(now.tensors) > len(self.tensors) > 0
        has_same_numbers = np.array_equal(self.numbers, now.numbers, equal_nan=True)
        return was_changed or has_more or not has_same_numbers


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

    def look_over_epochs(self) -> tuple[list[str], list[str]]:
        """Names that are lost around the epochs, but for those told before.

        To be called between two epochs, or before the first one.

        Returns those that the loop over epochs carries into later ones, and those that losses need
        and that are made from a model outside of the epochs, where a resumed run has other weights.
        """
        for frame in user_frames():
            code = LoopCode.of_frame(frame)
            loop = code.loop_names()
            if loop is None:
                continue
            places = self._saved_places()
            now = self._pools_of_used(loop, code, places)
            carried = self._not_told(self._carried(loop, code, places, self.pools_of_epochs, now))
            self.pools_of_epochs = now
            made = LoopCode.of_frame(frame).made_beside_epochs()
            needed = {name for name in made if {name, *_parts(name, loop.reaching)} & loop.reaching}
            lost = {name for name in needed if self._has_lost_weights(name, code, places)}
            return carried, self._not_told(lost)
        return [], []

    def _has_lost_weights(self, name: str, code: LoopCode, places: set[int]) -> bool:
        """Whether a name has tensors that are not saved. Those with one number are no weights."""
        value = code.value_of(name)
        if self._is_saved(name, code):
            return False
        if isinstance(value, nn.Module):
            found = [*value.parameters(), *value.buffers()]
        else:
            found = islice(tensors(value), MOST_TENSORS)
        return any(_place(one) not in places and _varies(one) for one in found)

    def look(self) -> list[str] | None:
        """The names, once it was called after two steps; None before."""
        frames = list(user_frames())
        for place, frame in enumerate(frames):
            code = LoopCode.of_frame(frame)
            loop = code.loop_names()
            if loop is None:
                continue
            places = self._saved_places()
            now = self._pools_of_used(loop, code, places)
            if self.pools is None:
                self.pools = now
                return None
            names = self._carried(loop, code, places, self.pools, now) | loop.counts
            values = [code.value_of(name) for name in loop.reaching]
            epoch = code.epoch_names(code.head)
            passes = set(epoch.passes)
            names |= self._needed(epoch.made_from(code.is_wrapped), code, values, places)
            for outer, inner in zip(frames[place + 1 :], frames[place:], strict=False):
                outer_code = LoopCode.of_frame(outer)
                epoch = outer_code.epoch_names(outer.f_lineno, called=inner.f_code)
                passes |= epoch.passes
                made = epoch.made_from(outer_code.is_wrapped)
                names |= self._needed(made, outer_code, values, places)
                made = epoch.arguments_from(outer_code.is_wrapped)
                names |= self._needed(made, LoopCode.of_frame(inner), values, places)
            # `for phase in ["train", "val"]` has the steps in one of them.
            names |= {
                name
                for name in passes
                if name not in loop.deciding or not isinstance(code.value_of(name), str)
            }
            self.pools = None
            return self._not_told(names)
        return []

    def _not_told(self, names: set[str]) -> list[str]:
        """The names that no warning has had, without attributes of objects that are new too."""
        new = names - self.told
        self.told |= names
        return sorted(as_code(name) for name in new if not owners_of(name) & new)

    def _carried(
        self,
        loop: LoopNames,
        code: LoopCode,
        saved_places: set[int],
        before: dict[str, Pool],
        now: dict[str, Pool],
    ) -> set[str]:
        """Names that a loop carries from one pass to the next. before, now: its pools."""
        names = {name for name in loop.carried if self._is_lost(name, code, saved_places)}
        known = now.keys() & before.keys()
        return names | {name for name in known if before[name].goes_on_in(now[name])}

    def _needed(
        self, names: set[str], code: LoopCode, values: list[Any], saved_places: set[int]
    ) -> set[str]:
        """The names among `names` that are not saved, and on which the losses of the loop depend.

        values: all values on which the losses depend.
        """
        needed = {id(value) for value in values}
        needed_places = set().union(*map(_places_of, values))
        found = set()
        for name in names:
            value = code.value_of(name)
            is_needed = id(value) in needed or _places_of(value) & needed_places
            if is_needed and self._is_lost(name, code, saved_places):
                found.add(name)
        return found.difference(*map(containers_of, found))

    def _saved_places(self) -> set[int]:
        """Where the tensors lie that saved modules and objects hold."""
        places = set()
        for item in self.saved:
            places |= _places_of(item)
        return places

    def _pools_of_used(self, loop: LoopNames, code: LoopCode, places: set[int]) -> dict[str, Pool]:
        pools = {}
        for name in loop.used:
            value = code.value_of(name)
            if self._is_saved(name, code) or _is_used_by_parts(name, loop, code):
                continue
            found = islice(tensors(value), MOST_TENSORS) if _may_hold(value) else []
            own = [tensor for tensor in found if _place(tensor) not in places]
            changes = [(tensor, tensor._version) for tensor in own]
            pools[name] = Pool(changes, list(_numbers_in(value)))
        return pools

    def _is_lost(self, name: str, code: LoopCode, saved_places: set[int]) -> bool:
        """Whether a name has numbers or tensors that are not saved."""
        value = code.value_of(name)
        if self._is_saved(name, code):
            return False
        return any(True for _ in _numbers_in(value)) or not _places_of(value) <= saved_places

    def _is_saved(self, name: str, code: LoopCode) -> bool:
        """Whether a checkpoint holds the value of a name, or an object that has it.

        What the run itself and its loaders keep is saved too.
        """
        words = name.split(".")
        for count, word in enumerate([*words[1:], ""], 1):
            value = code.value_of(".".join(words[:count]))
            if _is_ours(value) or (id(value) in self.known and _is_in_state(value, word)):
                return True
        return False


def _parts(name: str, names: set[str]) -> set[str]:
    """Those of some names that are attributes or items of one."""
    return {one for one in names if name in owners_of(one)}


def _is_in_state(holder: Any, name: str) -> bool:
    """Whether what run.resume got saves an attribute. name: "" for all of it."""
    if isinstance(holder, Wrapped) and name != "module":
        holder = holder.module
    kind = type(holder)
    if isinstance(holder, Optimizer) and has_torchs_state(holder):
        return name in ("", "state", "param_groups")
    if not isinstance(holder, nn.Module) or kind.state_dict is not nn.Module.state_dict:
        return True
    has_extra = kind.get_extra_state is not nn.Module.get_extra_state
    attributes = attributes_of(holder)
    return has_extra or name not in attributes


def _is_used_by_parts(name: str, loop: LoopNames, code: LoopCode) -> bool:
    """Whether the loop needs attributes of an object alone, which are looked at: no method."""
    parts = {one for one in loop.reaching if one.rpartition(".")[0] == name}
    return bool(parts) and all(code.value_of(part) is not None for part in parts)


def _is_ours(value: Any, levels: int = DEEPEST) -> bool:
    """Whether a value is of the session, or a list, tuple or dict of such, as of loaders."""
    if isinstance(value, list | tuple | dict) and value and levels:
        items = list(value.values() if isinstance(value, dict) else value)
        return all(_is_ours(item, levels - 1) for item in items)
    return type(value).__module__.startswith("ddp_train.") and not isinstance(value, Wrapped)


def _numbers_in(value: Any, levels: int = DEEPEST) -> Iterator[float]:
    """A number, those of an array, or those in a list or dict which is not long."""
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "iuf":
            yield from value.reshape(-1)[:MOST_ITEMS].tolist()
    elif isinstance(value, list | tuple | deque | dict) and levels and len(value) <= MOST_ITEMS:
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _numbers_in(item, levels - 1)


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


def _varies(tensor: Tensor) -> bool:
    """Whether a tensor has different real numbers."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return False
    return bool((tensor != tensor.reshape(-1)[0]).any())


def _may_hold(value: Any) -> bool:
    """Whether an object may be a pool of tensors: a list, a dict, one of a class of the user's."""
    if isinstance(value, list | dict | deque):
        return len(value) <= MOST_ITEMS
    if isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    return not type(value).__module__.startswith(LIBRARIES) and hasattr(value, "__dict__")
