"""A report as one HTML page that loads nothing, in the light or dark scheme of its reader.

All text that comes from runs (error messages, names) is escaped, and the page's own policy lets a
browser run the two scripts that are in this package and no other, and fetch nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.pages.report import (
    CSV,
    HTML,
    JSON,
    MARKDOWN,
    Lines,
    Plot,
    Report,
    as_csv,
    as_json,
    as_markdown,
)
from ddp_train.telemetry.pages.tables import Link, Table, cells, numeric_columns

HERE = Path(__file__).parent
LIBRARY = HERE / "third_party/echarts.min.js"
DRAWING = HERE / "page.js"
STYLE = HERE / "page.css"
LONG = 14
"""Letters of a text that may need more than a line on a phone."""
LONG_NAME = 20
"""Letters of a column's name that may take several lines."""
NARROW_WORDS = 24
"""Letters up to which a cell of text is kept on one line."""


def write(report: Report, directory: Path) -> Path:
    """Writes report.html, report.md, report.csv and report.json, each atomically. Returns the path
    of report.html.

    Raises OSError if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, text_of in ((MARKDOWN, as_markdown), (CSV, as_csv), (JSON, as_json), (HTML, as_page)):
        write_text(directory / name, text_of(report))
    return directory / HTML


def as_page(report: Report) -> str:
    """The whole page. The library for plots is in it if it has a plot: 1.1 MB."""
    parts = [f"<h1>{html.escape(report.title)}</h1>"]
    if report.state:
        kind = report.state.split()[0].rstrip(",:;")
        often = f' data-written="{time.time():.0f}" data-every="{report.refresh_seconds}"'
        written = often if report.refresh_seconds else ""
        parts += [f'<p class="state {html.escape(kind)}"{written}>{html.escape(report.state)}</p>']
    parts += [
        f"<p>{html.escape(text)}</p>" for text in re.split(r"\n\s*\n", report.intro.strip()) if text
    ]
    tiles = [
        f"<div><b{' class=long' * (len(value) > LONG)}>{_broken(value)}</b>"
        f"<span>{html.escape(name)}</span></div>"
        for name, value in report.numbers.items()
    ]
    parts += [f'<div class="numbers">{"".join(tiles)}</div>'] if tiles else []
    items = "".join(f"<li>{html.escape(text)}</li>" for text in report.findings)
    parts += [f"<ul>{items}</ul>"] * bool(items)
    for is_plot, group in groupby(report.sections, lambda section: isinstance(section, Plot)):
        sections = [*group]
        parts += _figures(sections) if is_plot else map(_section, sections)
    facts = "".join(
        f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in report.facts.items()
    )
    parts += [f"<h2>Hardware and versions</h2><dl>{facts}</dl>"] if facts else []
    parts += [_lines(Lines("Commands", report.commands))] if report.commands else []
    scripts = [_source(LIBRARY)] * bool(report.plots) + [_source(DRAWING)]
    if report.refresh_seconds:
        refresh = f'<meta http-equiv="refresh" content="{report.refresh_seconds}">\n'
    else:
        refresh = ""
    return _PAGE.format(
        title=html.escape(report.title),
        policy=_policy(scripts),
        refresh=refresh,
        style=_source(STYLE),
        body="\n".join(parts),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


@functools.cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"


def _section(section: Table | Plot | Lines) -> str:
    if isinstance(section, Table):
        return _table(section)
    return _lines(section) if isinstance(section, Lines) else ""


def _lines(section: Lines) -> str:
    text = html.escape("\n".join(section.lines))
    note = f'<p class="note">{html.escape(section.note)}</p>' if section.note else ""
    title = html.escape(section.title)
    body = f"<pre tabindex=0>{text}</pre>{note}"
    if section.folded:
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<h2>{title}</h2>{body}"


def _table(table: Table) -> str:
    shown = cells(table)
    numeric = numeric_columns(table)
    kinds: list[str] = []
    for place, (name, right) in enumerate(zip(table.columns, numeric, strict=True)):
        is_short = max((len(row[place]) for row in shown), default=0) <= NARROW_WORDS
        more = "more" if table.first and name not in table.first else ""
        kinds.append(" ".join(filter(None, ["n" if right else "w" if is_short else "", more])))
    head = "".join(
        f'<th class="{kind}"{_least(name)}><button>{_heading(name)}</button></th>'
        for name, kind in zip(table.columns, kinds, strict=True)
    )
    body = "\n".join(
        f"<tr{_best(table, number)}>"
        + "".join(map(_cell, row, table.rows[number], kinds))
        + "</tr>"
        for number, row in enumerate(shown)
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    hidden = sum("more" in kind for kind in kinds)
    few = ' class="few"' if hidden else ""
    more = f"show {hidden} more columns" if hidden > 1 else "show one more column"
    button = (
        f'<button class="show" data-more="{more}" data-fewer="show fewer columns">{more}</button>'
        * bool(hidden)
    )
    # The frame scrolls, not the page; by keyboard too.
    frame = f"<table{few}><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    title = html.escape(table.title)
    scrolls = f'<div class="wide" tabindex=0 role="region" aria-label="{title}">{frame}</div>'
    return f"<section><h2>{title}</h2>{scrolls}{button}{note}</section>"


def _best(table: Table, number: int) -> str:
    return ' class="best"' if number == table.best else ""


def _cell(text: str, value: object, kind: str) -> str:
    """The text, and the number by which it is sorted."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    exact = f' data-v="{value}"' if is_number else ""
    inner = _broken(text)
    if isinstance(value, Link):
        inner = f'<a href="{html.escape(value.to)}">{inner}</a>'
    return f'<td class="{kind}"{exact}>{inner}</td>'


def _broken(text: str) -> str:
    """Long words may be broken behind `=` and `/`, before numbers and letters are."""
    if len(text) > LONG:
        return re.sub(r"([=/])(?=\S)", r"\1<wbr>", html.escape(text))
    return html.escape(text)


def _heading(name: str) -> str:
    """A column's name with no line break before its unit or at a hyphen; a long one may be broken
    behind . and _."""
    whole = re.sub(r" (?=\S{1,2}$)", "\N{NO-BREAK SPACE}", name).replace(
        "-", "\N{NON-BREAKING HYPHEN}"
    )
    if len(name) > LONG_NAME:
        return re.sub(r"([._]+)", r"\1<wbr>", html.escape(whole))
    return html.escape(whole)


def _least(name: str) -> str:
    """The width with which a long name takes no more than about three lines."""
    if len(name) > LONG:
        return f' style="min-width:{len(name) // 3 + 4}ch"'
    return ""


def _figures(plots: Sequence[object]) -> list[str]:
    drawn = [_figure(plot) for plot in plots if isinstance(plot, Plot) and plot.chart]
    return ['<div class="plots">', *drawn, "</div>"] if drawn else []


def _figure(plot: Plot) -> str:
    caption = f"<figcaption>{html.escape(plot.caption)}</figcaption>" if plot.caption else ""
    data = json.dumps(plot.chart, allow_nan=False, separators=(",", ":"), default=str).replace(
        "<", "\\u003c"
    )
    chart = (
        f'<div class="chart across"><script type="application/json">{data}</script><div'
        ' class="frame"></div></div>'
    )
    full = ' class="full"' if plot.full else ""
    return f"<figure{full}><h2>{html.escape(plot.title)}</h2>{chart}{caption}</figure>"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{refresh}<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
{scripts}
</body>
</html>
"""
