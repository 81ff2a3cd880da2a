"""Largest relative differences that a proof attributes to rounding, by precision."""

from __future__ import annotations

GRADIENTS_ALLOWED = {"fp64": 1e-10, "fp32": 1e-5}
WEIGHTS_ALLOWED = {"fp64": 1e-5, "fp32": 1e-2}
"""For weights after some steps: an optimizer that divides by small numbers enlarges rounding."""
SCORES_ALLOWED = {"fp64": 1e-12, "fp32": 1e-6}
BY_SIZE_ALLOWED = {"fp64": 1e-9, "fp32": 1e-4}
"""For scores with batches of another size: a matrix product of other rows adds up in another
order."""
SCRIPT_ALLOWED = {"fp64": GRADIENTS_ALLOWED["fp64"], "fp32": 1e-3}
"""For gradients of a user's script, in the precision that it has.

A sum of n numbers in another order differs by some sqrt(n) times its rounding, 6e-8 in float32 and
1.1e-16 in float64; relative to a hundredth of the largest gradient that is 100 times as much. With
n = 100,000 it is 2e-3 and 4e-12. The loops of examples/ differ by 3e-5 at most, those of
tests/sessions/loops.py, in float64, by 2e-14.
"""
CLEAR_GRADIENT = 1e-4
"""The part of the largest gradient from which on changes of weights are compared.

What an optimizer makes of a gradient may be as uncertain as that itself: Adam's first change is its
sign. A gradient that is rounded by 1e-10 of the largest one (`SCRIPT_ALLOWED`) is known to 1e-6 of
itself if it is 1e-4 of that, which leaves a factor of 10 to `WEIGHTS_ALLOWED` for earlier updates.
"""
TINY = 1e-30
"""Smallest number that something is compared with."""


def relative_difference(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), TINY)
