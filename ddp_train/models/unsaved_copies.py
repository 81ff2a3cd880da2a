"""Copies of a model that move along in training, and that no checkpoint holds: teachers, averages.

A resumed run would begin them anew, and end in other weights. Nobody can tell from a module whether
it will move: its state is compared between two checkpoints.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.models.averages_in_variables import AveragesInVariables
from ddp_train.models.living_objects import LivingObjects, objects_within
from ddp_train.resilience.failure_report import is_foreign
from ddp_train.text import snake_case, with_article

log = logging.getLogger(__name__)
DEEPEST = 5
"""Levels at which a saved object may hold a module."""
LEVELS_OF_VARIABLE = 3
"""Levels at which a variable may hold tensors: of an object in a list for instance."""


@dataclass
class Candidate:
    """A module or an object that no checkpoint holds."""

    holder: weakref.ref[Any]
    norms: Tensor
    """The norms of its tensors, where they were looked at last."""
    is_named: bool = False
    """The user was told that it changes."""


class UnsavedCopies:
    """The modules, and the averages in lists and dicts, that no checkpoint holds."""

    def __init__(self, models: Iterable[nn.Module], objects: Iterable[Any]) -> None:
        """models, objects: what run.resume got."""
        self.models = list(models)
        self.objects = list(objects)
        self.candidates: dict[int, Candidate] = {}
        """The candidates by the `id` of what each is of."""
        self.in_variables = AveragesInVariables()

    def look_for(self, living: LivingObjects) -> None:
        """Add the candidates that there are now."""
        saved = Saved(self.models, self.objects)
        parts = {id(part) for module in living.modules for part in module._modules.values()}
        roots = [module for module in living.modules if id(module) not in parts]
        averages = [item for item in living.averages if type(item).__weakrefoffset__]
        for holder in [*roots, *averages]:
            known = self.candidates.get(id(holder))
            if known is not None and known.holder() is holder:
                continue
            tensors = saved.unsaved_of(holder)
            if tensors:
                self.candidates[id(holder)] = Candidate(weakref.ref(holder), norms_of(tensors))

    def note(self) -> None:
        """Note the present weights: from here on they are not to change."""
        saved = Saved(self.models, self.objects)
        for candidate in self.candidates.values():
            candidate.norms = norms_of(saved.unsaved_of(candidate.holder()))
        self.in_variables.note(self._tensors_of_variables(saved), norms_of)

    def warn_of_changed(self) -> None:
        """Warn of the candidates that have changed since they were noted, once of each."""
        for holder in self.changed():
            _warn_of(holder)
        tensors_of = self._tensors_of_variables(Saved(self.models, self.objects))
        for name in self.in_variables.changed(tensors_of, norms_of):
            log.warning(
                "%s changed during training but is in no checkpoint: a resumed run would begin with"
                " a new one. Keep it in an object with state_dict and load_state_dict (such as"
                " torch's AveragedModel), create that before run.resume, and pass it:"
                " run.resume(..., %s=%s)",
                *(name, name, name),
            )

    def _tensors_of_variables(self, saved: Saved) -> Callable[[Any], list[Tensor]]:
        """A function that gives what is unsaved of a variable, and of no candidate."""
        holders = [candidate.holder() for candidate in self.candidates.values()]
        known = {id(tensor) for holder in holders for tensor in saved.unsaved_of(holder)}

        def tensors_of(value: Any) -> list[Tensor]:
            found = saved.unsaved_within(value)
            return [tensor for tensor in found if id(tensor) not in known]

        return tensors_of

    def changed(self) -> list[Any]:
        """The candidates that have changed since they were noted, each once."""
        found: list[Any] = []
        if not self.candidates:
            return found
        saved = Saved(self.models, self.objects)
        for key, candidate in list(self.candidates.items()):
            holder = candidate.holder()
            if holder is None:
                del self.candidates[key]
            elif not candidate.is_named:
                now = norms_of(saved.unsaved_of(holder))
                candidate.is_named = not _are_same(candidate.norms, now)
                if candidate.is_named:
                    found.append(holder)
        return found


class Saved:
    """The tensors that a checkpoint holds at one moment: a model may get other layers."""

    def __init__(self, models: list[nn.Module], objects: list[Any]) -> None:
        self.objects = {id(item) for item in objects}
        self.shapes = [shapes_of(model.parameters()) for model in models]
        """The shapes of the parameters of each model."""
        saved = list(objects_within(objects, DEEPEST))
        self.held = {id(item) for item in saved}
        """The `id` of each saved object, and of each object within one."""
        modules = {
            id(module): module
            for holder in [*models, *(item for item in saved if isinstance(item, nn.Module))]
            for module in holder.modules()
        }
        tensors = [tensor for module in modules.values() for tensor in state_of(module)]
        self.tensors = {id(tensor) for tensor in tensors}
        self.memory = {tensor.data_ptr() for tensor in tensors if not tensor.is_meta}

    def unsaved_of(self, holder: Any) -> list[Tensor]:
        """The tensors of a module's state, or of an object's lists and dicts, that no checkpoint
        holds."""
        if holder is None or id(holder) in self.objects:
            return []
        if isinstance(holder, nn.Module):
            tensors = [tensor for part in holder.modules() for tensor in state_of(part)]
        else:
            attributes = list(getattr(holder, "__dict__", {}).values())
            tensors = [tensor for value in attributes for tensor in self._like_a_model(value)]
        return self._unsaved_among(tensors)

    def unsaved_within(self, value: Any) -> list[Tensor]:
        """The same of the lists and dicts that a variable is, or holds."""
        tensors: dict[int, Tensor] = {}
        for item in objects_within([value], LEVELS_OF_VARIABLE):
            if id(item) not in self.held:
                tensors |= {id(tensor): tensor for tensor in self._like_a_model(item)}
        unsaved = self._unsaved_among(tensors.values())
        # A state_dict has tensors of its own, which have the memory of the module's.
        return [tensor for tensor in unsaved if tensor.data_ptr() not in self.memory]

    def _unsaved_among(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [
            tensor
            for tensor in tensors
            if id(tensor) not in self.tensors
            and tensor.is_floating_point()
            and tensor.itemsize > 1
            and not tensor.is_meta
        ]

    def _like_a_model(self, value: Any) -> list[Tensor]:
        """The tensors in a list or a dict, if they are as many as a model has."""
        items = list(value.values()) if isinstance(value, Mapping) else value
        if not isinstance(items, list | tuple):
            return []
        tensors = [item for item in items if isinstance(item, Tensor)]
        shapes = shapes_of(tensors)
        if any(shapes >= of_model for of_model in self.shapes):
            return tensors
        return []


def state_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module itself that its state_dict has."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def shapes_of(tensors: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tensor.shape) for tensor in tensors)


@torch.no_grad()
def norms_of(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of each tensor, on the host. Waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        norm = torch.linalg.vector_norm(tensor.detach()).double()
        by_device.setdefault(tensor.device, []).append(norm)
    norms = [torch.stack(of_device).cpu() for of_device in by_device.values()]
    return torch.cat([torch.empty(0, dtype=torch.float64), *norms])


def name_of(value: Any) -> str:
    """The name of an object in the user's code: `teacher`, `self.teacher`; "" if nothing has a name
    for it where the session was called from."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            for variables in (frame.f_locals, frame.f_globals):
                name = _name_among(dict(variables), value)
                if name:
                    return name
        frame = frame.f_back
    return ""


def _name_among(variables: dict[str, Any], value: Any) -> str:
    for name, item in variables.items():
        if item is value:
            return name
    for name, item in variables.items():
        for attribute, of_item in list(getattr(item, "__dict__", {}).items()):
            if of_item is value:
                return f"{name}.{attribute}"
    return ""


def _are_same(before: Tensor, now: Tensor) -> bool:
    """True for the same bits: NaN is NaN."""
    if before.shape != now.shape:
        return False
    return torch.equal(before.view(torch.int64), now.view(torch.int64))


def _warn_of(holder: Any) -> None:
    name = name_of(holder)
    kind = type(holder).__name__
    log.warning(
        "%s changed during training but is in no checkpoint: a resumed run would begin with a new"
        " one. %s before run.resume, and pass it: run.resume(..., %s)",
        f"{name} ({kind})" if name else with_article(kind),
        _what_to_do(holder, kind),
        _argument(name, kind),
    )


def _what_to_do(holder: Any, kind: str) -> str:
    if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
        return "Create it"
    return f"Give {kind} state_dict and load_state_dict, create it"


def _argument(name: str, kind: str) -> str:
    """The argument of run.resume, to be pasted."""
    if not name:
        word = snake_case(kind)
        return f"{word}={word}"
    return f"{name.rpartition('.')[2]}={name}"
