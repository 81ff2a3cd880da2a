"""What the methods of a task of the user's own return: checked, and told in the words of the task's
author."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from ddp_train.errors import TaskError
from ddp_train.tasks.further_metrics import Predictions

NUMBERS = "each a number or a tensor: a scalar, or one number per class, [k]"


def checked_loss(found: Any, task: object) -> tuple[Tensor, Tensor | float]:
    """What `Task.loss` returned. Raises TaskError if it is not what it must be."""
    if isinstance(found, tuple) and len(found) == 2:
        loss, units = found
        right_units = isinstance(units, (int, float)) or (
            isinstance(units, Tensor) and units.numel() == 1
        )
        if right_units and isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return loss, units
    form = "a scalar tensor, and a number or a scalar tensor"
    raise _error(
        "loss", found, task, f"return (sum of the losses of all units, number of units): {form}"
    )


def checked_scores(found: Any, task: object) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
    """What `Task.score` returned. Raises TaskError if it is not what it must be."""
    if not isinstance(found, Mapping):
        raise _error("score", found, task, f"return {{name: (sum, weight)}}, {NUMBERS}")
    for name, pair in found.items():
        classes = [_classes(part) for part in pair] if isinstance(pair, tuple | list) else []
        if len(classes) != 2 or classes[0] is None or classes[0] != classes[1]:
            raise _error(
                "score", pair, task, f"return (sum, weight), {NUMBERS}", f" for the metric {name}"
            )
    return found


def checked_predictions(found: Any, task: object) -> Predictions:
    """What `Task.predict` returned. Raises TaskError if it is not what it must be."""
    if (
        isinstance(found, tuple)
        and len(found) == 2
        and all(isinstance(part, Tensor) for part in found)
    ):
        return Predictions(*found)
    raise _error("predict", found, task, "return (outputs, targets): tensors")


def _classes(part: Any) -> int | None:
    """Of a sum or a weight: 0 for a scalar, [1] too; None if it is neither a number nor a tensor
    [k]."""
    if isinstance(part, Tensor):
        if part.ndim > 1:
            return None
        return 0 if part.numel() == 1 else part.numel()
    return 0 if isinstance(part, Real) else None  # numpy's too


def _error(method: str, found: Any, task: object, remedy: str, what: str = "") -> TaskError:
    return TaskError(
        f"{method}() of the task {type(task).__name__} returned {_in_words(found)}{what}", remedy
    )


def _in_words(found: Any) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(map(_in_words, found))})"
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)} of {found.dtype}"
    return type(found).__name__
