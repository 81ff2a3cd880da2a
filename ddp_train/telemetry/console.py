"""The terminal of rank 0: the plan, the progress bar, a line per epoch, the summary. Torch-free."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from ddp_train.telemetry.summary_lines import checkpoint_line, summary_lines

REFRESHES_PER_SECOND = 4
"""Drawing the bar takes some milliseconds of Python, in a thread of its own: rich's ten times a
second are too many."""
LABEL = "training"
"""Text before the bar, where there is room for it."""
OTHER_LETTERS = len(" ----   100:00:00 left")
"""Width of all but the numbers, with the shortest bar."""
LINE_SECONDS = 30.0
"""Least time between two lines of progress where there is no terminal."""
log = logging.getLogger(__name__)


class Display:
    """The terminal of rank 0; on all other ranks it does nothing. Its lines go to the log too."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.console = Console(highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.numbers = ""
        """Text beside the bar."""
        self.steps = 0
        self.first_step = 0
        self.start_time = time.monotonic()
        self.line_time = self.start_time

    def plan(self, rows: dict[str, str]) -> None:
        """Show what is about to happen."""
        if not self.active:
            return
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(Text.assemble((f"{name:<{width}}  ", "bold"), value))
            log.info("%s: %s", name, value)

    def start(self, steps: int, steps_done: Callable[[], int]) -> None:
        """Show the progress bar, where there is a terminal.

        steps: number of optimizer steps of the run.
        steps_done: is called four times a second.
        """
        self.steps = steps
        self.first_step = steps_done()
        self.start_time = time.monotonic()
        self.line_time = self.start_time
        if self.active and self.console.is_terminal:
            self.bar = ProgressBar(self, steps_done)
            self.bar.add_task(LABEL, total=steps, completed=steps_done(), numbers="")
            self.bar.start()

    def interval(self, step: int, numbers: str) -> None:
        """Show the numbers of a logging interval.

        They appear beside the bar, or, without a terminal, in a line every half a minute, for the
        log of a batch job.
        """
        self.numbers = numbers
        now = time.monotonic()
        if not self.active or self.bar or now - self.line_time < LINE_SECONDS:
            return
        seconds_per_step = (now - self.start_time) / max(1, step - self.first_step)
        left = timedelta(seconds=round(seconds_per_step * (self.steps - step)))
        self.line(f"step {step:,}/{self.steps:,}  {numbers}  {left} left")

    def line(self, text: str) -> None:
        """Show a line that stays."""
        self.line_time = time.monotonic()
        if self.active:
            self.console.print(text, markup=False)
            log.info("%s", text)

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar:
            self.bar.stop()
            self.bar = None

    def checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Show the checkpoint that is evaluated, see `checkpoint_line`."""
        self.line(checkpoint_line(checkpoint))

    def summary(self, summary: dict[str, Any], run_dir: Path, to_resume: str) -> None:
        """Show the end of a run, or of its part until it was stopped, see `summary_lines`."""
        for line in summary_lines(summary, run_dir, to_resume):
            self.line(line)


class ProgressBar(Progress):
    """A bar that reads the step itself, from rich's thread: training neither waits nor calls."""

    def __init__(self, display: Display, steps_done: Callable[[], int]) -> None:
        self.display = display
        self.steps_done = steps_done
        columns: tuple[ProgressColumn, ...] = (
            TextColumn("[bold]{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
        )
        super().__init__(
            *columns,
            refresh_per_second=REFRESHES_PER_SECOND,
            console=display.console,
            transient=True,
            expand=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        count = f"{self.display.steps}/{self.display.steps}"
        width = self.display.console.width - OTHER_LETTERS - len(count)
        label, numbers = fitting(self.display.numbers, width)
        for task in self.task_ids:
            self.update(task, completed=self.steps_done(), description=label, numbers=numbers)
        return super().get_renderables()


def fitting(numbers: str, width: int) -> tuple[str, str]:
    """The label before the bar and the numbers beside it, as many as fit whole, the first ones."""
    while numbers and len(numbers) > width:
        numbers = numbers.rpartition("  ")[0].rstrip()
    if len(LABEL + numbers) <= width:
        return LABEL, numbers
    return "", numbers
