"""Objects that act on an optimizer of the loop, and that no checkpoint holds: schedulers of its
learning rate, scalers of its gradients. An optimizer does not know them."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_train.models.living_objects import LivingObjects, living_objects, objects_within
from ddp_train.sessions.settings import UsageError
from ddp_train.text import with_article

log = logging.getLogger(__name__)
DEEPEST = 5
"""Levels at which a saved object may hold another one."""
MOST_FRAMES = 12
"""Calls between a scaler's step and what is called before an optimizer's, and some more."""


def refuse_unsaved_schedulers(saved: Mapping[str, Any], living: LivingObjects) -> None:
    """Raise UsageError if a scheduler of a saved optimizer is not saved with it.

    saved: the objects that run.resume got, by their names.
    """
    for scheduler in _unsaved_schedulers(saved, living):
        name = next(name for name, value in saved.items() if value is scheduler.optimizer)
        raise UsageError(
            f"run.resume did not get {with_article(type(scheduler).__name__)} of {name}. Its state"
            " would be lost, and a resumed run would have other learning rates",
            f"use run.resume(model=model, {name}={name}, scheduler=scheduler)",
        )


def warn_of_unsaved_schedulers(saved: Mapping[str, Any], living: LivingObjects) -> None:
    """Name the schedulers that were made after run.resume, before the first checkpoint."""
    for scheduler in _unsaved_schedulers(saved, living):
        log.warning(
            "%s was created after run.resume, so its state is in no checkpoint, and a resumed"
            " run starts it from its beginning. Create it earlier, and pass it:"
            " run.resume(model=model, optimizer=optimizer, scheduler=scheduler)",
            with_article(type(scheduler).__name__),
        )


def refuse_unsaved_scaler(saved: Mapping[str, Any]) -> None:
    """Raise UsageError if the optimizer's step is that of a GradScaler which is not saved.

    To be called within the step.
    """
    scaler = _scaler_that_calls()
    if scaler is None or id(scaler) in set(map(id, objects_within(saved.values(), DEEPEST))):
        return
    raise UsageError(
        "a GradScaler makes a step, but run.resume did not get it: its scale would be lost",
        "use run.resume(model=model, optimizer=optimizer, scaler=scaler)",
    )


def _scaler_that_calls() -> torch.amp.GradScaler | None:
    """The scaler whose step is on the stack.

    Its own frames alone are asked for their locals: what a frame has been asked for it may keep,
    and the iterators of a user's loop end with it.
    """
    file_of_scalers = torch.amp.GradScaler.step.__code__.co_filename
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_filename == file_of_scalers:
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
                return caller
        frame = frame.f_back
    return None


def _unsaved_schedulers(saved: Mapping[str, Any], living: LivingObjects) -> list[Any]:
    """The schedulers of saved optimizers, but for those that a saved object is, or holds."""
    optimizers = {id(value) for value in saved.values() if isinstance(value, Optimizer)}
    if not optimizers:
        return []
    held = set(map(id, objects_within(saved.values(), DEEPEST)))
    found = [item for item in _schedulers_of(optimizers, living) if id(item) not in held]
    if found:
        found.clear()
        living.schedulers.clear()
        gc.collect()  # those that nobody uses any more
        found = [
            item for item in _schedulers_of(optimizers, living_objects()) if id(item) not in held
        ]
    for item in list(found):  # a SequentialLR is named, and not what it holds
        within = set(map(id, objects_within([item], DEEPEST))) - {id(item)}
        found = [other for other in found if id(other) not in within]
    return found


def _schedulers_of(optimizers: set[int], living: LivingObjects) -> Iterator[Any]:
    """The schedulers of optimizers, which are given by their `id`."""
    for item in living.schedulers:
        if id(getattr(item, "__dict__", {}).get("optimizer")) in optimizers:
            yield item
