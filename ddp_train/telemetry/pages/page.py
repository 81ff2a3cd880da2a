"""A report as one HTML page that loads nothing.

Python writes the report as a JSON document into the page; `page.js` and `page.charts.js` draw it
in the reader's browser. The page's own policy lets a browser run these scripts and no others, and
fetch nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import time
from pathlib import Path
from string import Template
from typing import Any

from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.json_files import finite_or_none
from ddp_train.telemetry.pages.report import (
    CSV,
    HTML,
    JSON,
    MARKDOWN,
    Lines,
    Report,
    as_csv,
    as_json,
    as_markdown,
)
from ddp_train.telemetry.pages.tables import Table, columns_of

HERE = Path(__file__).parent
CHART_SCRIPTS = ("third_party/echarts.min.js", "page.charts.js")


def write(report: Report, directory: Path) -> Path:
    """Write report.html, report.md, report.csv and report.json, each atomically.

    Returns the path of report.html. Raises OSError if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / MARKDOWN, as_markdown(report))
    write_text(directory / CSV, as_csv(report))
    write_text(directory / JSON, as_json(report))
    write_text(directory / HTML, as_page(report))
    return directory / HTML


def as_page(report: Report) -> str:
    """The whole page. The library for charts is in it if there is one: 1.1 MB."""
    names = ["page.js"]
    if report.plots:
        names = [*CHART_SCRIPTS, *names]
    scripts = [_source(name) for name in names]
    digests = " ".join(f"'sha256-{_digest(name)}'" for name in names)
    refresh = ""
    if report.refresh_seconds:
        refresh = f'<meta http-equiv="refresh" content="{report.refresh_seconds}">\n'
    # `</script>` in a text must not end the document.
    content = json.dumps(
        content_of(report), allow_nan=False, separators=(",", ":"), default=str
    ).replace("<", "\\u003c")
    return Template(_source("page.html")).substitute(
        title=html.escape(report.title),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {digests}",
        refresh=refresh,
        style=_source("page.css"),
        report=content,
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


@functools.cache
def _source(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@functools.cache
def _digest(name: str) -> str:
    digest = hashlib.sha256(_source(name).encode()).digest()
    return base64.b64encode(digest).decode()


def content_of(report: Report) -> dict[str, Any]:
    """The report as `page.js` reads it: its fields, and when it was written."""
    sections = []
    for section in report.sections:
        if isinstance(section, Table):
            sections.append(_table_content(section))
        elif isinstance(section, Lines):
            sections.append({"kind": "lines"} | vars(section))
        elif section.chart:
            sections.append({"kind": "plot"} | vars(section))
    return vars(report) | {"sections": sections, "written": time.time()}


def _table_content(table: Table) -> dict[str, Any]:
    """The columns with the texts of their cells, and the numbers by which they are sorted."""
    columns = []
    for column in columns_of(table):
        numbers = []
        for value in column.values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            numbers.append(finite_or_none(value) if is_number else None)
        columns.append(
            {
                "name": column.name,
                "texts": column.texts,
                "numbers": numbers,
                "is_numeric": column.is_numeric,
                "is_extra": bool(table.first) and column.name not in table.first,
            }
        )
    return {
        "kind": "table",
        "title": table.title,
        "note": table.note,
        "best": table.best,
        "columns": columns,
    }
