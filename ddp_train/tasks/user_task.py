"""A user's own task: what is wrong with it, and what it lacks."""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.tasks.task import Task
from ddp_train.text import see_page

log = logging.getLogger(__name__)


def complete(task: Any) -> Task:
    """Give a user's task what it lacks of `Task`, and return it.

    Raises ConfigError if it is not a task. Warns of weights in it that no optimizer has.
    """
    name = type(task).__name__
    problem = _problem(name, task)
    if problem:
        raise ConfigError([f"task._target_: {problem}"])
    _warn_of_untrained_modules(task)
    for part, value in vars(Task).items():
        if part.startswith("_") or hasattr(task, part):
            continue
        if callable(value):
            value = MethodType(value, task)
        try:
            object.__setattr__(task, part, value)  # a frozen dataclass refuses setattr
        except AttributeError:
            rule = f"{name} has __slots__ and lacks {part}"
            remedy = f"derive it: class {name}(ddp_train.Task)"
            raise ConfigError([f"task._target_: {rule}; {remedy}"]) from None
    return task


def _problem(name: str, task: Any) -> str:
    """The reason why an object cannot be a task; "" if it can."""
    if not callable(getattr(task, "loss", None)):
        return f"{name} has no method loss(model, batch){see_page('Tasks')}"
    if isinstance(task, nn.Module) and next(task.parameters(), None) is not None:
        return f"{name} has parameters, which no optimizer updates; move them into the model"
    for metric, direction in getattr(task, "better", {}).items():
        if direction not in ("min", "max"):
            return f"{name}.better[{metric!r}]={direction!r}: must be 'min' or 'max'"
    return ""


def _warn_of_untrained_modules(task: Any) -> None:
    """Warn of modules that require gradients. A teacher, or weights of a loss, does not."""
    for attribute, module in getattr(task, "__dict__", {}).items():
        if not isinstance(module, nn.Module):
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            name = f"{type(task).__name__}.{attribute}"
            log.warning(
                "task._target_: the parameters of %s require gradients, but no optimizer updates"
                " them; make them part of the model, or freeze them:"
                " self.%s.requires_grad_(False).eval()",
                name,
                attribute,
            )
