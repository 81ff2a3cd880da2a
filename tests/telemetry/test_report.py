"""A report in all its formats: one content, safe and readable wherever it is shown."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from ddp_train.telemetry.pages.charts import Axis, Bar, bars
from ddp_train.telemetry.pages.page import as_page, write
from ddp_train.telemetry.pages.report import Plot, Report, as_csv, as_json, as_markdown, show
from ddp_train.telemetry.pages.tables import Table, cells
from tests.support.pages import report_in

SPITEFUL = '<script>alert(1)</script> |_x_| `y` $z$ *b* [l](u) & "q"'


def spiteful_report() -> Report:
    """Whatever a name or an error message may hold, wherever it may stand."""
    table = Table(SPITEFUL, ["name", SPITEFUL], [[SPITEFUL, 1], ["=cmd()", float("nan")]], SPITEFUL)
    plot = Plot(SPITEFUL, bars([Bar(SPITEFUL, 1.0)], Axis(SPITEFUL)), SPITEFUL)
    return Report(SPITEFUL, SPITEFUL, [table, plot], {SPITEFUL: SPITEFUL}, [SPITEFUL])


def test_no_text_becomes_markup() -> None:
    page = as_page(spiteful_report())
    scripts = ['<script type="application/json" id="report">', *["<script>"] * 3]
    assert re.findall(r"<script[^>]*>", page) == scripts and SPITEFUL not in page
    found = report_in(page)
    table, plot = found["sections"]
    assert [found["title"], found["intro"], *found["commands"]] == [SPITEFUL] * 3
    assert [table["columns"][0]["texts"][0], plot["chart"]["x"]["label"]] == [SPITEFUL] * 2
    markdown = as_markdown(spiteful_report())
    row = next(line for line in markdown.splitlines() if line.startswith(r"| \<script"))
    assert (
        row
        == r"| \<script\>alert(1)\</script\> \|\_x\_\| \`y\` $z$ \*b\* \[l\](u) & " + '"q" | 1 |'
    )


def test_a_page_loads_nothing_and_has_a_library_only_for_plots() -> None:
    page = as_page(spiteful_report())
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert len(page) < 2_000_000, "with the library"
    without = as_page(Report("T", "", [Table("t", ["a"], [[1]])]))
    assert (
        not any(word in without for word in ("src=", "url(http", "@import", "<link"))
        and len(without) < 30_000
    )


def test_all_formats_hold_the_same_numbers(tmp_path: Path) -> None:
    one = Table("One", ["name", "s/epoch", "runs"], [["a", 0.25, 3], ["b", None, 0]])
    two = Table("Two", ["name", "loss"], [["a", 1.5e-7], ["b", float("inf")]], "why")
    assert (
        write(Report("T", "I", [one, two], {"Date": "today"}, ["python x"]), tmp_path)
        == tmp_path / "report.html"
    )
    content = json.loads((tmp_path / "report.json").read_text())
    assert [table["rows"] for table in content["tables"]] == [
        one.rows,
        [["a", 1.5e-7], ["b", None]],
    ]
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    assert [row["table"] for row in rows] == ["One", "One", "Two", "Two"]
    assert (rows[0]["s/epoch"], rows[1]["s/epoch"], float(rows[2]["loss"])) == ("0.25", "", 1.5e-7)
    assert "| a | 0.250 | 3 |\n| b | - | 0 |" in (tmp_path / "report.md").read_text()
    assert as_csv(spiteful_report()).splitlines()[2].split(",")[1] == "'=cmd()", (
        "no formula for a spreadsheet"
    )
    assert json.loads(as_json(spiteful_report()))["tables"][0]["rows"][1][1] is None


def test_numbers_of_a_column_have_the_decimals_of_its_middle() -> None:
    rows = [
        [0.1731, 25615.3, 99.181, 3e-6, 1.0],
        [2.4329, 18359.2, 98.6, 0.02, 1e-7],
        [14.7, 133.0, 9.1, 1.0, 0.0],
    ]
    shown = list(zip(*cells(Table("", list("abcde"), rows)), strict=True))
    assert shown[0] == ("0.173", "2.433", "14.700") and shown[1] == ("25,615", "18,359", "133")
    assert shown[2] == ("99.18", "98.60", "9.10")
    assert shown[3] == ("3.0e-06", "0.0200", "1.0000"), "too small for the column is not nothing"
    assert shown[4][2] == "0"


@pytest.mark.parametrize("width", [40, 200])
def test_a_file_has_every_number_however_long_its_lines_are(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("Wide", [f"column {n}" for n in range(12)], [[123456.0 + n for n in range(12)]])
    show(Report("", "", [table]), Console(width=width))
    out = capsys.readouterr().out.replace("\n", "")
    assert all(f"{123456 + n:,}" in out for n in range(12))


@pytest.mark.parametrize("width", [40, 80, 400])
def test_terminal_shows_columns_that_fit_and_names_others(width: int) -> None:
    columns = ["variant", "result", *[f"figure {number}" for number in range(9)]]
    written = io.StringIO()
    table = Table(
        "Variants", columns, [["none", "completed", *[1000.5 + number for number in range(9)]]]
    )
    show(
        Report("", "", [table]),
        Console(width=width, force_terminal=True, file=written, color_system=None),
    )
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    told = " ".join(" ".join(lines).split())
    left_out = [
        name
        for name in columns
        if name in told.partition("Columns not shown here (see the report):")[2]
    ]
    assert bool(left_out) == (width < 400) and all(name in told for name in ("variant", "result"))
    assert told.count("1,00") == 9 - len(left_out)
