"""Tables: their cells as text, and how a terminal or a file shows them."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "-"
DIGITS = 4
"""Digits of the median of a column, a leading 0 included; the other numbers have as many
decimals."""
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
    """Column names include the unit. A cell is a number, text, a bool, a Link, or None, which is
    shown as "-"."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""
    first: Sequence[str] = ()
    """The columns that a page shows at once; the others on demand. Empty: all."""
    best: int | None = None
    """The row that stands out."""
    kept: Sequence[str] = ()
    """The columns that a narrow terminal leaves out last, the last of them first. Not the first
    column, which stays."""


def show(table: Table, console: Console | None = None, in_blocks: bool = False) -> None:
    """Prints a table: no word and no number is broken. On a terminal the columns that fit, and the
    names of the others, or in_blocks, all of them below each other; into a file or a pipe all of
    them, in lines as long as they need."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS, highlight=False, color_system=None)
    tables, left_out = ([*_blocks(table, console)], []) if in_blocks else ([table], [])
    for part in tables:
        drawn, left_out = fitted(part, console)
        console.print(drawn, crop=False)
    tell([table.note] if table.note else [], console, "dim")
    if left_out:
        tell([f"Columns not shown here (see the report): {', '.join(left_out)}."], console, "dim")


def tell(sentences: Sequence[str], console: Console | None = None, style: str = "") -> None:
    """Prints sentences, each in lines of its own; on a terminal they are broken between words."""
    console = console or Console(highlight=False)
    for text in sentences:
        width = console.width if console.is_terminal else PIPE_COLUMNS
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        console.print(Text("\n".join(lines), style), soft_wrap=True)


def _blocks(table: Table, console: Console) -> Iterator[Table]:
    """The first column with as many of the others as fit, then with the next ones."""
    left = [*range(1, len(table.columns))]
    title = table.title
    while left:
        count = len(left)
        while count > 1 and fitted(_part(table, [0, *left[:count]]), console)[1]:
            count -= 1
        yield replace(_part(table, [0, *left[:count]]), title=title)
        left = left[count:]
        title = ""


def _part(table: Table, places: Sequence[int]) -> Table:
    """Of a table, some columns."""
    rows = [[row[place] for place in places] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in places], rows=rows)


def fitted(table: Table, console: Console, one_line: bool = False) -> tuple[RichTable, list[str]]:
    """The table with the columns that fit, at least two, and the names of the others. The rightmost
    are left out first, those to be kept last. one_line: each row takes one."""
    places = [*range(len(table.columns))]
    drawn = _rich_table(table, one_line)
    if not console.is_terminal or width_of(drawn, console) <= console.width:
        return drawn, []
    drawn = _rich_table(table, one_line, narrow=True)
    others = [place for place in reversed(places[1:]) if table.columns[place] not in table.kept]
    by_worth = [
        *others,
        *(table.columns.index(name) for name in reversed(table.kept) if name in table.columns),
    ]
    for place in by_worth[:-1]:
        if width_of(drawn, console) <= console.width:
            break
        places.remove(place)
        drawn = _rich_table(_part(table, places), one_line, narrow=True)
    return drawn, [name for place, name in enumerate(table.columns) if place not in places]


def width_of(drawn: RichTable, console: Console) -> int:
    """Width of the longest line, which is wider than the console if a column cannot be folded."""
    return max(map(Segment.get_line_length, Segment.split_lines(console.render(drawn))))


def _rich_table(table: Table, one_line: bool = False, narrow: bool = False) -> RichTable:
    """A column is at least as wide as its longest word, or number. narrow: names are broken behind
    `.`, `_` and `,` too."""
    title = Text(table.title, "bold") if table.title else None
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rows = cells(table)
    numeric = numeric_columns(table)
    for place, (name, right) in enumerate(zip(table.columns, numeric, strict=True)):
        texts = [row[place] for row in rows]
        if right or one_line:
            words = texts
        else:
            words = [word for text in texts for word in text.split()]
        parts = re.findall(r"[^\s._,]*[._,]+|[^\s._,]+", name) if narrow else name.split()
        least = max(map(len, [*words, *parts]), default=0)
        drawn.add_column(
            Text(_in_lines(name, least) if narrow else name),
            justify="right" if right else "left",
            min_width=least,
            overflow="fold",
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _in_lines(name: str, width: int) -> str:
    """A column's name in lines of a width that holds its longest part."""
    lines = [""]
    for part in re.findall(r"\s*[^\s._,]*[._,]+|\s*[^\s._,]+", name):
        if len(lines[-1] + part) <= width:
            lines = [*lines[:-1], lines[-1] + part]
        else:
            lines = [*lines, part.strip()]
    return "\n".join(lines).strip()


# --- cells ----------------------------------------------------------------------------------------


def cells(table: Table) -> list[list[str]]:
    """The text of each cell: all numbers of a column have the same decimals, as many as its median
    needs."""
    shown = [_column([row[place] for row in table.rows]) for place in range(len(table.columns))]
    return [list(row) for row in zip(*shown, strict=True)]


def _column(values: Sequence[Any]) -> list[str]:
    sizes = [
        abs(value)
        for value in values
        if isinstance(value, float) and math.isfinite(value) and value
    ]
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
        # It may be too small for the decimals of its column, but not 0.
        return rounded if rounded.strip("-0.,") else f"{value:.1e}"
    return str(value)


def numeric_columns(table: Table) -> list[bool]:
    """For each column whether it holds numbers, which are aligned to the right."""
    columns = [[row[place] for row in table.rows] for place in range(len(table.columns))]
    return [
        any(isinstance(value, int | float) for value in column)
        and all(
            value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            for value in column
        )
        for column in columns
    ]
