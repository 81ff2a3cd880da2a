"""Phases and events of a run, as its launcher sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.telemetry.pages.timeline import Timeline
from tests.support.commands import read


def test_timeline_continues_that_of_earlier_processes(tmp_path: Path) -> None:
    for _ in range(2):
        timeline = Timeline(tmp_path)
        timeline.last -= 3.0
        timeline.look(["data", "start"])
        timeline.add_event("failure", "died (rank 1)", 7)
        timeline.write()
    found = read(tmp_path, "timeline.json")
    assert found["seconds"][0]["data"] == pytest.approx(6.0, abs=0.5) and found["seconds"][1] == {}
    assert [event["step"] for event in found["events"]] == [7, 7]
