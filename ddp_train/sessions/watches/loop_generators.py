"""Generators of random numbers that a loop draws from, and that no checkpoint holds."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.models.generators import get_state, is_generator, set_state
from ddp_train.models.loop_variables import locals_of, user_frames
from ddp_train.models.python_state import (
    MOST_ITEMS,
    defined_by_user,
    digest_of_generator,
    state_of,
)
from ddp_train.tensor_tree import attributes_of

log = logging.getLogger(__name__)
LEVELS_OF_VARIABLE = 3
LEVELS_OF_LOADERS = 6
DRAWS = 1300
"""Numbers after which all of the state of a Mersenne Twister, 624 words, is another."""
LOST = (
    "%s: training draws from this generator, but its state is in no checkpoint, so a resumed run"
    " draws other numbers. Make a new generator in each step, seeded by the step's number"
    " (np.random.default_rng(run.step), torch.Generator().manual_seed(run.step)), or keep its"
    " state in an object with state_dict and load_state_dict that run.resume gets"
)


class LoopGenerators:
    """Warns of generators that training draws from, if no checkpoint has their state."""

    def __init__(self, saved: Iterable[Any]) -> None:
        """saved: the objects that run.resume got beside models and optimizers."""
        self.saved = list(saved)
        self.epochs = 0
        """Epochs that this process has begun."""
        self.noted: dict[int, tuple[str, Any, tuple[int, str]]] = {}
        """By the ids of generators: the name, the generator and its state."""
        self.told: set[str] = set()

    def begin_epoch(self) -> None:
        self.epochs += 1
        self.note()

    def note(self) -> None:
        """Remember the state of each generator that the user's variables hold.

        Generators that were noted earlier in the epoch keep their first state. Does nothing except
        in epochs 1, 2, 4, 8 ... of this process.
        """
        if self.epochs.bit_count() > 1:
            return
        for name, generator in _generators_of_variables():
            if id(generator) not in self.noted:
                self.noted[id(generator)] = name, generator, _state_of(generator)

    def end_epoch(self, read: Iterable[Any]) -> None:
        """Warn of generators that have moved since they were noted, of each once in a run.

        read: objects that give the batches. Their generators are left out, since a resumed run puts
            them back.
        """
        in_loaders = _generators_in("", [*read], LEVELS_OF_LOADERS, set(), _is_any)
        known = {id(generator) for _, generator in in_loaders}
        names = []
        for key, (name, generator, before) in self.noted.items():
            if key in known or name in self.told:
                continue
            if _has_moved(before, _state_of(generator)) and not self._is_saved(generator):
                names.append(name)
        self.noted.clear()
        self.told |= set(names)
        if names:
            log.warning(LOST, ", ".join(names))

    def _is_saved(self, generator: Any) -> bool:
        """Whether the state of an object is another once the generator is another."""
        state = get_state(generator)
        before = self._digests()
        for _ in range(DRAWS):
            draw(generator)
        after = self._digests()
        set_state(generator, state)
        return before != after

    def _digests(self) -> dict[str, str]:
        return state_of({str(place): one.state_dict() for place, one in enumerate(self.saved)})


def _generators_of_variables() -> Iterator[tuple[str, Any]]:
    """Yield the generators in the variables of the user's code on the stack, with their names."""
    seen = {id(one) for one in (torch.default_generator, np.random.mtrand._rand, random._inst)}  # type: ignore[attr-defined]
    for frame in user_frames():
        variables = locals_of(frame, lambda _: True) | dict(frame.f_globals)
        for name, value in variables.items():
            if isinstance(value, ModuleType):
                if defined_by_user(value.__name__):
                    for of_module, one in list(vars(value).items()):
                        path = f"{name}.{of_module}"
                        yield from _generators_in(path, one, 1, seen, _is_users)
            else:
                yield from _generators_in(name, value, LEVELS_OF_VARIABLE, seen, _is_users)


def _generators_in(
    name: str,
    value: Any,
    levels: int,
    seen: set[int],
    is_looked_into: Callable[[Any], bool],
) -> Iterator[tuple[str, Any]]:
    """Yield the generators of random numbers in a value, each with its name, as `rngs['noise']`.

    Models are not searched: another watch does that.

    name: the name of the value.
    value: a generator, or something that may hold one: a mapping, list, tuple or other object.
    levels: how deep to search.
    seen: the ids of objects that were searched, which are left out. New ones are added.
    is_looked_into: says of an object whether its attributes are searched.
    """
    is_leaf = isinstance(value, Tensor | np.ndarray | nn.Module | ModuleType | type | str | int)
    if is_leaf or id(value) in seen:
        return
    seen.add(id(value))
    if is_generator(value):
        yield name, value
    elif levels and isinstance(value, Mapping | list | tuple) and len(value) <= MOST_ITEMS:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in list(items):
            yield from _generators_in(f"{name}[{key!r}]", item, levels - 1, seen, is_looked_into)
    elif levels and is_looked_into(value):
        for attribute, item in attributes_of(value).items():
            yield from _generators_in(f"{name}.{attribute}", item, levels - 1, seen, is_looked_into)


def _is_users(value: Any) -> bool:
    return defined_by_user(type(value).__module__)


def _is_any(value: Any) -> bool:
    """True for all objects but those of a session, which lead to everything."""
    return not type(value).__module__.startswith("ddp_train.sessions.")


def _state_of(generator: Any) -> tuple[int, str]:
    """The last seed of a generator of torch, 0 of any other, and a digest of the state."""
    seed = generator.initial_seed() if isinstance(generator, torch.Generator) else 0
    return seed, digest_of_generator(generator)


def draw(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        torch.rand(1, generator=generator, device=generator.device)
    else:
        generator.random()


def _has_moved(before: tuple[int, str], now: tuple[int, str]) -> bool:
    """Whether a generator was drawn from, and not seeded anew."""
    return before[0] == now[0] and before != now
