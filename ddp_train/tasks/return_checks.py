"""Checks of what the methods of a user's task return, in the words of its author."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from ddp_train.errors import TaskError
from ddp_train.tasks.predictions import Predictions, is_tree_of_tensors

NUMBERS = "each a number or a tensor: a scalar, or one number per class, [k]"


def checked_loss(returned: Any, task: object) -> tuple[Tensor, Tensor | float]:
    """The result of `Task.loss`. Raises TaskError if it is not a sum and a number of units."""
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, units = returned
        if _is_loss(loss) and _is_number_of_units(units):
            return loss, units
    remedy = (
        "return (sum of the losses, number of units): a scalar tensor, and a number or scalar"
        " tensor"
    )
    raise _error("loss", returned, task, remedy)


def _is_loss(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point()


def _is_number_of_units(units: Any) -> bool:
    if isinstance(units, Tensor):
        return units.numel() == 1
    return isinstance(units, int | float)


def checked_scores(
    returned: Any, task: object
) -> Mapping[str, tuple[Tensor | float, Tensor | float]]:
    """The result of `Task.score`. Raises TaskError if it is not a sum and a weight per metric."""
    if not isinstance(returned, Mapping):
        raise _error("score", returned, task, f"return {{name: (sum, weight)}}, {NUMBERS}")
    for name, pair in returned.items():
        if not _is_sum_and_weight(pair):
            remedy = f"return (sum, weight), {NUMBERS}"
            raise _error("score", pair, task, remedy, f" for the metric {name}")
    return returned


def _is_sum_and_weight(pair: Any) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    classes_of_sum, classes_of_weight = map(_classes, pair)
    return classes_of_sum is not None and classes_of_sum == classes_of_weight


def checked_predictions(returned: Any, task: object) -> Predictions:
    """The result of `Task.predict`. Raises TaskError if it is not outputs and targets."""
    if isinstance(returned, tuple) and len(returned) == 2 and is_tree_of_tensors(returned):
        return Predictions(*returned)
    remedy = "return (outputs, targets): tensors, or lists and dicts of tensors"
    raise _error("predict", returned, task, remedy)


def _classes(part: Any) -> int | None:
    """The number of classes of a sum or weight: 0 for a scalar or [1]; None if it is not [k]."""
    if isinstance(part, Real):  # numpy's too
        return 0
    if not isinstance(part, Tensor) or part.ndim > 1:
        return None
    count = part.numel()
    return 0 if count == 1 else count


def _error(method: str, returned: Any, task: object, remedy: str, where: str = "") -> TaskError:
    name = type(task).__name__
    return TaskError(f"{method}() of the task {name} returned {_describe(returned)}{where}", remedy)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return type(value).__name__
