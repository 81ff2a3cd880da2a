"""Reports a failure: failure.json, one FATAL line, and the traceback or stack of the first rank
that failed."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
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
from ddp_train.resilience.whole_files import write_json
from ddp_train.text import counted, first_line

FILE = "failure.json"
SUMMARY = "summary.json"
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

    An OSError is of a connection of the user's own, a data set behind a server for one; torch's are
    RuntimeErrors.
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


def failure_from(
    error: BaseException, rank: int, status: RankStatus, log_file: Path, sizes: str
) -> Failure:
    """The Failure for an exception that ended a worker.

    sizes: the memory of each process of this host, in words.
    """
    text = str(error).strip()
    kind = "exception"
    remedy = "see the traceback"
    code = 70
    detail = f"{type(error).__name__}: {text}"
    detail = " ".join([detail, *getattr(error, "__notes__", [])])  # which sample, for one
    if (
        isinstance(error, OSError)
        and error.errno == errno.ENOSPC
        and _came_by(error, "multiprocessing/synchronize.py")
    ):
        detail += " in /dev/shm"
    if isinstance(error, RuntimeError) and re.search(_OTHER_NUMBER_TYPE, text):
        remedy = (
            "give the model the number type of its weights: return float32 inputs (numpy's default"
            " is float64)"
        )
    if isinstance(error, LaunchError):
        kind = error.kind
        remedy = error.remedy
        code = error.exit_code
        detail = str(error)
    elif isinstance(error, SystemExit):
        kind = "exit"
        remedy = "do not call sys.exit() in a worker; raise an exception"
        detail = f"sys.exit({error.code!r}) was called"
    elif is_peer_error(error):
        kind = "peer"
        remedy = "the cause is in the log of the rank that exited first"
        message = first_line(error).partition(" This is typically caused by")[
            0
        ]  # gloo's guesses follow
        detail = f"another process is gone: {message}"
    elif is_out_of_memory(error):
        kind = "oom"
        remedy = _LESS_MEMORY
        detail = f"{detail}; memory at that time: {sizes}"
    elif text.startswith("DataLoader worker (pid") or _is_lost_batch(error):
        # torch raises the first wherever the main thread is; the second is a broken connection.
        found = str(
            error.__cause__ or ""
        ).strip()  # what the loader process died of, if torch has seen it
        found = found if found.startswith("DataLoader worker (pid") else text
        kind = "data_worker"
        detail = (
            f"a loader process died: {found.splitlines()[0] if found else type(error).__name__}"
        )
        if status.fetching:
            detail += f"; the next batch was samples {status.fetching[0].indices.tolist()[:20]}"
        remedy = "with tuning.num_workers=0 an error of the data set is raised in the rank itself"
        if "signal: Killed" in found:
            remedy = f"{_LESS_MEMORY}; {remedy}"
    elif (
        "in DataLoader worker process" in text
    ):  # torch's message contains that process's traceback
        *_, error_line, note = text.splitlines()
        detail = f"{error_line} {note}" if note.startswith("(sample ") else note
    remedy = next((known for limit, known in _LIMITS.items() if re.search(limit, detail)), remedy)
    step = (
        error.step if isinstance(error, NonFiniteLossError) else status.step
    )  # a GPU's is found out later
    return Failure(
        kind, rank, socket.gethostname(), step, status.phase, detail, remedy, str(log_file), code
    )


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
"""Limits of the host and of torch, by what is said of them, and what to do."""
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
    kind = "died"
    remedy = f"see {log_file}"
    if returncode < 0:
        known = -returncode in {*signal.Signals}  # most real-time signals have a number only
        name = signal.Signals(-returncode).name if known else f"signal {-returncode}"
        detail = f"the process was killed by {name}"
        if not known:
            remedy = "find out who sent it, or which library uses it"
        if returncode == -signal.SIGKILL and oom_killed:
            kind = "oom"
            remedy = _LESS_MEMORY
            detail = f"killed by the kernel's OOM killer; memory before: {sizes}"
        elif returncode == -signal.SIGKILL:
            remedy = (
                "find out who sent it: a person, a batch system, or a container at its memory limit"
            )
    else:
        detail = f"the process exited with code {returncode} before the run was done"
        if returncode != 1:  # 1: a traceback before the worker could report
            remedy = "a worker must not exit by itself: look for os._exit() and similar calls"
    step = status.step
    phase = status.phase
    return Failure(kind, rank, socket.gethostname(), step, phase, detail, remedy, str(log_file), 70)


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
    """The text that `report` prints above the FATAL line for an exception; empty for errors with a
    known cause. Where it came by the user's own code, only those frames and the one that raised:
    the log has them all."""
    if isinstance(error, LaunchError):
        return ""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    left_out = 0
    while part:
        frames = list(part.stack)
        own = [frame for frame in frames if not is_foreign(frame.filename)]
        if own:
            last = [] if own[-1] is frames[-1] else frames[-1:]
            part.stack = traceback.StackSummary.from_list([*own, *last])
            left_out += len(frames) - len(part.stack)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    if left_out:
        note = f"({counted(left_out, 'frame')} of libraries left out; the log has them)\n"
    else:
        note = ""
    return "".join(whole.format()) + note


def is_foreign(filename: str) -> bool:
    """Whether a frame's file is of this package, of Python or of an installed library."""
    paths = sysconfig.get_paths()
    foreign = (Path(__file__).parents[1], paths["stdlib"], paths["purelib"], paths["platlib"])
    installed = {"site-packages", "dist-packages"} & {
        *Path(filename).parts
    }  # the user's own too, and those of a .pth
    return (
        filename.startswith("<")
        or bool(installed)
        or any(Path(filename).is_relative_to(place) for place in foreign)
    )


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
    part = run_dir / f"{FILE}.part-{os.getpid()}"
    try:
        part.write_text(json.dumps(asdict(failure), indent=1) + "\n")
        os.link(
            part, run_dir / FILE
        )  # fails if the file exists: only the first failure is reported
        write_json(run_dir / SUMMARY, {"status": "failed", **run_facts, "steps": failure.step})
    except FileExistsError:
        return False
    except (
        OSError
    ) as write_error:  # the disk is full or the directory gone: print the failure all the same
        log.error("%s cannot be written: %s", run_dir / FILE, write_error)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return True


def append_to_log(log_file: Path, lines: Sequence[str]) -> None:
    """Appends to the log of a process that cannot write it itself."""
    try:
        with log_file.open("a") as file:
            file.write("\n".join([*lines, ""]))
    except OSError as error:
        log.error("%s cannot be written: %s", log_file, error)


def headline(failure: Failure, word: str = "FATAL") -> str:
    """The line that begins with FATAL, followed by the remedy and the log file."""
    step = "" if failure.step is None else f", step {failure.step}"
    if failure.rank is None:
        who = failure.host
    else:
        who = f"rank {failure.rank} on {failure.host}"
    log_file = f"\n  log: {failure.log}" if failure.log else ""
    return (
        f"{word} {failure.kind} ({who}{step}, {failure.phase}): {failure.detail}\n  remedy:"
        f" {failure.remedy}{log_file}"
    )


def reported(run_dir: Path) -> Failure:
    """Raises OSError if there is none, ValueError or TypeError if it is damaged."""
    return Failure(**json.loads((run_dir / FILE).read_text()))


def wait_for_report(run_dir: Path, seconds: float, told: Callable[[], int] = int) -> bool:
    """Waits up to `seconds` for failure.json, so that a worker with a peer error lets the failing
    rank report first.

    told: not 0 once a failure was reported that could not be written. Returns whether one was
    reported.
    """
    return wait_until(lambda: (run_dir / FILE).exists() or told(), seconds, 0.05)
