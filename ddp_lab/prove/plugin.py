"""The fixture `prove` of pytest, which finds it by its entry point and imports it at every start:
nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def prove() -> Callable[..., dict[str, Any]]:
    """`ddp_train.testing.prove`: `def test_my_job(prove): prove("experiment=mine")`."""
    from ddp_train.testing import prove

    return prove
