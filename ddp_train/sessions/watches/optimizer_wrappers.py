"""Objects around an optimizer of the loop whose own state no checkpoint holds: the slow weights of
Lookahead, the step of a warm-up. The optimizer inside does not know them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_train.models.living_objects import LivingObjects, objects_within
from ddp_train.models.python_state import replaced, state_of
from ddp_train.models.unsaved_copies import name_of
from ddp_train.text import snake_case

log = logging.getLogger(__name__)
DEEPEST = 5
"""Levels at which a saved object may hold a wrapper."""
LOST = (
    "%s wraps the optimizer that run.resume got as %s. The wrapper's own state changed in"
    " training, but is in no checkpoint, so a resumed run loses it. %s: run.resume(..., %s=%s)"
)
BY_ID = (
    "%s: its state_dict names tensors by id(), which differs between processes, so a resumed run"
    " finds no state for any tensor. Name each tensor by its place in param_groups, as torch's"
    " optimizers do"
)
WRAPPER = "the wrapper"
"""The first word of the paths in a wrapper's state."""
LEVELS_OF_KEYS = 3
"""Dicts within each other whose keys are looked at."""


class OptimizerWrappers:
    """Warns of wrappers of an optimizer whose own state changes and is in no checkpoint."""

    def __init__(self, objects: Mapping[str, Any], model: nn.Module) -> None:
        """
        objects: the objects that run.resume got beside models, by names.
        model: all models of the session, as one module.
        """
        self.objects = objects
        self.model = model
        self.found: dict[int, tuple[Any, dict[str, str]]] = {}
        """The wrappers by their ids, each with its state when it was found."""
        self.told: set[int] = set()
        """The ids of objects that were named."""

    def look_for(self, living: LivingObjects) -> None:
        """Add the wrappers that there are now."""
        optimizers = {id(one) for one in self.objects.values() if isinstance(one, Optimizer)}
        saved = {id(one) for one in objects_within(self.objects.values(), DEEPEST)}
        for wrapper in living.optimizer_like:
            parts = getattr(wrapper, "__dict__", {}).values()
            is_new = id(wrapper) not in saved | self.found.keys()
            if is_new and not optimizers.isdisjoint(map(id, parts)):
                self.found[id(wrapper)] = wrapper, self._state_of(wrapper)

    def warn_of_changed(self) -> None:
        """Warn of the wrappers that have changed since they were found, of each once."""
        for wrapper, before in self.found.values():
            if id(wrapper) in self.told:
                continue
            if replaced(before, self._state_of(wrapper)):
                self.told.add(id(wrapper))
                self._warn_of(wrapper)

    def warn_of_ids(self) -> None:
        """Name the objects whose state_dict has keys that are those of tensors in this process."""
        ids = set(map(id, self.model.parameters()))
        for name, holder in self.objects.items():
            if id(holder) in self.told or isinstance(holder, nn.Module):
                continue
            if not ids.isdisjoint(_keys_of(holder.state_dict(), LEVELS_OF_KEYS)):
                self.told.add(id(holder))
                log.warning(BY_ID, name)

    def _state_of(self, wrapper: Any) -> dict[str, str]:
        """Digests of what is a wrapper's own, by paths."""
        known: dict[str, Any] = dict(self.objects)
        known |= {f"weight {name}": one for name, one in self.model.named_parameters()}
        for name, holder in self.objects.items():
            if isinstance(holder, Optimizer):
                known |= {f"{name}.{part}": one for part, one in vars(holder).items()}
                known |= {f"{name}.{place}": one for place, one in enumerate(holder.param_groups)}
        found = state_of({WRAPPER: wrapper}, known)
        return {path: digest for path, digest in found.items() if path.startswith(WRAPPER)}

    def _warn_of(self, wrapper: Any) -> None:
        kind = type(wrapper).__name__
        name = name_of(wrapper) or snake_case(kind)
        parts = set(map(id, vars(wrapper).values()))
        inside = next(name for name, one in self.objects.items() if id(one) in parts)
        remedy = "Pass both objects"
        if not (hasattr(wrapper, "state_dict") and hasattr(wrapper, "load_state_dict")):
            remedy = f"Write state_dict and load_state_dict for {kind}, and pass both objects"
        argument = name.rpartition(".")[2]
        if argument in self.objects:
            argument = snake_case(kind)
        log.warning(LOST, f"{name} ({kind})", inside, remedy, argument, name)


def _keys_of(state: Any, levels: int) -> Iterable[int]:
    """The whole numbers among the keys of a dict, and of those within it."""
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if isinstance(key, int):
            yield key
        if levels:
            yield from _keys_of(value, levels - 1)
