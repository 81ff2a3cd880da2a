"""Plots as SVG text, with colours that can be read on dark and light pages.

Text and axes take the colour of the surrounding text (`currentColor`). Without matplotlib every function returns "",
and the report names the missing plots.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NEEDS = "matplotlib"
COLOURS = ("#3b8ede", "#e08214", "#2fa36b", "#cf4f9b", "#8f7be0", "#b0713a", "#20a5b5", "#a3a026", "#d9534f", "#8a8f98")
"""Contrast of at least 2.6 against white and against #14171c."""
INK = "#010203"
"""Placeholder for the text colour, replaced by currentColor in the SVG; no data has this colour."""
MANY_DECADES = 500
"""Ratio of largest to smallest value from which labels at 1, 2, 5, 10 ... would overlap."""
WIDTH_INCHES = 5.2
"""With 9 point text, a figure as wide as a phone has letters of 8 pixels."""


@dataclass(frozen=True)
class Curve:
    """A line through (x, y), with a band from `low` to `high` if both are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A value, with a whisker from `low` to `high` if both are given. value None: only the name and `text`."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    """Shown next to the bar instead of its value."""


@dataclass(frozen=True)
class Axis:
    """Label (with unit), scale and ticks of an axis."""

    label: str
    log: bool = False
    ticks: Sequence[float] = field(default=())


def curves(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """A line plot with a legend; with few points they are marked."""

    def paint(axes: Any) -> None:
        from matplotlib.ticker import LogLocator

        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(curve.x, curve.y, "--" if curve.dashed else "-", marker="o" if len(curve.x) <= 12 else "",
                      markersize=3.5, color=colour, linewidth=1.6, label=curve.name)  # fmt: skip
            if curve.low and curve.high:
                axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        xs, ys = ([value for curve in curves for value in getattr(curve, which)] for which in ("x", "y"))
        for axis, values, set_label, set_scale, ticks in (
            (x, xs, axes.set_xlabel, axes.set_xscale, axes.xaxis),
            (y, ys, axes.set_ylabel, axes.set_yscale, axes.yaxis),
        ):
            set_label(axis.label)
            if axis.log:
                set_scale("log")
                few = max(values, default=1.0) > MANY_DECADES * min(values, default=1.0)
                ticks.set_major_locator(LogLocator(subs=(1,) if few else (1, 2, 5)))
                ticks.set_major_formatter(lambda value, _: f"{value:,g}")
                ticks.set_minor_formatter(lambda value, _: "")
            if axis.ticks:
                ticks.set_ticks(axis.ticks, [f"{tick:,g}" for tick in axis.ticks], minor=False)
        if len(curves) > 1:
            columns = 1 if max(len(curve.name) for curve in curves) > 28 else 2
            axes.figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK)

    return _draw(3.0 + 0.1 * len(curves), paint)


def bars(bars: Sequence[Bar], x: Axis, baseline: float | None = None) -> str:
    """Horizontal bars, the first on top. baseline: a value marked by a dotted line."""

    def paint(axes: Any) -> None:
        reach = max((bar.high or bar.value or 0.0 for bar in bars), default=0.0) or 1.0
        for row, bar in enumerate(bars):
            text, end = bar.text, 0.0
            if bar.value is not None:
                end = max(bar.value, 0.0)
                axes.barh(row, bar.value, height=0.66, color=COLOURS[0])
                if bar.low is not None and bar.high is not None and bar.low < bar.high:
                    spread = [[bar.value - bar.low], [bar.high - bar.value]]
                    axes.errorbar(bar.value, row, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
                    end = max(end, bar.high)
                text = text or f"{bar.value:,.4g}"
            axes.text(end + 0.015 * reach, row, text, va="center", ha="left")
        if baseline is not None:
            axes.axvline(baseline, color=INK, linewidth=0.9, linestyle=":")
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlabel(x.label)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.18)
        if x.log:
            axes.set_xscale("log")

    return _draw(0.8 + 0.3 * len(bars), paint)


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec(NEEDS) is not None


def _draw(height_inches: float, paint: Callable[[Any], None]) -> str:
    """An <svg> element, as wide as its frame, with what `paint` draws on a pair of axes. Same input, same bytes."""
    if not available():
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        **{f"{name}.color": INK for name in ("xtick", "ytick", "text", "grid")},
        **{"axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.grid": True},
        **{"grid.alpha": 0.15, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
        **{"font.size": 9, "legend.fontsize": 8.5, "axes.linewidth": 0.6, "axes.formatter.useoffset": False},
        **{"xtick.major.width": 0.6, "ytick.major.width": 0.6, "text.parse_math": False},
        **{"svg.fonttype": "none", "svg.hashsalt": "ddp_train"},
    }
    file = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure((WIDTH_INCHES, height_inches), layout="constrained")  # pyplot would keep it, and open a window
        paint(figure.add_subplot(facecolor="none"))
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"(?=>)', "", text)  # ids of groups (figure_1, text_3), which nothing refers to
    return re.sub(r' width="[\d.]+pt"', ' width="100%"', re.sub(r' height="[\d.]+pt"', "", text, count=1), count=1)
