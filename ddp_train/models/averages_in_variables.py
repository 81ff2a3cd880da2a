"""Averages of weights that a variable of the user's loop holds: tensors in a list or a dict, or
objects that hold such.

Lists and dicts have no class by which to know them, and those of a loop often hold what is made
anew in each step, gradients for instance. So the name of the variable tells: `ema_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ddp_train.models.living_objects import is_name_of_average
from ddp_train.models.loop_variables import loop_variables

TensorsOf = Callable[[Any], list[Tensor]]
"""The tensors of a value that are averages and in no checkpoint."""
NormsOf = Callable[[Iterable[Tensor]], Tensor]
"""A number for each tensor, which is another one once the tensor has changed."""


class AveragesInVariables:
    """Finds variables of the user's loop that hold averages of weights, and change in training."""

    def __init__(self) -> None:
        self.before: dict[str, list[float]] = {}
        """The norms of each variable's tensors, by its name, where they were looked at last."""
        self.told: set[str] = set()

    def note(self, tensors_of: TensorsOf, norms_of: NormsOf) -> None:
        """Note the norms of the averages now, to be compared by `changed`."""
        self.before = self._norms(tensors_of, norms_of)

    def changed(self, tensors_of: TensorsOf, norms_of: NormsOf) -> list[str]:
        """The names of variables whose tensors have changed since the last look.

        A name is returned once in a run. Variables that were not there at the last look are noted
        now.
        """
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
        for name, value in loop_variables(is_name_of_average):
            tensors = tensors_of(value)
            if tensors and name not in norms:
                norms[name] = norms_of(tensors).nan_to_num().tolist()
        return norms
