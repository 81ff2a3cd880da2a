"""Reports a failure: failure.json, one FATAL line, and the traceback or stack of the first rank
that failed."""

from __future__ import annotations

import errno
import json
import logging
import re
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ddp_train.errors import HangError, LaunchError, NonFiniteLossError, is_out_of_memory
from ddp_train.linux import wait_until
from ddp_train.resilience.hang_detector import STOPPED, Hang
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.stdio import TolerantStream
from ddp_train.resilience.whole_files import create_json, write_json
from ddp_train.text import counted, first_line

FILE = "failure.json"
SUMMARY = "summary.json"
REPORT_POLL_SECONDS = 0.05
SHOWN_SAMPLES = 20
"""Samples of a lost batch that a failure names."""
log = logging.getLogger(__name__)

_PEER_ERRORS = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "remote process exited",
    "nccl communicator was aborted",
    "connection was likely closed",
    "recvvalue failed",
    "sendbytes failed",
    "connection closed",
    "failed to recv",
    "pair closure",
)
"""What gloo, NCCL and the store raise in the surviving ranks when a peer is gone: never the cause
of a failure."""


@dataclass(frozen=True)
class Failure:
    """The content of failure.json."""

    kind: str
    rank: int | None
    """None if no worker had started."""
    host: str
    step: int | None
    phase: str
    detail: str
    remedy: str
    log: str
    exit_code: int


def is_peer_error(error: BaseException) -> bool:
    """Whether an error only means that another process is gone.

    An OSError comes from a connection of the user's code, as of a data set behind a server; torch
    raises RuntimeErrors.
    """
    text = str(error).lower()
    return (
        any(peer_error in text for peer_error in _PEER_ERRORS)
        and not isinstance(error, LaunchError | OSError)
        and "in dataloader worker process" not in text
        and not _is_lost_batch(error)
    )


def _is_lost_batch(error: BaseException) -> bool:
    """Whether a loader process died after it had announced a batch, so that the batch's memory
    cannot be opened."""
    return _came_by(error, "torch/multiprocessing/reductions.py")


def _came_by(error: BaseException, file: str) -> bool:
    return any(frame.filename.endswith(file) for frame in traceback.extract_tb(error.__traceback__))


def is_timeout(error: BaseException) -> bool:
    """Whether a peer error is a time-out, after which the peer may still be alive, and not a broken
    connection."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


@dataclass(frozen=True)
class _Cause:
    """What an exception means."""

    kind: str
    detail: str
    remedy: str
    exit_code: int = LaunchError.exit_code


def failure_from(
    error: BaseException, rank: int, status: RankStatus, log_file: Path, sizes: str
) -> Failure:
    """The Failure for an exception that ended a worker.

    sizes: the memory of each process of this host, as text.
    """
    cause = _cause_of(error, status, sizes)
    remedy = cause.remedy
    for pattern, known_remedy in _LIMITS.items():
        if re.search(pattern, cause.detail):
            remedy = known_remedy
            break
    step = status.step
    if isinstance(error, NonFiniteLossError):
        step = error.step  # a GPU's is found out later
    return Failure(
        kind=cause.kind,
        rank=rank,
        host=socket.gethostname(),
        step=step,
        phase=status.phase,
        detail=cause.detail,
        remedy=remedy,
        log=str(log_file),
        exit_code=cause.exit_code,
    )


def _cause_of(error: BaseException, status: RankStatus, sizes: str) -> _Cause:
    text = str(error).strip()
    if isinstance(error, LaunchError):
        return _Cause(error.kind, str(error), error.remedy, error.exit_code)
    if isinstance(error, SystemExit):
        detail = f"sys.exit({error.code!r}) was called"
        return _Cause("exit", detail, "do not call sys.exit() in a worker; raise an exception")
    if is_peer_error(error):
        # What follows are gloo's guesses.
        message = first_line(error).partition(" This is typically caused by")[0]
        detail = f"another process is gone: {message}"
        return _Cause("peer", detail, "the cause is in the log of the rank that exited first")
    if is_out_of_memory(error):
        detail = f"{_detail_of(error)}; memory at that time: {sizes}"
        return _Cause("oom", detail, _LESS_MEMORY)
    if text.startswith("DataLoader worker (pid") or _is_lost_batch(error):
        return _cause_of_dead_loader(error, status)
    remedy = "see the traceback"
    if isinstance(error, RuntimeError) and re.search(_OTHER_NUMBER_TYPE, text):
        remedy = (
            "give the model the number type of its weights: return float32 inputs (numpy's default"
            " is float64)"
        )
    if "in DataLoader worker process" in text:  # the message contains that process's traceback
        *_, error_line, note = text.splitlines()
        detail = f"{error_line} {note}" if note.startswith("(sample ") else note
        return _Cause("exception", detail, remedy)
    return _Cause("exception", _detail_of(error), remedy)


def _detail_of(error: BaseException) -> str:
    """Type, message and notes of an exception. A note says which sample it was, for one."""
    notes = getattr(error, "__notes__", [])
    detail = " ".join([f"{type(error).__name__}: {str(error).strip()}", *notes])
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if is_full and _came_by(error, "multiprocessing/synchronize.py"):
        detail += " in /dev/shm"
    return detail


def _cause_of_dead_loader(error: BaseException, status: RankStatus) -> _Cause:
    """torch raises "DataLoader worker (pid ..." wherever the main thread is. A batch that is lost
    with its process is a broken connection, whose cause is that error if torch has seen it."""
    message = str(error.__cause__ or "").strip()
    if not message.startswith("DataLoader worker (pid"):
        message = str(error).strip()
    first = message.splitlines()[0] if message else type(error).__name__
    detail = f"a loader process died: {first}"
    if status.fetching:
        samples = status.fetching[0].indices.tolist()
        detail += f"; the next batch was samples {samples[:SHOWN_SAMPLES]}"
    remedy = "with tuning.num_workers=0 an error of the data set is raised in the rank itself"
    if "signal: Killed" in message:
        remedy = f"{_LESS_MEMORY}; {remedy}"
    return _Cause("data_worker", detail, remedy)


_OTHER_NUMBER_TYPE = (
    r"the same dtype|share same datatype|Input type \((?!float|torch\.(cuda\.)?Float).*\) and"
    r" (weight|bias) type"
)
"""What torch says of inputs whose number type is not that of the weights."""
_LIMITS = {
    "Too many open files": "raise the limit of open files before the start: ulimit -n 65536",
    r"memory\(shm\)|/torch_\d+_\d+.*No space| in /dev/shm|signal: Bus": (
        "enlarge /dev/shm, through which loader "
        "processes pass their batches: docker run --shm-size=8g; or use tuning.num_workers=0"
    ),
    "Expected more than 1 value per channel": (
        "batch norm cannot train on one sample, which a process has here, as in an epoch's last"
        " batch: change train.global_batch_size, or the norm; list frozen layers in model.freeze"
    ),
}
"""Limits of the host and of torch: patterns of their messages, and remedies."""
_LESS_MEMORY = (
    "lower train.global_batch_size or raise train.accumulation_steps; to save host memory, also"
    " lower tuning.num_workers or tuning.prefetch_factor"
)


def failure_from_exit(
    returncode: int, rank: int, status: RankStatus, log_file: Path, oom_killed: bool, sizes: str
) -> Failure:
    """The Failure for a worker that ended without a report of its own.

    returncode: as subprocess gives it, negative for a signal. oom_killed: whether the kernel's OOM
    killer has killed a process during the attempt. sizes: as in `failure_from`.
    """
    if returncode < 0:
        cause = _cause_of_signal(-returncode, log_file, oom_killed, sizes)
    else:
        detail = f"the process exited with code {returncode} before the run was done"
        remedy = f"see {log_file}"
        if returncode != 1:  # 1: a traceback before the worker could report
            remedy = "a worker must not exit by itself: look for os._exit() and similar calls"
        cause = _Cause("died", detail, remedy)
    return Failure(
        kind=cause.kind,
        rank=rank,
        host=socket.gethostname(),
        step=status.step,
        phase=status.phase,
        detail=cause.detail,
        remedy=cause.remedy,
        log=str(log_file),
        exit_code=cause.exit_code,
    )


def _cause_of_signal(number: int, log_file: Path, oom_killed: bool, sizes: str) -> _Cause:
    if number == signal.SIGKILL and oom_killed:
        detail = f"killed by the kernel's OOM killer; memory before: {sizes}"
        return _Cause("oom", detail, _LESS_MEMORY)
    if number not in {*signal.Signals}:  # most real-time signals have a number only
        detail = f"the process was killed by signal {number}"
        return _Cause("died", detail, "find out who sent it, or which library uses it")
    detail = f"the process was killed by {signal.Signals(number).name}"
    remedy = f"see {log_file}"
    if number == signal.SIGKILL:
        remedy = (
            "find out who sent it: a person, a batch system, or a container at its memory limit"
        )
    return _Cause("died", detail, remedy)


def failure_from_hang(hang: Hang, log_file: Path, timeout_seconds: float) -> Failure:
    """The Failure for the rank that blocks a run, as the launcher found it."""
    detail = f"no progress for {hang.seconds:.1f} s (launch.timeout_seconds={timeout_seconds:g})"
    detail += "".join(f"; {known}" for known in (hang.reason, hang.others, hang.called) if known)
    remedy = "see the stack of that rank; if it is only slow, raise launch.timeout_seconds"
    if hang.reason == STOPPED:
        remedy = (
            "find out who stopped it; kill -CONT PID continues it, within launch.timeout_seconds"
        )
    return Failure(
        kind=HangError.kind,
        rank=hang.rank,
        host=socket.gethostname(),
        step=hang.snapshot.step,
        phase=hang.snapshot.phase,
        detail=detail,
        remedy=remedy,
        log=str(log_file),
        exit_code=HangError.exit_code,
    )


def traceback_of(error: BaseException) -> str:
    """The text that a `Report` shows above the headline for an exception; empty for errors with a
    known cause.

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
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    text = "".join(whole.format())
    if left_out:
        text += f"({counted(left_out, 'frame')} of libraries left out; the log has them)\n"
    return text


def _leave_out_libraries(part: traceback.TracebackException) -> int:
    """Removes the frames of libraries but the one that raised, if there are frames of the user's.
    Returns their number."""
    frames = list(part.stack)
    kept = [frame for frame in frames if not is_foreign(frame.filename)]
    if not kept:
        return 0
    if kept[-1] is not frames[-1]:
        kept.append(frames[-1])
    part.stack = traceback.StackSummary.from_list(kept)
    return len(frames) - len(kept)


def is_foreign(filename: str) -> bool:
    """Whether a frame's file is part of this package, of Python or of an installed library."""
    if filename.startswith("<"):
        return True
    path = Path(filename)
    if {"site-packages", "dist-packages"} & {*path.parts}:  # the user's own too, those of a .pth
        return True
    paths = sysconfig.get_paths()
    foreign = (Path(__file__).parents[1], paths["stdlib"], paths["purelib"], paths["platlib"])
    return any(path.is_relative_to(folder) for folder in foreign)


def stack_of(rank: int, frames: Sequence[str]) -> str:
    """The text that `report` prints above the FATAL line for a process that could not raise.
    frames: its lines."""
    if frames:
        return "\n".join([f"stack of rank {rank} (most recent call last):", *frames, ""])
    return ""


@dataclass(frozen=True)
class Report:
    """What the terminal shows of a failure."""

    failure: Failure
    trace: str = ""
    """From `traceback_of` or `stack_of`."""

    def print(self, is_fatal: bool = True, stream: TextIO | TolerantStream | None = None) -> None:
        """Prints the trace, the headline and the remedy.

        is_fatal: False if the run continues without loss.
        stream: the user's terminal; None: standard error, unless that was redirected into a log
            file.
        """
        out = stream or sys.stderr
        word = "FATAL" if is_fatal else "LOST"
        out.write(self.trace + headline(self.failure, word) + "\n")
        out.flush()


def report(run_dir: Path, failure: Failure, run_facts: dict[str, Any], trace: str = "") -> bool:
    """Records a failure and prints it on standard error. Returns False if another process has
    recorded one: nothing is printed then. For the parameters see `record` and `Report`."""
    is_first = record(run_dir, failure, run_facts)
    if is_first:
        Report(failure, trace).print()
    return is_first


def record(run_dir: Path, failure: Failure, run_facts: dict[str, Any]) -> bool:
    """Writes failure.json and summary.json. Returns False if another process has written them.

    Where they cannot be written the failure counts as recorded, and is to be printed.
    run_facts: further fields of summary.json.
    """
    try:
        create_json(run_dir / FILE, asdict(failure))
        write_json(run_dir / SUMMARY, {"status": "failed", **run_facts, "steps": failure.step})
    except FileExistsError:
        return False
    except OSError as error:  # the disk is full or the directory gone
        log.error("%s cannot be written: %s", run_dir / FILE, error)
    return True


def append_to_log(log_file: Path, lines: Sequence[str]) -> None:
    """Appends to the log of a process that cannot write it itself."""
    try:
        with log_file.open("a") as file:
            file.write("\n".join([*lines, ""]))
    except OSError as error:
        log.error("%s cannot be written: %s", log_file, error)


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


def recorded_failure(run_dir: Path) -> Failure:
    """Raises OSError if there is none, ValueError or TypeError if it is damaged."""
    return Failure(**json.loads((run_dir / FILE).read_text()))


def wait_for_report(run_dir: Path, seconds: float, reported_code: Callable[[], int] = int) -> bool:
    """Waits up to `seconds` for failure.json, so that a worker with a peer error lets the failing
    rank report first. Returns whether a failure was reported.

    reported_code: returns a number other than 0 once a failure was reported that could not be
        written.
    """

    def is_reported() -> bool:
        return (run_dir / FILE).exists() or bool(reported_code())

    return wait_until(is_reported, seconds, REPORT_POLL_SECONDS)
