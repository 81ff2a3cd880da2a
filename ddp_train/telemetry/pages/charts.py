"""Plots, described as plain data: `page.js` draws them in the reader's browser, in its light or
dark scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Chart = dict[str, Any]
"""What `page.js` draws: `kind`, and the fields that its functions read."""
MOST_POINTS = 600
"""Of a curve, which is at most 600 pixels wide. A page with 100 curves stays below 2 MB."""
DIGITS = 6
X_DIGITS = 13
"""Of a number in a page, and of a step or a time; report.json has them all."""


@dataclass(frozen=True)
class Axis:
    """Label (with unit) and scale of an axis."""

    label: str
    log: bool = False
    ticks: Sequence[float] = ()
    percent: bool = False
    """Values from 0 to 1 are shown as 0 % to 100 %."""
    whole: bool = False
    """Begins at 0: lengths of bars can be compared, and a small part of a whole looks small."""


@dataclass(frozen=True)
class Curve:
    """A line through (x, y), with a band from `low` to `high` if both are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    level: int = 0
    """1: drawn last and stronger. -1: one of many, in grey, without an entry in the legend."""
    colour: int | None = None
    """Curves of one thing have one colour; None: the next one."""


@dataclass(frozen=True)
class Mark:
    """A vertical line with a word: a restart, a stop."""

    x: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A value, with a whisker from `low` to `high` if both are given. value None: only the name and
    `text`."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    """Shown next to the bar instead of its value."""


@dataclass(frozen=True)
class Point:
    """A dot of a scatter plot, or a line through parallel axes: its values, None for an axis
    without one."""

    name: str
    values: Sequence[Any]
    strong: bool = False


def curves(
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    gaps: Sequence[float] = (),
) -> Chart | None:
    """A line plot with a legend; with few points they are marked. gaps: where lines without a band
    are interrupted. None without a point."""
    drawn = []
    for curve in curves:
        kept = thinned(curve.x, curve.y)
        pick = [
            [short(values[at]) for at in kept] if values else []
            for values in (curve.low, curve.high)
        ]
        if kept:
            fine = digits([curve.y[at] for at in kept])
            points = [[short(curve.x[at], X_DIGITS), short(curve.y[at], fine)] for at in kept]
            breaks = [[gap, None] for gap in gaps]
            points = points if pick[0] else sorted([*points, *breaks], key=lambda point: point[0])
            drawn.append(
                {
                    "name": curve.name,
                    "points": points,
                    "low": pick[0],
                    "high": pick[1],
                    "dashed": curve.dashed,
                    "level": curve.level,
                    "colour": curve.colour,
                }
            )
    if not drawn:
        return None
    return {
        "kind": "curves",
        "curves": drawn,
        "x": vars(x),
        "y": vars(y),
        "marks": [vars(mark) for mark in marks],
    }


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Which points to draw: all, or the lowest and the highest of each of most / 2 equal parts, so
    that no spike is lost."""
    known = [
        at
        for at, value in enumerate(y)
        if value is not None and math.isfinite(value) and math.isfinite(x[at])
    ]
    if len(known) <= most:
        return known
    part = len(known) / (most // 2)
    kept = {known[0], known[-1]}
    for number in range(most // 2):
        group = known[int(number * part) : int((number + 1) * part)]
        kept |= {min(group, key=lambda at: y[at] or 0.0), max(group, key=lambda at: y[at] or 0.0)}
    return sorted(kept)


def bars(bars: Sequence[Bar], x: Axis, baseline: float | None = None) -> Chart:
    """Horizontal bars from 0, the first on top; dots where the axis need not begin at 0, as that of
    an accuracy. baseline: a value marked by a dotted line."""
    drawn = [
        vars(bar) | {name: short(getattr(bar, name)) for name in ("value", "low", "high")}
        for bar in bars
    ]
    return {"kind": "bars", "bars": drawn, "x": vars(x), "baseline": baseline}


def scatter(points: Sequence[Point], x: Axis, y: Axis) -> Chart | None:
    """A dot for each pair of values. An x that is no number is a category."""
    drawn = [vars(point) for point in points if None not in point.values]
    if drawn:
        return {"kind": "scatter", "points": drawn, "x": vars(x), "y": vars(y)}
    return None


def parallel(points: Sequence[Point], axes: Sequence[Axis]) -> Chart | None:
    """A line for each point through all axes; the last one's value decides the colour."""
    drawn = [vars(point) for point in points if point.values[-1] is not None]
    if drawn:
        return {"kind": "parallel", "points": drawn, "axes": [vars(axis) for axis in axes]}
    return None


def digits(values: Sequence[float | None]) -> int:
    """How many digits a pixel can show of a curve: more where its values differ little. values: all
    are finite."""
    known = [float(value) for value in values if value is not None]
    largest = max(map(abs, known), default=0.0)
    span = max(known, default=0.0) - min(known, default=0.0)
    if 0 < 100 * span < largest:
        return min(DIGITS - 2 + math.ceil(math.log10(largest / span)), X_DIGITS)
    return DIGITS


def short(value: Any, digits: int = DIGITS) -> Any:
    """A number with so many digits; None for one that is not finite."""
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return None
