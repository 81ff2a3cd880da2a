"""Where each rank of a run spends its time, and what happens to the run: as the launcher sees it.
Torch-free.

Each rank publishes its phase in shared memory for the hang detector anyway
(resilience/heartbeat.py). The launcher looks 50 times a second; the share of its looks is the share
of the time, and training pays nothing for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.resilience.whole_files import write_json

FILE = "timeline.json"
START = ("start", "data set", "build", "end")
"""Phases that are no part of training."""


class Timeline:
    """Seconds of each rank in each phase, and events, over all starts of a run."""

    def __init__(self, run_dir: Path) -> None:
        """Goes on with what earlier processes of the run have left."""
        self.path = run_dir / FILE
        before = _read(self.path)
        self.seconds: list[dict[str, float]] = [dict(rank) for rank in before.get("seconds", [])]
        self.events: list[dict[str, Any]] = list(before.get("events", []))
        self.last = time.monotonic()

    def look(self, phases: Sequence[str]) -> None:
        """The phases of all ranks at this moment."""
        now = time.monotonic()
        passed = now - self.last
        self.last = now
        while len(self.seconds) < len(phases):
            self.seconds.append({})
        for rank, phase in zip(self.seconds, phases, strict=False):
            if phase not in START:
                rank[phase] = rank.get(phase, 0.0) + passed

    def happened(self, kind: str, text: str, step: int | None) -> None:
        """kind: start, failure, stop, resize."""
        self.events.append({"kind": kind, "time": time.time(), "step": step, "text": text})

    def write(self) -> None:
        """Raises OSError. Under torchrun nothing was seen, and there is no file."""
        if not self.seconds and not self.events:
            return
        seconds = [
            {phase: round(value, 3) for phase, value in rank.items()} for rank in self.seconds
        ]
        write_json(self.path, {"seconds": seconds, "events": self.events})


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (
        OSError,
        ValueError,
    ):  # there is none, or it was cut off: what it told is lost, and nothing else
        return {}
    return found if isinstance(found, dict) else {}
