"""Events of a run: starts, failures, stops, changes of the number of processes."""

from __future__ import annotations

import bisect
import datetime
from dataclasses import dataclass

from ddp_train.telemetry.pages.run_files import RunFiles

START = "start"
RESUMED = "resumed"
"""Texts of the first start, and of each later one."""


@dataclass(frozen=True)
class Event:
    """What happened, when, and after which step."""

    time: float
    step: int | None
    text: str


def events_of(run: RunFiles) -> list[Event]:
    """The events of a run, in order."""
    steps = _Steps(run)
    events = [*_starts(run, steps)]
    for event in run.timeline.get("events", []):
        step = event.get("step")
        if step is None:
            step = steps.at(event["time"])
        events.append(Event(event["time"], step, event["text"]))
    for line in run.of("resize"):
        text = f"{line.get('from', '?')} to {line.get('to', '?')} processes"
        events.append(Event(line.get("time", 0.0), line["step"], text))
    return sorted(events, key=lambda event: event.time)


class _Steps:
    """The step that a run had reached at a time."""

    def __init__(self, run: RunFiles) -> None:
        timed = [line for line in run.metrics if isinstance(line.get("time"), int | float)]
        self.times = [line["time"] for line in timed]
        self.steps = [line["step"] for line in timed]

    def at(self, moment: float) -> int | None:
        place = bisect.bisect(self.times, moment)
        if place == 0:
            return None
        return self.steps[place - 1]


def _starts(run: RunFiles, steps: _Steps) -> list[Event]:
    starts = []
    for number, line in enumerate(run.commands):
        try:
            started = datetime.datetime.fromisoformat(str(line.get("started")))
        except ValueError:
            continue
        moment = started.timestamp()
        if number == 0:
            starts.append(Event(moment, 0, START))
        else:
            starts.append(Event(moment, steps.at(moment), RESUMED))
    return starts


def clock(moment: float) -> str:
    """`2026-11-26 18:00:00 UTC`."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
