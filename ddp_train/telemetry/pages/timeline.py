"""Seconds that each rank spends in each phase, and events of a run, as its launcher sees them.

Each rank publishes its phase in shared memory for the hang detector anyway
(resilience/heartbeat.py). The launcher looks 50 times a second; the share of its looks is the share
of the time, and training pays nothing for it. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.json_files import read_object

FILE = "timeline.json"
NOT_TRAINING = ("start", "data set", "build", "end")
"""Phases outside of training."""


class Timeline:
    """Seconds and events over all starts of a run."""

    def __init__(self, run_dir: Path) -> None:
        """Continue the file that earlier processes of the run have left."""
        self.path = run_dir / FILE
        before = read_object(self.path)
        self.seconds: list[dict[str, float]] = [dict(rank) for rank in before.get("seconds", [])]
        """For each rank its seconds, by phase."""
        self.events: list[dict[str, Any]] = list(before.get("events", []))
        self.last = time.monotonic()

    def look(self, phases: Sequence[str]) -> None:
        """Count the time since the last look for the phases that the ranks are in."""
        now = time.monotonic()
        passed = now - self.last
        self.last = now
        while len(self.seconds) < len(phases):
            self.seconds.append({})
        for rank, phase in zip(self.seconds, phases, strict=False):
            if phase not in NOT_TRAINING:
                rank[phase] = rank.get(phase, 0.0) + passed

    def add_event(self, kind: str, text: str, step: int | None) -> None:
        """Add what has just happened.

        kind: start, failure, stop or resize.
        """
        self.events.append({"kind": kind, "time": time.time(), "step": step, "text": text})

    def write(self) -> None:
        """Write the file, if anything was seen: under torchrun nothing is. Raises OSError."""
        if not self.seconds and not self.events:
            return
        seconds = []
        for rank in self.seconds:
            seconds.append({phase: round(value, 3) for phase, value in rank.items()})
        write_json(self.path, {"seconds": seconds, "events": self.events})
