"""Tables: their cells as text, and how a terminal or a file shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "-"
DIGITS = 4
"""Digits of the median of a column, a leading 0 included; the other numbers have as many decimals."""
PIPE_COLUMNS = 10_000
"""Width of a table that is no person's screen: as wide as it needs."""


@dataclass(frozen=True)
class Link:
    """A cell that leads to a file beside the page."""

    text: str
    to: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Table:
    """Column names include the unit. A cell is a number, text, a bool, a Link, or None, which is shown as "-"."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""
    first: Sequence[str] = ()
    """The columns that a page shows at once; the others on demand. Empty: all."""
    best: int | None = None
    """The row that stands out."""


def show(table: Table, console: Console | None = None) -> None:
    """Prints a table: no word and no number is broken. On a terminal the columns that fit, and the names of the others;
    into a file or a pipe all of them, in lines as long as they need."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS, highlight=False, color_system=None)
    drawn, left_out = fitted(table, console)
    console.print(drawn, crop=False)
    if table.note:
        console.print(Text(table.note, "dim"))
    if left_out:
        console.print(Text(f"Columns not shown here (see the report): {', '.join(left_out)}.", "dim"))


def fitted(table: Table, console: Console) -> tuple[RichTable, list[str]]:
    """The table with the columns that fit, at least two, and the names of the others."""
    count = len(table.columns)
    drawn = _rich_table(table, count)
    while console.is_terminal and count > 2 and _width(drawn, console) > console.width:
        count -= 1
        drawn = _rich_table(table, count)
    return drawn, table.columns[count:]


def _width(drawn: RichTable, console: Console) -> int:
    """Width of the longest line, which is wider than the console if a column cannot be folded."""
    return max(map(Segment.get_line_length, Segment.split_lines(console.render(drawn))))


def _rich_table(table: Table, count: int) -> RichTable:
    """The first `count` columns of a table. A column is at least as wide as its longest word, or number."""
    drawn = RichTable(title=Text(table.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rows, numeric = cells(table), numeric_columns(table)
    for place, (name, right) in enumerate(zip(table.columns[:count], numeric, strict=False)):
        texts = [row[place] for row in rows]
        words = [*texts, *name.split()] if right else [word for text in (*texts, name) for word in text.split()]
        least = max(map(len, words), default=0)
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


def numeric_columns(table: Table) -> list[bool]:
    """For each column whether it holds numbers, which are aligned to the right."""
    columns = [[row[place] for row in table.rows] for place in range(len(table.columns))]
    return [
        any(isinstance(value, int | float) for value in column)
        and all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column)
        for column in columns
    ]
