"""What every test gets, and what none may leave behind."""

from __future__ import annotations

import subprocess

import pytest

from tests import zygote


@pytest.fixture(autouse=True)
def true_command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker of this name: `run` and `running` start new interpreters, and do not use the zygote."""
    if request.node.get_closest_marker("true_command"):
        monkeypatch.setattr(zygote, "_fits", lambda _: False)


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of studies that are made in this process come from the zygote too."""
    zygote.start()
    monkeypatch.setattr(subprocess, "Popen", zygote.Command)
