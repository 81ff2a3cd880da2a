"""What a person watches: the plan, the progress bar, a line per epoch, the summary. Only rank 0
speaks."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
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

from ddp_train.telemetry.figures import summary_line
from ddp_train.telemetry.rates import in_words
from ddp_train.telemetry.score_lines import headline, score_line, shown_metric
from ddp_train.text import counted

REFRESHES_PER_SECOND = 4
"""Drawing the bar takes some milliseconds of Python, in a thread of its own: rich's ten times a
second are too many."""
LABEL = "training"
OTHERS = len(" ----   100:00:00 left")
"""What stands before the bar, and how wide all else is but the numbers, with a bar as short as it
may be."""
LINE_SECONDS = 30.0
"""The least time between two lines of progress where there is no terminal."""
log = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A log whose disk may be full: said once where the user reads, not with a traceback per
    line."""

    lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.lost:
            self.lost = True  # before the warning, which comes by here too
            log.warning(
                "%s cannot be written: %s; training continues", self.baseFilename, sys.exc_info()[1]
            )


def start_logging(log_file: Path, rank: int, to_terminal: bool) -> None:
    """Sends this process's log to its own file, and what it prints too, unless it may use the
    terminal."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(log_file)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [handler]
    if to_terminal:
        seen = logging.StreamHandler()
        seen.setFormatter(logging.Formatter("warning: %(message)s"))
        # Ours alone: failures have their own report, and what torch warns of is for the log.
        seen.addFilter(
            lambda record: record.levelno == logging.WARNING and record.name.startswith("ddp_train")
        )
        handlers.append(seen)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # The first convolution of grey images, [n, 1, 3, 3]: a stride in a dimension of size 1 means
    # nothing, and no byte lies elsewhere.
    warnings.filterwarnings(
        "ignore", r"(?s)Grad strides do not match bucket view strides.*sizes\(\) = \[\d+, 1, "
    )
    if not to_terminal:
        redirect_streams(log_file)


def redirect_streams(log_file: Path) -> None:
    """Sends what this process prints to a file that is there."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log_file, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):  # below Python: C libraries print too
        os.dup2(file, stream)


class Display:
    """The terminal of rank 0; on all other ranks it does nothing. The same lines go to the log."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.console = Console(highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.numbers = ""
        """What stands beside the bar."""
        self.steps = self.first_step = 0
        self.began = self.last_line = time.monotonic()

    def plan(self, rows: dict[str, str]) -> None:
        """What is about to happen."""
        if self.active:
            width = max(map(len, rows))
            for name, value in rows.items():
                self.console.print(Text.assemble((f"{name:<{width}}  ", "bold"), value))
                log.info("%s: %s", name, value)

    def start(self, steps: int, steps_done: Callable[[], int]) -> None:
        """Shows the progress bar, where there is a terminal to show it on. steps_done: is read four
        times a second."""
        self.steps = steps
        self.first_step = steps_done()
        self.began = self.last_line = time.monotonic()
        if self.active and self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(None),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                TextColumn("left"),
            )
            self.bar = _Bar(
                self, steps_done, *columns, console=self.console, transient=True, expand=True
            )
            self.bar.add_task(LABEL, total=steps, completed=steps_done(), numbers="")
            self.bar.start()

    def interval(self, step: int, numbers: str) -> None:
        """The numbers of a logging interval: beside the bar; without a terminal a line every half a
        minute, for the log of a batch job."""
        self.numbers = numbers
        now = time.monotonic()
        if self.active and not self.bar and now - self.last_line >= LINE_SECONDS:
            seconds_left = (now - self.began) / max(1, step - self.first_step) * (self.steps - step)
            self.line(
                f"step {step:,}/{self.steps:,}  {numbers}  {timedelta(seconds=round(seconds_left))}"
                " left"
            )

    def line(self, text: str) -> None:
        """A line that stays."""
        self.last_line = time.monotonic()
        if self.active:
            self.console.print(text, markup=False)
            log.info("%s", text)

    def stop(self) -> None:
        """Takes the bar away."""
        if self.bar:
            self.bar.stop()
            self.bar = None

    def checkpoint(self, found: dict[str, Any]) -> None:
        """Which one is evaluated. found: see `checkpoint.described`."""
        which = {
            "best": f", the best of its run by {found['metric']}",
            "last": ", the last of its run",
        }
        text = f"checkpoint {found['path']}: step {found['step']:,}{which.get(found['which'], '')}"
        if found["metric"]:
            text += f", {shown_metric(found['metric'].partition('.')[2], found['value'])}"
        self.line(text)

    def summary(self, summary: dict[str, Any], run_dir: Path, to_resume: str) -> None:
        """The end of a run, or of its part until it was stopped. to_resume: what to type then."""
        if written := summary.get("predictions"):
            columns = ", ".join(
                name + (f" {shape}" if shape else "") for name, shape in written["columns"].items()
            )
            samples = counted(written["samples"], "sample")
            self.line(
                f"predictions for {samples} of {written['split']} in {written['file']}: {columns}"
            )
            return
        if exported := summary.get("export"):
            for one in exported.values():
                self.line(
                    f"{one['file']}: differs from the model by {one['largest_difference']:.1g} at"
                    " most"
                )
            return
        test = summary["test"]
        if summary["status"] == "preempted":
            self.line(f"stopped after step {summary['steps']:,} and saved; resume with {to_resume}")
            return
        if early := summary.get("stopped_early"):
            self.line(f"stopped early after step {early['step']:,}: {early['reason']}")
        if validation := summary.get("validation"):
            self.line(f"validation {score_line(validation)}")
        self.line(f"test {score_line(test)}")
        best = summary.get("best") or {}
        if best.get("test"):
            value = shown_metric(best["metric"].partition(".")[2], best["value"])
            self.line(
                f"best {best['metric']} {value} after step {best['step']:,}: test"
                f" {score_line(best['test'])}"
            )
        if summary.get("samples_per_second"):
            overall = (
                f"({summary['samples_per_second_with_evaluation']:,.0f} samples/s with evaluation)"
            )
            steps = counted(summary["steps"], "step")
            self.line(f"{in_words(summary)} {overall}, {steps}, {summary['seconds']:.1f} s")
        if gpus := summary_line(summary.get("figures", {})):
            self.line(gpus)
        self.line(f"run directory {run_dir}")


class _Bar(Progress):
    """Reads the step itself, from rich's own thread: training does not wait for it, and calls
    nothing."""

    def __init__(
        self,
        display: Display,
        steps_done: Callable[[], int],
        *columns: ProgressColumn,
        **options: Any,
    ) -> None:
        self.display = display
        self.steps_done = steps_done
        super().__init__(*columns, refresh_per_second=REFRESHES_PER_SECOND, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        room = (
            self.display.console.width - OTHERS - len(f"{self.display.steps}/{self.display.steps}")
        )
        label, numbers = fitting(self.display.numbers, room)
        for task in self.task_ids:
            self.update(task, completed=self.steps_done(), description=label, numbers=numbers)
        return super().get_renderables()


def fitting(numbers: str, room: int) -> tuple[str, str]:
    """What stands before the bar, and the numbers beside it: of those that do not fit, the last are
    left out whole."""
    while len(numbers) > room and numbers:
        numbers = numbers.rpartition("  ")[0].rstrip()
    return LABEL * (len(LABEL + numbers) <= room), numbers


def epoch_line(
    epoch: int,
    epochs: int,
    steps: str,
    loss: float | None,
    score: tuple[str, dict[str, Any]] | None,
    seconds: float,
    samples: int,
) -> str:
    """`epoch  3/20  loss 0.1234  test 97.50 %  1.2 s  1,234 samples/s`. steps: of an epoch that is
               cut short. score:
    the name of the split, and what `Score.as_dict` gives."""
    parts = [f"epoch {epoch:>{len(str(epochs))}}/{epochs}", *([steps] if steps else [])]
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    if score:
        parts.append(f"{score[0]} {headline(score[1])}")
    return "  ".join([*parts, f"{seconds:.1f} s", f"{samples / seconds:,.0f} samples/s"])
