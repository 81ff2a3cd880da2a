"""The order of the files: the longest first."""

from __future__ import annotations

from collections import Counter

import pytest

SECONDS, SLOW_SECONDS = 0.4, 15.0
"""Of a test, in the mean."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files run side by side (`--dist loadfile`): a long one that came last would leave cores idle."""
    expected: Counter[str] = Counter()
    for item in items:
        expected[str(item.path)] += SLOW_SECONDS if item.get_closest_marker("slow") else SECONDS
    items.sort(key=lambda item: (-expected[str(item.path)], str(item.path)))  # within a file the order stays
