"""The differences between the gradients of two runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEAST_SCALE = 1e-3
"""Fraction of the largest gradient of all. Smaller gradients are compared with this: they are
themselves rounding."""


@dataclass(frozen=True)
class Difference:
    """The largest difference in the gradient of one parameter."""

    name: str
    absolute: float
    relative: float
    """The difference relative to the scale that `compare` chooses."""


def compare(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[Difference]:
    """Differences of the parameters that both have, the largest relative one first.

    Relative to the largest element of the parameter's gradient in `one`, or to LEAST_SCALE of the
    largest of all.
    """
    largest = max((float(abs(values).max()) for values in one.values()), default=0.0)
    differences = []
    for name in one.keys() & other.keys():
        before = one[name].astype(np.float64)
        after = other[name].astype(np.float64)
        absolute = float(abs(before - after).max())
        scale = max(float(abs(before).max()), LEAST_SCALE * largest)
        relative = absolute / scale if scale else absolute
        differences.append(Difference(name, absolute, relative))
    return sorted(differences, key=_order)


def _order(difference: Difference) -> tuple[float, str]:
    """The largest first, and before it those that are not finite."""
    finite = float(np.nan_to_num(difference.relative, nan=np.inf))
    return -finite, difference.name
