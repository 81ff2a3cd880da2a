"""Reports of tables, plots, provenance and commands, written as HTML, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ddp_train.telemetry.pages import tables
from ddp_train.telemetry.pages.charts import Chart
from ddp_train.telemetry.pages.tables import Table, cells, numeric_columns

HTML = "report.html"
MARKDOWN = "report.md"
CSV = "report.csv"
JSON = "report.json"


@dataclass
class Plot:
    """`chart` is None if there is nothing to draw."""

    title: str
    chart: Chart | None
    caption: str = ""
    full: bool = False
    """As wide as the page."""


@dataclass
class Lines:
    """Lines of text under a heading: commands to paste, or a config. folded: shown on demand."""

    title: str
    lines: Sequence[str]
    note: str = ""
    folded: bool = False


@dataclass
class Report:
    """facts: hardware, versions and other provenance. commands: how to reproduce the rows."""

    title: str
    intro: str
    sections: Sequence[Table | Plot | Lines]
    facts: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    state: str = ""
    """In a word, with its colour in the page: completed, running, failed, stopped."""
    numbers: dict[str, str] = field(default_factory=dict)
    """What a reader looks for first."""
    findings: list[str] = field(default_factory=list)
    """In words, with the key that helps."""
    refresh_seconds: int = 0
    """The page loads itself again after so long; 0: never."""

    @property
    def tables(self) -> list[Table]:
        return [section for section in self.sections if isinstance(section, Table)]

    @property
    def plots(self) -> list[Plot]:
        """Those that have something to draw."""
        return [section for section in self.sections if isinstance(section, Plot) and section.chart]


def show(report: Report, console: Console | None = None) -> None:
    """Prints the tables, see `tables.show`."""
    for table in report.tables:
        tables.show(table, console)


# --- formats --------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """Unrounded numbers; NaN and infinity, which JSON does not have, are null."""
    content = {
        "title": report.title,
        "intro": report.intro,
        "tables": [
            {
                "title": table.title,
                "columns": table.columns,
                "note": table.note,
                "rows": [[_finite_or_none(v) for v in row] for row in table.rows],
            }
            for table in report.tables
        ],
        "plots": [{"title": plot.title, "caption": plot.caption} for plot in report.plots],
        "facts": report.facts,
        "commands": report.commands,
    }
    return json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_csv(report: Report) -> str:
    """All tables under one header: the title of the table, then every column that any table has."""
    columns = list(dict.fromkeys(name for table in report.tables for name in table.columns))
    file = io.StringIO()
    writer = csv.DictWriter(file, ["table", *columns])
    writer.writeheader()
    for table in report.tables:
        for row in table.rows:
            values = {
                name: _csv_value(value) for name, value in zip(table.columns, row, strict=True)
            }
            writer.writerow({"table": table.title} | values)
    return file.getvalue()


def _csv_value(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets a leading apostrophe."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return _finite_or_none(value)


def as_markdown(report: Report) -> str:
    """The tables, without the plots."""
    lines = [
        f"# {_escape_markdown(report.title)}",
        "",
        *[_escape_markdown(line) for line in report.intro.splitlines()],
        "",
        *[f"- {_escape_markdown(finding)}" for finding in report.findings],
        *[""] * bool(report.findings),
    ]
    for table in report.tables:
        lines += [
            f"## {_escape_markdown(table.title)}",
            "",
            _markdown_row(map(_escape_markdown, table.columns)),
        ]
        lines += [_markdown_row("---:" if right else "---" for right in numeric_columns(table))]
        lines += [_markdown_row(map(_escape_markdown, row)) for row in cells(table)]
        lines += ["", *([_escape_markdown(table.note), ""] if table.note else [])]
    lines += [
        f"- {_escape_markdown(name)}: {_escape_markdown(value)}"
        for name, value in report.facts.items()
    ]
    if report.commands:
        lines += ["", *(f"    {' '.join(command.split())}" for command in report.commands)]
    return "\n".join(lines) + "\n"


def _markdown_row(items: Any) -> str:
    return f"| {' | '.join(items)} |"


def _escape_markdown(text: str) -> str:
    """Text on one line, with the characters escaped that have a meaning in Markdown."""
    flat = " ".join(text.split())
    flat = re.sub(r"([\\|<>*`\[\]])", r"\\\1", flat)
    return re.sub(
        r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat
    )  # inside words it has no meaning
