"""Welch's t-test: is a difference between runs more than noise?

Written out, since scipy takes a second to import.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
"""A difference counts if chance alone makes one as large in fewer than 1 of 20 cases."""
BISECTIONS = 100
TERMS = 300
TINY = 1e-300
"""In place of 0 in a denominator of the continued fraction."""


@dataclass(frozen=True)
class Welch:
    """The difference of the means of two samples, second minus first."""

    difference: float
    low: float
    high: float
    """The interval that contains the true difference in 95 % of cases."""
    p: float
    """The probability that chance alone makes a difference as large."""

    @property
    def is_more_than_noise(self) -> bool:
        return self.p < ALPHA


def welch(first: Sequence[float], second: Sequence[float]) -> Welch | None:
    """Compare the means of two samples whose variances may differ (Welch, Biometrika 34, 1947).

    Returns None with fewer than two values in one of them.
    """
    if min(len(first), len(second)) < 2:
        return None
    first_part = statistics.variance(first) / len(first)
    second_part = statistics.variance(second) / len(second)
    difference = statistics.fmean(second) - statistics.fmean(first)
    error = math.sqrt(first_part + second_part)
    if not error:  # the same value in every run of each
        return Welch(difference, difference, difference, 0.0 if difference else 1.0)
    spread = first_part**2 / (len(first) - 1) + second_part**2 / (len(second) - 1)
    freedom = (first_part + second_part) ** 2 / spread
    reach = _quantile(1 - ALPHA / 2, freedom) * error
    p = two_sided(difference / error, freedom)
    return Welch(difference, difference - reach, difference + reach, p)


def two_sided(t: float, freedom: float) -> float:
    """The probability that Student's t is as far from 0, on either side."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _quantile(probability: float, freedom: float) -> float:
    """The t below which Student's t is with a probability above 0.5, by bisection."""
    low = 0.0
    high = 1e6
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if two_sided(middle, freedom) / 2 > 1 - probability:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by Lentz's method (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _incomplete_beta(1 - x, b, a)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1) or TINY)
    fraction = d
    for m in range(1, TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or TINY)
            c = 1 + term / c or TINY
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction
