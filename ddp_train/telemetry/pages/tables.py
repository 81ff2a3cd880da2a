"""Tables: their cells as text, and how a terminal or a file shows them."""

from __future__ import annotations

import functools
import math
import re
import shutil
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
"""Digits of the median of a column, a leading 0 included.

The other numbers of the column have as many decimals.
"""
MOST_DECIMALS = 6
PIPE_COLUMNS = 10_000
"""Width of a table in a file or a pipe: as wide as it needs."""
FOLDED_COLUMNS = 100
"""Width of a file or a pipe whose lines are folded as a terminal's, unless COLUMNS says another."""
NAME_PARTS = r"\s*[^\s._,]*[._,]+|\s*[^\s._,]+"
"""Parts of a column's name on a narrow terminal: it may be broken behind `.`, `_` and `,` too."""


@dataclass
class Table:
    """A table of a report.

    A cell is a number, text, a bool, or None, which is shown as "-".
    """

    title: str
    columns: list[str]
    """Names of the columns, with the unit."""
    rows: list[list[Any]]
    note: str = ""
    first: Sequence[str] = ()
    """The columns that a page shows at once, the others on demand. Empty: all."""
    best: int | None = None
    """Number of the row that stands out."""
    kept: Sequence[str] = ()
    """The columns that a narrow terminal leaves out last, the last of them first.

    The first column always stays.
    """


# --- cells ----------------------------------------------------------------------------------------


class Column:
    """A column of a table."""

    def __init__(self, name: str, values: list[Any]) -> None:
        self.name = name
        self.values = values

    @property
    def is_numeric(self) -> bool:
        """True for a column of numbers, which are aligned to the right."""
        known = [value for value in self.values if value is not None]
        return bool(known) and all(map(_is_number, known))

    @functools.cached_property
    def texts(self) -> list[str]:
        """The text of each cell: all numbers have as many decimals as their median needs."""
        sizes = []
        for value in self.values:
            if isinstance(value, float) and math.isfinite(value) and value:
                sizes.append(abs(value))
        spec = _number_format(sizes)
        return [_cell(value, spec) for value in self.values]


def columns_of(table: Table) -> list[Column]:
    """The columns of a table."""
    columns = []
    for place, name in enumerate(table.columns):
        columns.append(Column(name, [row[place] for row in table.rows]))
    return columns


def cells(table: Table) -> list[list[str]]:
    """The text of each cell, by rows."""
    texts = [column.texts for column in columns_of(table)]
    return [list(row) for row in zip(*texts, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_format(sizes: Sequence[float]) -> str:
    """The format of the numbers of a column.

    sizes: absolute values of those that are not 0.
    """
    if not sizes:
        sizes = [1.0]
    largest = max(sizes)
    if largest < 1e-3 or (min(sizes) < 1e-4 and largest < 1):
        return ".1e"
    power = math.floor(math.log10(statistics.median_high(sizes)))
    decimals = DIGITS - 1 - power
    if power < 0:
        decimals -= 1
    return f",.{min(max(0, decimals), MOST_DECIMALS)}f"


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return NOTHING
    if value == 0:
        return "0"
    text = format(value, spec)
    if text.strip("-0.,"):
        return text
    return f"{value:.1e}"  # too small for the decimals of its column, but not 0


# --- the terminal ---------------------------------------------------------------------------------


def show(table: Table, console: Console | None = None, in_blocks: bool = False) -> None:
    """Print a table. No word and no number is broken.

    A terminal shows the columns that fit, and the names of the others; a file or a pipe gets all
    of them, in lines as long as they need.

    in_blocks: all columns on a terminal too, below each other.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS, highlight=False, color_system=None)
    blocks = [table]
    if in_blocks:
        blocks = [*_blocks(table, console)]
    left_out: list[str] = []
    for block in blocks:
        drawn, left_out = fitted(block, console)
        console.print(drawn, crop=False)
    if table.note:
        tell([table.note], console, "dim")
    if left_out:
        tell([f"Columns not shown here (see the report): {', '.join(left_out)}."], console, "dim")


def folding_console() -> Console:
    """Standard output, which counts as a terminal where it is a file or a pipe too."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    width = shutil.get_terminal_size((FOLDED_COLUMNS, 0)).columns
    return Console(
        file=console.file, width=width, force_terminal=True, color_system=None, highlight=False
    )


def tell(sentences: Sequence[str], console: Console | None = None, style: str = "") -> None:
    """Print each sentence in lines of its own; on a terminal they are broken between words."""
    console = console or Console(highlight=False)
    width = console.width if console.is_terminal else PIPE_COLUMNS
    for sentence in sentences:
        lines = textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)
        console.print(Text("\n".join(lines), style), soft_wrap=True)


def fitted(table: Table, console: Console, one_line: bool = False) -> tuple[RichTable, list[str]]:
    """The table with the columns that fit, at least two, and the names of the others.

    The rightmost columns are left out first, those of `Table.kept` last.

    one_line: break no text, so that each row takes one line.
    """
    drawn = _rich_table(table, one_line)
    if not console.is_terminal or width_of(drawn, console) <= console.width:
        return drawn, []
    drawn = _rich_table(table, one_line, is_narrow=True)
    names = table.columns[1:]
    kept = [name for name in table.kept if name in names]
    others = [name for name in names if name not in kept]
    by_worth = [*kept, *others]
    left_out: list[str] = []
    while len(by_worth) > 1 and width_of(drawn, console) > console.width:
        left_out.append(by_worth.pop())
        drawn = _rich_table(without(table, left_out), one_line, is_narrow=True)
    return drawn, [name for name in names if name in left_out]


def width_of(drawn: RichTable, console: Console) -> int:
    """Width of the longest line; more than the console's if a column cannot be folded."""
    return max(map(Segment.get_line_length, Segment.split_lines(console.render(drawn))))


def without(table: Table, names: Sequence[str]) -> Table:
    """The table without some of its columns."""
    places = [place for place, name in enumerate(table.columns) if name not in names]
    columns = [table.columns[place] for place in places]
    rows = [[row[place] for place in places] for row in table.rows]
    return replace(table, columns=columns, rows=rows)


def _blocks(table: Table, console: Console) -> Iterator[Table]:
    """The first column with as many of the others as fit, then with the next ones."""
    rest = table.columns[1:]
    title = table.title
    while rest:
        count = len(rest)
        block = without(table, [name for name in table.columns[1:] if name not in rest])
        while count > 1 and fitted(block, console)[1]:
            count -= 1
            block = without(block, rest[count:])
        yield replace(block, title=title)
        rest = rest[count:]
        title = ""


def _rich_table(table: Table, one_line: bool = False, is_narrow: bool = False) -> RichTable:
    """A table whose columns are at least as wide as their longest word, or number.

    is_narrow: names may take several lines, see NAME_PARTS.
    """
    title = Text(table.title, "bold") if table.title else None
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns_of(table):
        words = column.texts
        if not column.is_numeric and not one_line:
            words = " ".join(words).split()
        parts = column.name.split()
        if is_narrow:
            parts = [part.strip() for part in re.findall(NAME_PARTS, column.name)]
        width = max(map(len, [*words, *parts]), default=0)
        drawn.add_column(
            Text(_in_lines(column.name, width) if is_narrow else column.name),
            justify="right" if column.is_numeric else "left",
            min_width=width,
            overflow="fold",
        )
    for row in cells(table):
        drawn.add_row(*map(Text, row))
    return drawn


def _in_lines(name: str, width: int) -> str:
    """The name of a column in lines of a width that holds its longest part."""
    lines = [""]
    for part in re.findall(NAME_PARTS, name):
        if len(lines[-1] + part) <= width:
            lines[-1] += part
        else:
            lines.append(part.strip())
    return "\n".join(lines).strip()
