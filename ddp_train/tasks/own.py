"""A task of a class of the user's own: what is wrong with it, and what it lacks."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.tasks.task import Task

log = logging.getLogger(__name__)

_PARTS = (
    *(
        "unit",
        "units_are_samples",
        "loss_name",
        "better",
        "loss",
        "score",
        "predict",
        "score_and_predict",
        "derive",
    ),
    *("units_per_sample", "predictions"),
)


def complete(task: Any) -> Task:
    """A task of a class of the user's own, with what it lacks. Raises ConfigError if it is none.
    Warns of weights in it that nobody trains."""
    name = type(task).__name__
    if not callable(getattr(task, "loss", None)):
        raise ConfigError(
            [f"task._target_: {name} has no method loss(model, batch); docs/tasks.md shows one"]
        )
    if isinstance(task, nn.Module) and next(task.parameters(), None) is not None:
        raise ConfigError(
            [
                f"task._target_: {name} has parameters, which nobody would train; put them into the"
                " model"
            ]
        )
    for part, module in getattr(
        task, "__dict__", {}
    ).items():  # a teacher under no_grad(), or weights of a loss
        if isinstance(module, nn.Module) and any(one.requires_grad for one in module.parameters()):
            problem = f"the parameters of {name}.{part} want gradients, and nobody trains them"
            way = (
                "put it into the model if it shall be trained, else"
                f" self.{part}.requires_grad_(False).eval()"
            )
            log.warning("task._target_: %s; %s", problem, way)
    wrong = {
        metric: way
        for metric, way in getattr(task, "better", {}).items()
        if way not in ("min", "max")
    }
    if wrong:
        metric, way = next(iter(wrong.items()))
        raise ConfigError(
            [f"task._target_: {name}.better[{metric!r}]={way!r}: must be 'min' or 'max'"]
        )
    if isinstance(task, Task):
        return task
    completed = type(name, (Task,), {})()  # of the name that its author knows
    for part in _PARTS:
        if hasattr(task, part):
            setattr(completed, part, getattr(task, part))
    return completed
