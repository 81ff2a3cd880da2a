"""Reports a failure: failure.json, one FATAL line, and the traceback or stack of the first rank
that failed."""

from __future__ import annotations

import functools
import json
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ddp_train.errors import LaunchError
from ddp_train.linux import wait_until
from ddp_train.resilience.failure import Failure
from ddp_train.resilience.stdio import TolerantStream
from ddp_train.resilience.whole_files import create_json, write_json
from ddp_train.text import counted

FILE = "failure.json"
EARLIER = "failures.jsonl"
"""A line for each failure that a restart, or a later start, has left behind."""
SUMMARY = "summary.json"
REPORT_POLL_SECONDS = 0.05
FRAME = '  File "'
"""The beginning of a line of a stack, as faulthandler writes it."""
MOST_FRAMES = 8
"""Calls in the user's code that the terminal shows; a recursion has more."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The lines that the terminal shows of a failure."""

    failure: Failure
    trace: str = ""
    """The text of `traceback_of` or `stack_of`."""

    def print(self, is_fatal: bool = True, stream: TextIO | TolerantStream | None = None) -> None:
        """Print the trace, the headline and the remedy.

        is_fatal: False if the run continues without loss.
        stream: the user's terminal; None: standard error, unless that was redirected into a log
            file.
        """
        out = stream or sys.stderr
        word = "FATAL" if is_fatal else "LOST"
        out.write(self.trace + headline(self.failure, word) + "\n")
        out.flush()


def headline(failure: Failure, word: str = "FATAL") -> str:
    """The line that begins with `word`, followed by the remedy and the log file."""
    place = failure.host
    if failure.rank is not None:
        place = f"rank {failure.rank} on {failure.host}"
    if failure.step is not None:
        place += f", step {failure.step}"
    lines = [
        f"{word} {failure.kind} ({place}, {failure.phase}): {failure.detail}",
        f"  remedy: {failure.remedy}",
    ]
    if failure.log:
        lines.append(f"  log: {failure.log}")
    return "\n".join(lines)


def report(run_dir: Path, failure: Failure, run_facts: dict[str, Any]) -> bool:
    """Record a failure and print it on standard error.

    Returns False if another process has recorded one: nothing is printed then. For the parameters
    see `record`.
    """
    is_first = record(run_dir, failure, run_facts)
    if is_first:
        Report(failure).print()
    return is_first


def record(run_dir: Path, failure: Failure, run_facts: dict[str, Any]) -> bool:
    """Write failure.json and summary.json.

    run_facts: further fields of summary.json.

    Returns False if another process has written them. Where they cannot be written the failure
    counts as recorded, and is to be printed.
    """
    try:
        create_json(run_dir / FILE, asdict(failure))
        write_json(run_dir / SUMMARY, {"status": "failed", **run_facts, "steps": failure.step})
    except FileExistsError:
        return False
    except OSError as error:  # the disk is full or the directory gone
        log.error("%s cannot be written: %s", run_dir / FILE, error)
    return True


def set_aside(run_dir: Path) -> None:
    """Move the failure of an earlier attempt, if there is one, from failure.json to failures.jsonl.

    Of several hosts that do so one adds the line. A line that cannot be written is logged. Raises
    OSError if failure.json cannot be removed.
    """
    path = run_dir / FILE
    try:
        moment = path.stat().st_mtime
        text = path.read_text(errors="replace")
        path.unlink()
    except FileNotFoundError:
        return
    try:
        line = {"time": moment, **json.loads(text)}
    except (ValueError, TypeError):  # it is damaged
        line = {"time": moment, "damaged": text}
    append_to_log(run_dir / EARLIER, [json.dumps(line)])


def recorded_failure(run_dir: Path) -> Failure:
    """The failure of a run.

    Raises OSError if there is none, ValueError or TypeError if its file is damaged.
    """
    return Failure(**json.loads((run_dir / FILE).read_text()))


def wait_for_report(run_dir: Path, seconds: float, reported_code: Callable[[], int] = int) -> bool:
    """Wait for failure.json, so that a worker with a peer error lets the failing rank report first.

    seconds: the longest wait.
    reported_code: returns a number other than 0 once a failure was reported that could not be
        written.

    Returns whether a failure was reported.
    """
    return wait_until(
        lambda: (run_dir / FILE).exists() or reported_code(), seconds, REPORT_POLL_SECONDS
    )


def append_to_log(log_file: Path, lines: Sequence[str]) -> None:
    """Append to the log of a process that cannot write it itself, perhaps because it has not begun
    one."""
    try:
        log_file.parent.mkdir(exist_ok=True)
        with log_file.open("a") as file:
            file.write("\n".join([*lines, ""]))
    except OSError as error:
        log.error("%s cannot be written: %s", log_file, error)


# --- the text above the headline ------------------------------------------------------------------


def stack_of(rank: int, lines: Sequence[str], whole: Path) -> str:
    """The stack of a process that could not raise, and those of its loader processes.

    Of each the calls in the user's own code, and the innermost one. Empty without lines.

    lines: of all stacks, those of the loader processes each under a line that names it.
    whole: the file that has them all.
    """
    if not lines:
        return ""
    shown = [f"stack of rank {rank} (most recent call last):"]
    block: list[str] = []
    for line in lines:
        if not line.startswith(FRAME):
            shown += _own_frames(block)
            shown.append(line)
            block = []
        else:
            block.append(line)
    shown += _own_frames(block)
    left_out = len(lines) + 1 - len(shown)
    if left_out:
        shown.append(f"({counted(left_out, 'frame')} left out; all are in {whole})")
    return "\n".join([*shown, ""])


def _own_frames(frames: Sequence[str]) -> list[str]:
    """The last calls in the user's own code, and the innermost call of all."""
    kept = [frame for frame in frames[:-1] if not is_foreign(_file_of(frame))]
    shown = [*kept[-MOST_FRAMES:], *frames[-1:]]
    return [_with_short_path(frame) for frame in shown]


def _file_of(frame: str) -> str:
    return frame.removeprefix(FRAME).partition('"')[0]


def _with_short_path(frame: str) -> str:
    """A frame whose file is named from the working folder, if it lies in there."""
    file = Path(_file_of(frame))
    here = Path.cwd()
    if not file.is_relative_to(here):
        return frame
    return frame.replace(str(file), str(file.relative_to(here)), 1)


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception; empty for errors with a known cause.

    Where the exception came by the user's own code, it has only those frames and the one that
    raised: the log has them all.
    """
    if isinstance(error, LaunchError):
        return ""
    whole = traceback.TracebackException.from_exception(error)
    left_out = 0
    part: traceback.TracebackException | None = whole
    while part:
        left_out += _leave_out_libraries(part)
        context = part.__context__
        if part.__suppress_context__:
            context = None
        part = part.__cause__ or context
    text = "".join(whole.format())
    if left_out:
        text += f"({counted(left_out, 'frame')} of libraries left out; the log has them)\n"
    return text


def _leave_out_libraries(part: traceback.TracebackException) -> int:
    """Remove the frames of libraries but the one that raised, if there are frames of the user's.

    Returns their number.
    """
    frames = list(part.stack)
    kept = [frame for frame in frames if not is_foreign(frame.filename)]
    if not kept:
        return 0
    if kept[-1] is not frames[-1]:
        kept.append(frames[-1])
    part.stack = traceback.StackSummary.from_list(kept)
    return len(frames) - len(kept)


@functools.cache
def is_foreign(filename: str) -> bool:
    """True for a frame's file that is part of these packages, of Python or of a library."""
    if filename.startswith("<"):
        return True
    path = Path(filename)
    if {"site-packages", "dist-packages"} & {*path.parts}:  # the user's own too, those of a .pth
        return True
    checkout = Path(__file__).parents[2]
    ours = (checkout / "ddp_train", checkout / "ddp_lab")
    places = ("stdlib", "platstdlib", "purelib", "platlib")
    foreign = (*ours, *map(sysconfig.get_path, places))
    return any(path.is_relative_to(folder) for folder in foreign)
