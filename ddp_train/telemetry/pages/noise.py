"""Whether a difference between runs is more than noise. Welch's t-test, written out: scipy takes a
second to import."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
"""A difference that chance alone makes in fewer than 1 of 20 cases counts as one."""


@dataclass(frozen=True)
class Welch:
    """Of two samples: the difference of their means (second minus first), and how often chance
    makes one as large."""

    difference: float
    low: float
    high: float
    """The interval that contains the true difference in 95 % of cases."""
    p: float

    @property
    def is_more_than_noise(self) -> bool:
        return self.p < ALPHA


def welch(one: Sequence[float], other: Sequence[float]) -> Welch | None:
    """B. L. Welch, Biometrika 34 (1947): means of two samples whose variances may differ. None with
    fewer than two values in one of them."""
    if min(len(one), len(other)) < 2:
        return None
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    difference = statistics.fmean(other) - statistics.fmean(one)
    error = math.sqrt(sum(parts))
    if not error:  # the same value in every run of each
        return Welch(difference, difference, difference, 1.0 if not difference else 0.0)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(of) - 1) for part, of in zip(parts, (one, other), strict=True)
    )
    reach = _quantile(1 - ALPHA / 2, freedom) * error
    return Welch(
        difference, difference - reach, difference + reach, two_sided(difference / error, freedom)
    )


def two_sided(t: float, freedom: float) -> float:
    """The probability that Student's t is as far from 0, on either side."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _quantile(probability: float, freedom: float) -> float:
    """The t below which Student's t is so often, by bisection. probability: above 0.5."""
    low = 0.0
    high = 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if two_sided(middle, freedom) / 2 > 1 - probability else (low, middle)
        )
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction (Numerical Recipes,
    6.4)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _incomplete_beta(1 - x, b, a)
    front = (
        math.exp(
            a * math.log(x)
            + b * math.log1p(-x)
            + math.lgamma(a + b)
            - math.lgamma(a)
            - math.lgamma(b)
        )
        / a
    )
    tiny = 1e-300
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1) or 1e-300)
    found = d
    for m in range(1, 300):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            found *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * found
