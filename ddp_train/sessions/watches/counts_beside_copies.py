"""Numbers that an object of the user's counts beside a copy of a model.

The copy was given to run.resume, and the object was not: `ModelEMA.updates`, on which the decay of
the average depends, begins anew in a resumed run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_train.models.loop_variables import loop_variables
from ddp_train.models.python_state import defined_by_user
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.tensor_tree import attributes_of

COUNTS = (
    "%s: changes in training beside a copy of a model that run.resume got, and is in no"
    " checkpoint: a resumed run begins it anew. If the copy depends on it, as on the decay of an"
    " average that warms up, the copy ends with other weights. Give run.resume the whole object,"
    " whose state_dict and load_state_dict have the copy and this number"
)


class CountsBesideCopies:
    """Finds numbers beside copies that have changed between the first step and an epoch's end."""

    def __init__(self, saved: Collection[Any]) -> None:
        """saved: the models, as `run.wrap` returned them, and the objects that run.resume got."""
        self.saved = {id(item) for item in saved}
        self.copies = {
            id(item)
            for item in saved
            if isinstance(item, nn.Module) and not isinstance(item, Wrapped)
        }
        self.first: dict[str, float] | None = None
        """After the first step; None before."""

    def end_step(self) -> None:
        if self.first is None:
            self.first = dict(self._counts())

    def changed(self) -> list[str]:
        """The names of the numbers that have changed since the first step, as `ema.updates`."""
        first = self.first or {}
        return [name for name, value in self._counts() if first.get(name, value) != value]

    def _counts(self) -> Iterator[tuple[str, float]]:
        """Yield the numbers among the attributes of each object that holds a copy of a model.

        The objects are the values of the user's variables. A number comes with its name in the
        user's code, `ema.updates`.
        """
        if not self.copies:
            return
        seen: set[int] = set()
        for name, value in loop_variables(_is_name):
            if id(value) in seen or not self._holds_copy(value):
                continue
            seen.add(id(value))
            for attribute, number in attributes_of(value).items():
                if isinstance(number, int | float) and not isinstance(number, bool):
                    yield f"{name}.{attribute}", number

    def _holds_copy(self, value: Any) -> bool:
        """Whether an object of the user's class holds a copy of a model, as an average does.

        False for an object that also holds the wrapped model or the optimizer: it is a trainer,
        whose numbers may be for the log.
        """
        if id(value) in self.saved or isinstance(value, nn.Module | type):
            return False
        if not defined_by_user(type(value).__module__):
            return False
        held = attributes_of(value).values()
        is_training = any(isinstance(item, Wrapped | Optimizer) for item in held)
        return not is_training and any(id(item) in self.copies for item in held)


def _is_name(name: str) -> bool:
    return not name.startswith("__")
