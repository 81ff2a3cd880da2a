"""Reports of tables, plots, provenance and commands, written as HTML, Markdown, CSV and JSON, and to the terminal.

The page is one file without external resources, in the dark or light scheme of its reader. All text that comes from
runs (error messages, names) is escaped.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from ddp_train.study.plots import NEEDS

HTML, MARKDOWN, CSV, JSON = "report.html", "report.md", "report.csv", "report.json"
NOTHING = "-"
TEXT_WIDTH = 14
"""Minimum width of a column of text on a narrow terminal, in characters."""
DIGITS = 4
"""Digits of the median of a column, a leading 0 included; the other numbers have as many decimals."""


@dataclass
class Table:
    """Column names include the unit. A cell is a number, text, a bool, or None, which is shown as "-"."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""


@dataclass
class Plot:
    """`svg` is an <svg> element, or "" if it could not be drawn."""

    title: str
    svg: str
    caption: str = ""


@dataclass
class Report:
    """facts: hardware, versions and other provenance. commands: how to reproduce the rows."""

    title: str
    intro: str
    sections: list[Table | Plot]
    facts: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    @property
    def tables(self) -> list[Table]:
        return [section for section in self.sections if isinstance(section, Table)]

    @property
    def plots(self) -> list[Plot]:
        """The plots that could be drawn."""
        return [section for section in self.sections if isinstance(section, Plot) and section.svg]

    @property
    def all_facts(self) -> dict[str, str]:
        """The facts, and the names of plots that could not be drawn."""
        missing = [section.title for section in self.sections if isinstance(section, Plot) and not section.svg]
        if not missing:
            return self.facts
        return self.facts | {"Missing plots": f"{', '.join(missing)}: needs {NEEDS}; pip install {NEEDS}"}


def write(report: Report, directory: Path) -> Path:
    """Writes report.html, report.md, report.csv and report.json, each atomically. Returns the path of report.html.

    Raises OSError if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (MARKDOWN, as_markdown(report)),
        (CSV, as_csv(report)),
        (JSON, as_json(report)),
        (HTML, as_page(report)),
    ):
        part = directory / (name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(directory / name)
    return directory / HTML


def show(report: Report, console: Console | None = None) -> None:
    """Prints the tables. On a narrow terminal only the columns that fit."""
    console = console or Console()
    for table in report.tables:
        count = len(table.columns)
        drawn = _rich_table(table, count)
        while console.is_terminal and count > 2 and _width(drawn, console) > console.width:
            count -= 1
            drawn = _rich_table(table, count)
        console.print(drawn, crop=False)  # lines in a file may have any length
        if table.note:
            console.print(Text(table.note, "dim"))
        if left_out := table.columns[count:]:
            console.print(Text(f"Columns not shown here (see the report): {', '.join(left_out)}.", "dim"))


def _width(drawn: RichTable, console: Console) -> int:
    """Width of the longest line, which is wider than the console if a column cannot be folded."""
    return max(map(Segment.get_line_length, Segment.split_lines(console.render(drawn))))


def _rich_table(table: Table, count: int) -> RichTable:
    """The first `count` columns of a table."""
    drawn = RichTable(title=Text(table.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rows, numeric = cells(table), _numeric(table)
    for place, (name, right) in enumerate(zip(table.columns[:count], numeric, strict=False)):
        longest = max((len(row[place]) for row in rows), default=0)
        longest_word = max(map(len, name.split()), default=0)
        least = max(longest if right else min(longest, TEXT_WIDTH), longest_word)  # words are folded, numbers not
        drawn.add_column(Text(name), justify="right" if right else "left", min_width=least, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row[:count]))
    return drawn


# --- cells ------------------------------------------------------------------------------------------------------------


def cells(table: Table) -> list[list[str]]:
    """The text of each cell: all numbers of a column have the same decimals, as many as its median needs."""
    shown = [_column([row[place] for row in table.rows]) for place in range(len(table.columns))]
    return [list(row) for row in zip(*shown, strict=True)]


def _column(values: Sequence[Any]) -> list[str]:
    sizes = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value) and value]
    middle = statistics.median_high(sizes) if sizes else 1.0
    tiny = bool(sizes) and (max(sizes) < 1e-3 or (min(sizes) < 1e-4 and max(sizes) < 1))
    power = math.floor(math.log10(middle))
    spec = ".1e" if tiny else f",.{min(max(0, DIGITS - 1 - power - (power < 0)), 6)}f"
    return [_cell(value, spec) for value in values]


def _cell(value: Any, spec: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        rounded = format(value, spec)
        if value == 0:
            return "0"
        return (
            rounded if rounded.strip("-0.,") else f"{value:.1e}"
        )  # too small for the decimals of its column, but not 0
    return str(value)


def _numeric(table: Table) -> list[bool]:
    """For each column whether it holds numbers, which are aligned to the right."""
    columns = [[row[place] for row in table.rows] for place in range(len(table.columns))]
    return [
        any(isinstance(value, int | float) for value in column)
        and all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column)
        for column in columns
    ]


# --- formats ----------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """Unrounded numbers; NaN and infinity, which JSON does not have, are null."""
    content = {
        "title": report.title,
        "intro": report.intro,
        "tables": [
            vars(table) | {"rows": [[_finite_or_none(v) for v in row] for row in table.rows]} for table in report.tables
        ],
        "plots": [{"title": plot.title, "caption": plot.caption} for plot in report.plots],
        "facts": report.all_facts,
        "commands": report.commands,
    }
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_csv(report: Report) -> str:
    """All tables under one header: the title of the table, then every column that any table has."""
    columns = list(dict.fromkeys(name for table in report.tables for name in table.columns))
    file = io.StringIO()
    writer = csv.DictWriter(file, ["table", *columns])
    writer.writeheader()
    for table in report.tables:
        for row in table.rows:
            values = {name: _csv_value(value) for name, value in zip(table.columns, row, strict=True)}
            writer.writerow({"table": table.title} | values)
    return file.getvalue()


def _csv_value(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets a leading apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else _finite_or_none(value)


def as_markdown(report: Report) -> str:
    """The tables, without the plots."""
    lines = [
        f"# {_escape_markdown(report.title)}",
        "",
        *[_escape_markdown(line) for line in report.intro.splitlines()],
        "",
    ]
    for table in report.tables:
        lines += [f"## {_escape_markdown(table.title)}", "", _markdown_row(map(_escape_markdown, table.columns))]
        lines += [_markdown_row("---:" if right else "---" for right in _numeric(table))]
        lines += [_markdown_row(map(_escape_markdown, row)) for row in cells(table)]
        lines += ["", *([_escape_markdown(table.note), ""] if table.note else [])]
    lines += [f"- {_escape_markdown(name)}: {_escape_markdown(value)}" for name, value in report.all_facts.items()]
    if report.commands:
        lines += ["", *(f"    {' '.join(command.split())}" for command in report.commands)]
    return "\n".join(lines) + "\n"


def _markdown_row(items: Any) -> str:
    return f"| {' | '.join(items)} |"


def _escape_markdown(text: str) -> str:
    """Text on one line, with the characters escaped that have a meaning in Markdown."""
    flat = " ".join(text.split())
    flat = re.sub(r"([\\|<>*`\[\]])", r"\\\1", flat)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat)  # inside words it has no meaning


def as_page(report: Report) -> str:
    """One HTML page without external resources: tables, plots, provenance, commands."""
    parts = [f"<h1>{html.escape(report.title)}</h1>"]
    parts += [
        f"<p>{html.escape(paragraph)}</p>" for paragraph in re.split(r"\n\s*\n", report.intro.strip()) if paragraph
    ]
    parts += [_html_table(table) for table in report.tables]
    figures = [_html_figure(plot) for plot in report.plots]
    parts += ['<div class="plots">', *figures, "</div>"] if figures else []
    facts = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in report.all_facts.items())
    parts += [f"<h2>Hardware and versions</h2><dl>{facts}</dl>"] if facts else []
    commands = html.escape("\n".join(report.commands))
    parts += [f"<h2>Commands</h2><pre tabindex=0>{commands}</pre>"] if commands else []
    return _PAGE.format(title=html.escape(report.title), style=_STYLE, body="\n".join(parts))


def _html_table(table: Table) -> str:
    kinds = [' class="n"' if right else "" for right in _numeric(table)]
    head = "".join(f"<th{kind}>{_heading(name)}</th>" for name, kind in zip(table.columns, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in cells(table)
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    # The frame scrolls, not the page; by keyboard too.
    frame = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    title = html.escape(table.title)
    scrolls = f'<div class="wide" tabindex=0 role="region" aria-label="{title}">{frame}</div>'
    return f"<section><h2>{title}</h2>{scrolls}{note}</section>"


def _heading(name: str) -> str:
    """A column's name with no line break before its unit or at a hyphen."""
    return html.escape(re.sub(r" (?=\S{1,2}$)", "\N{NO-BREAK SPACE}", name).replace("-", "\N{NON-BREAKING HYPHEN}"))


def _html_figure(plot: Plot) -> str:
    caption = f"<figcaption>{html.escape(plot.caption)}</figcaption>" if plot.caption else ""
    return f"<figure><h2>{html.escape(plot.title)}</h2>{plot.svg}{caption}</figure>"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { --page: #ffffff; --text: #1b1f24; --quiet: #5b6570; --line: #d9dee4; --stripe: #f5f7f9; --mark: #1f6fc4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --text: #e4e8ec; --quiet: #9aa5b1; --line: #333a43; --stripe: #1b2027; --mark: #6cb2f5; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0 1rem; text-wrap: balance; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.6rem; }
p { max-width: 75ch; }
.note, figcaption, dt { color: var(--quiet); font-size: 0.875rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
.wide:focus-visible, pre:focus-visible { outline: 2px solid var(--mark); }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { padding: 0.4rem 0.65rem; text-align: left; vertical-align: top; min-width: 8rem; max-width: 30rem; }
th { border-bottom: 1px solid var(--line); color: var(--quiet); font-weight: 600; vertical-align: bottom; }
td { overflow-wrap: break-word; }
.n { text-align: right; font-variant-numeric: tabular-nums; min-width: 3.5rem; }
td.n { white-space: nowrap; }
tbody tr:nth-child(even) td { background: var(--stripe); }
tbody tr:nth-child(odd) td, th { background: var(--page); }
th:first-child, td:first-child { position: sticky; left: 0; max-width: 22rem; min-width: 10rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 0 2rem; }
figure { margin: 0; max-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--stripe); border: 1px solid var(--line); border-radius: 8px; padding: 0.8rem; }
pre { font-size: 0.8rem; line-height: 1.6; }
@media (max-width: 600px) {
  main { padding: 1rem 0.75rem 2rem; }
  th:first-child, td:first-child { max-width: 45vw; min-width: 7rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 0.6rem; }
}
"""
