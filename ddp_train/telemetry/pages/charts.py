"""Charts as plain data: `page.charts.js` draws them in the reader's browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_train.telemetry.json_files import finite_or_none

Chart = dict[str, Any]
"""A chart: `kind`, and the fields that the function of this name in `page.charts.js` reads."""
MOST_POINTS = 600
"""Most points of a curve, which is at most 600 pixels wide: 100 curves fit into 2 MB."""
X_DIGITS = 13
"""Digits of a step or a time."""
DIGITS = 6
"""Digits of any other number of a curve."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str
    """With the unit."""
    log: bool = False
    """Logarithmic; a vertical axis only where its values span more than a decade."""
    ticks: Sequence[float] = ()
    percent: bool = False
    """Show values from 0 to 1 as 0 % to 100 %."""
    whole: bool = False
    """Begin at 0: a small part of a whole looks small."""


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
    """The same number for curves of one thing; None: the next colour."""


@dataclass(frozen=True)
class Mark:
    """A vertical line with a word: a restart, a stop."""

    x: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A value, with a whisker from `low` to `high` if both are given; None: only a name."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    """Text beside the bar, in place of its value."""


@dataclass(frozen=True)
class Point:
    """A dot of a scatter plot, or a line through parallel axes."""

    name: str
    values: Sequence[Any]
    """A value for each axis; None for an axis without one."""
    strong: bool = False


def curves(
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    gaps: Sequence[float] = (),
) -> Chart | None:
    """A line plot with a legend; None without a point.

    gaps: values of x at which lines are interrupted.
    """
    drawn = []
    for curve in curves:
        points = points_of(curve)
        if points:
            look = {"dashed": curve.dashed, "level": curve.level, "colour": curve.colour}
            drawn.append({"name": curve.name, "points": points} | look)
    if not drawn:
        return None
    return {
        "kind": "curves",
        "curves": drawn,
        "x": vars(x),
        "y": vars(y),
        "marks": [vars(mark) for mark in marks],
        "gaps": gaps,
    }


def points_of(curve: Curve) -> list[list[float]]:
    """The points to draw: [x, y], with a band [x, y, low, high]; rounded, and thinned if many."""
    places = thinned(curve.x, curve.y)
    y_digits = digits([curve.y[place] or 0.0 for place in places])
    columns = [(curve.x, X_DIGITS), (curve.y, y_digits)]
    if curve.low and curve.high:
        columns += [(curve.low, DIGITS), (curve.high, DIGITS)]
    return [[rounded(values[place], kept) for values, kept in columns] for place in places]


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """The places of the points to draw.

    All, or the lowest and the highest of each of most / 2 equal parts, so that no spike is lost.
    """
    heights = {}
    for place, value in enumerate(y):
        if value is not None and math.isfinite(value) and math.isfinite(x[place]):
            heights[place] = value
    known = list(heights)
    if len(known) <= most:
        return known
    part = len(known) / (most // 2)
    kept = {known[0], known[-1]}
    for number in range(most // 2):
        group = known[int(number * part) : int((number + 1) * part)]
        kept |= {min(group, key=heights.__getitem__), max(group, key=heights.__getitem__)}
    return sorted(kept)


def digits(values: Sequence[float]) -> int:
    """Digits that a pixel can show of a curve: more where its values differ little."""
    largest = max(map(abs, values), default=0.0)
    span = max(values, default=0.0) - min(values, default=0.0)
    if not 0 < 100 * span < largest:
        return DIGITS
    return min(DIGITS - 2 + math.ceil(math.log10(largest / span)), X_DIGITS)


def rounded(value: Any, digits: int) -> Any:
    """A number with so many digits; an int as it is."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def bars(bars: Sequence[Bar], x: Axis, baseline: float | None = None) -> Chart:
    """Horizontal bars from 0, the first on top.

    Dots where the axis need not begin at 0, as that of an accuracy.

    baseline: a value that is marked by a dotted line.
    """
    drawn = []
    for bar in bars:
        drawn.append({name: finite_or_none(value) for name, value in vars(bar).items()})
    return {"kind": "bars", "bars": drawn, "x": vars(x), "baseline": baseline}


def scatter(points: Sequence[Point], x: Axis, y: Axis) -> Chart | None:
    """A dot for each pair of values; None without one. An x that is no number is a category."""
    drawn = [vars(point) for point in points if None not in point.values]
    if not drawn:
        return None
    return {"kind": "scatter", "points": drawn, "x": vars(x), "y": vars(y)}


def parallel(points: Sequence[Point], axes: Sequence[Axis]) -> Chart:
    """A line for each point through all axes; the value of the last one decides the colour."""
    drawn = [vars(point) for point in points if point.values[-1] is not None]
    return {"kind": "parallel", "points": drawn, "axes": [vars(axis) for axis in axes]}
