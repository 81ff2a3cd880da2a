"""Events of a run: starts, failures, stops, changes of the number of processes."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

from ddp_train.telemetry.pages.run_files import RunFiles

START = "start"
RESUMED = "resumed"
"""Texts of the first start, and of each later one."""


@dataclass(frozen=True)
class Event:
    """An event of a run: its time, and the step before it."""

    time: float
    step: int | None
    text: str


def events_of(run: RunFiles) -> list[Event]:
    """The events of a run, in order."""
    events = _starts(run)
    for event in run.timeline.get("events", []):
        step = event.get("step")
        if step is None:
            step = _step_at(run, event["time"])
        events.append(Event(event["time"], step, event["text"]))
    for line in run.lines("resize"):
        text = f"{line['from']} to {line['to']} processes"
        events.append(Event(line["time"], line["step"], text))
    return sorted(events, key=lambda event: event.time)


def _starts(run: RunFiles) -> list[Event]:
    times = [line["started"] for line in run.commands if line.get("started")]
    starts = []
    for text in times:
        moment = datetime.datetime.fromisoformat(text).timestamp()
        if starts:
            starts.append(Event(moment, _step_at(run, moment), RESUMED))
        else:
            starts.append(Event(moment, 0, START))
    return starts


def _step_at(run: RunFiles, moment: float) -> int | None:
    """The step that a run had reached at a time; None before its first line."""
    step = None
    for line in run.metrics:
        if line.get("time", math.inf) <= moment:
            step = line["step"]
    return step


def clock(moment: float) -> str:
    """`2026-11-26 18:00:00 UTC`."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
