"""Reports of tables, plots, provenance and commands, as Markdown, CSV and JSON.

The page is made by `page.py`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ddp_train.telemetry.json_files import finite_or_none
from ddp_train.telemetry.pages import tables
from ddp_train.telemetry.pages.charts import Chart
from ddp_train.telemetry.pages.tables import Table, cells, columns_of

HTML = "report.html"
MARKDOWN = "report.md"
CSV = "report.csv"
JSON = "report.json"


@dataclass
class Plot:
    """A chart under a heading; left out of the page if there is nothing to draw."""

    title: str
    chart: Chart | None
    caption: str = ""
    full: bool = False
    """As wide as the page."""


@dataclass
class Lines:
    """Lines of text under a heading: commands to paste, or a config."""

    title: str
    lines: Sequence[str]
    note: str = ""
    folded: bool = False
    """Shown on demand."""


Section = Table | Plot | Lines


@dataclass
class Report:
    """The content of a page, from its top to its end."""

    title: str
    intro: str
    """Paragraphs, with an empty line between them."""
    sections: Sequence[Section]
    facts: dict[str, str] = field(default_factory=dict)
    """Hardware, versions and other provenance."""
    commands: list[str] = field(default_factory=list)
    """The commands that reproduce the rows."""
    state: str = ""
    """Begins with completed, running, failed or stopped, from which it has its colour."""
    numbers: dict[str, str] = field(default_factory=dict)
    """Numbers that a reader looks for first."""
    findings: list[str] = field(default_factory=list)
    """Sentences on what held it back, with the key that helps."""
    refresh_seconds: int = 0
    """Time after which the page loads itself again; 0: never."""
    brief: Table | None = None
    """The table that a terminal shows above the others."""

    @property
    def tables(self) -> list[Table]:
        return [section for section in self.sections if isinstance(section, Table)]

    @property
    def plots(self) -> list[Plot]:
        """The plots that have something to draw."""
        return [section for section in self.sections if isinstance(section, Plot) and section.chart]


def show(report: Report, console: Console | None = None) -> None:
    """Print the tables, see `tables.show`."""
    if report.brief:
        tables.show(report.brief, console)
    for table in report.tables:
        tables.show(table, console)


def as_json(report: Report) -> str:
    """The report with unrounded numbers; NaN and infinity are null."""
    tables = []
    for table in report.tables:
        rows = [[finite_or_none(value) for value in row] for row in table.rows]
        tables.append(
            {"title": table.title, "columns": table.columns, "note": table.note, "rows": rows}
        )
    content = {
        "title": report.title,
        "intro": report.intro,
        "tables": tables,
        "plots": [{"title": plot.title, "caption": plot.caption} for plot in report.plots],
        "facts": report.facts,
        "commands": report.commands,
    }
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"


def as_csv(report: Report) -> str:
    """All tables under one header: the title of the table, then each column that a table has."""
    columns: dict[str, None] = {}
    for table in report.tables:
        columns |= dict.fromkeys(table.columns)
    file = io.StringIO()
    writer = csv.DictWriter(file, ["table", *columns])
    writer.writeheader()
    for table in report.tables:
        for row in table.rows:
            values = dict(zip(table.columns, map(_csv_value, row), strict=True))
            writer.writerow({"table": table.title} | values)
    return file.getvalue()


def _csv_value(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets a leading apostrophe."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return finite_or_none(value)


def as_markdown(report: Report) -> str:
    """The report without its plots."""
    lines = [f"# {_escaped(report.title)}", "", *map(_escaped, report.intro.splitlines()), ""]
    if report.findings:
        lines += [*(f"- {_escaped(finding)}" for finding in report.findings), ""]
    for table in report.tables:
        lines += _markdown_table(table)
    lines += [f"- {_escaped(name)}: {_escaped(value)}" for name, value in report.facts.items()]
    if report.commands:
        lines += ["", *(f"    {' '.join(command.split())}" for command in report.commands)]
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> list[str]:
    alignment = ["---:" if column.is_numeric else "---" for column in columns_of(table)]
    lines = [
        f"## {_escaped(table.title)}",
        "",
        _markdown_row(map(_escaped, table.columns)),
        _markdown_row(alignment),
    ]
    for row in cells(table):
        lines.append(_markdown_row(map(_escaped, row)))
    lines.append("")
    if table.note:
        lines += [_escaped(table.note), ""]
    return lines


def _markdown_row(items: Iterable[str]) -> str:
    return f"| {' | '.join(items)} |"


def _escaped(text: str) -> str:
    """A text on one line, with the characters escaped that have a meaning in Markdown."""
    line = " ".join(text.split())
    line = re.sub(r"([\\|<>*`\[\]])", r"\\\1", line)
    # Inside words an underscore has no meaning.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)
