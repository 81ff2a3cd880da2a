"""The fixture `prove` of pytest, which finds it by its entry point and imports it at every start:
nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


@pytest.fixture
def prove(pytestconfig: pytest.Config) -> Callable[..., dict[str, Any]]:
    """`ddp_train.testing.prove`: `def test_my_job(prove): prove("experiment=mine")`.

    Its lines are shown as they come, whatever pytest captures: a proof takes minutes.
    """
    from ddp_train.testing import prove

    capture: Any = pytestconfig.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        if capture is None:
            print(line, flush=True)
            return
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return partial(prove, tell=tell)
