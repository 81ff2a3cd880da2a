"""Welch's t-test."""

from __future__ import annotations

import pytest
from scipy import stats

from ddp_train.telemetry.pages.noise import welch


@pytest.mark.parametrize(
    "samples",
    [([1.0, 2.0, 4.0], [3.0, 5.0, 9.0, 11.0]), ([1.0, 1.1], [1.0, 9.0]), ([1, 2], [1, 2])],
)
def test_welch_is_that_of_scipy(samples: tuple[list[float], list[float]]) -> None:
    expected = stats.ttest_ind(samples[1], samples[0], equal_var=False)
    found = welch(*samples)
    assert found and found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert [found.low, found.high] == pytest.approx([*expected.confidence_interval(0.95)], rel=1e-6)
    assert welch([1.0], [2.0, 3.0]) is None
