"""Averages of weights that a variable of the user's loop holds: tensors in a list or a dict, or
objects that hold such.

Lists and dicts have no class by which to know them, and those of a loop often hold what is made
anew in each step, gradients for instance. So the name of the variable tells: `ema_weights`.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ddp_train.models.living_objects import is_name_of_average
from ddp_train.resilience.failure_report import is_foreign

TensorsOf = Callable[[Any], list[Tensor]]
"""The tensors of a value that are averages and in no checkpoint."""
NormsOf = Callable[[Iterable[Tensor]], Tensor]
"""A number for each tensor, which is another one once the tensor has changed."""


class AveragesInVariables:
    """Tells which of them change."""

    def __init__(self) -> None:
        self.before: dict[str, list[float]] = {}
        """The norms of each variable's tensors, by its name, where they were looked at last."""
        self.told: set[str] = set()

    def note(self, tensors_of: TensorsOf, norms_of: NormsOf) -> None:
        """Note the present weights: from here on they are not to change."""
        self.before = self._norms(tensors_of, norms_of)

    def changed(self, tensors_of: TensorsOf, norms_of: NormsOf) -> list[str]:
        """The names of the variables whose tensors have changed since then, each once."""
        now = self._norms(tensors_of, norms_of)
        found = []
        for name, norms in now.items():
            if name not in self.told and self.before.get(name, norms) != norms:
                self.told.add(name)
                found.append(name)
        self.before = now
        return found

    def _norms(self, tensors_of: TensorsOf, norms_of: NormsOf) -> dict[str, list[float]]:
        norms: dict[str, list[float]] = {}
        for name, value in _variables():
            tensors = tensors_of(value)
            if tensors and name not in norms:
                norms[name] = norms_of(tensors).nan_to_num().tolist()
        return norms


def _variables() -> Iterator[tuple[str, Any]]:
    """The variables of the user's code on the stack that have the names of averages."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            yield from _locals_of(frame).items()
            for name, value in list(frame.f_globals.items()):
                if is_name_of_average(name):
                    yield name, value
        frame = frame.f_back


def _locals_of(frame: types.FrameType) -> dict[str, Any]:
    """The local variables of a frame that have the names of averages."""
    code = frame.f_code
    names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    if not any(map(is_name_of_average, names)):
        return {}
    values = frame.f_locals
    found = {name: value for name, value in list(values.items()) if is_name_of_average(name)}
    # Before Python 3.13 a function's are copied into a dict that its frame keeps: what a loop has
    # let go of, its iterators and batches, would stay.
    if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()
    return found
