"""A user's own task: what is wrong with it, and what it lacks."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.tasks.task import Task

log = logging.getLogger(__name__)

PARTS_OF_A_TASK = (
    "unit",
    "units_are_samples",
    "loss_name",
    "better",
    "loss",
    "score",
    "predict",
    "score_and_predict",
    "derive",
    "units_per_sample",
    "predictions",
)


def complete(task: Any) -> Task:
    """A user's task with what it lacks.

    Raises ConfigError if it is not a task. Warns of weights in it that nobody trains.
    """
    name = type(task).__name__
    if not callable(getattr(task, "loss", None)):
        problem = f"{name} has no method loss(model, batch); docs/tasks.md shows one"
        raise ConfigError([f"task._target_: {problem}"])
    if isinstance(task, nn.Module) and next(task.parameters(), None) is not None:
        problem = f"{name} has parameters that no optimizer gets; move them into the model"
        raise ConfigError([f"task._target_: {problem}"])
    _warn_of_untrained_modules(task)
    for metric, direction in getattr(task, "better", {}).items():
        if direction not in ("min", "max"):
            problem = f"{name}.better[{metric!r}]={direction!r}: must be 'min' or 'max'"
            raise ConfigError([f"task._target_: {problem}"])
    if isinstance(task, Task):
        return task
    completed = type(name, (Task,), {})()  # messages have the name that its author knows
    for part in PARTS_OF_A_TASK:
        if hasattr(task, part):
            setattr(completed, part, getattr(task, part))
    return completed


def _warn_of_untrained_modules(task: Any) -> None:
    """Warns of modules that require gradients, but for a teacher or weights of a loss that do
    not."""
    for attribute, module in getattr(task, "__dict__", {}).items():
        if not isinstance(module, nn.Module):
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            name = f"{type(task).__name__}.{attribute}"
            problem = f"the parameters of {name} want gradients, and nobody trains them"
            freeze = f"self.{attribute}.requires_grad_(False).eval()"
            remedy = f"to train it, make it part of the model, else {freeze}"
            log.warning("task._target_: %s; %s", problem, remedy)
