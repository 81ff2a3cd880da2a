"""What went wrong, where, and the remedy: failure.json, one FATAL line, the first failing rank's traceback."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ddp_train.errors import LaunchError

FILE, SUMMARY = "failure.json", "summary.json"
log = logging.getLogger(__name__)

_ECHOES = (
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
)
"""What gloo, NCCL and the store say to the survivors when a peer is gone: never the cause."""


@dataclass
class Position:
    """Where a process is. Those who wait or work say so, the loop does not."""

    step: int = 0
    phase: str = "start"


@dataclass(frozen=True)
class Failure:
    """failure.json."""

    kind: str
    rank: int | None
    """None where no worker had started."""
    host: str
    step: int | None
    phase: str
    detail: str
    remedy: str
    log: str
    exit_code: int


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    text = str(error).lower()
    return any(echo in text for echo in _ECHOES) and not isinstance(error, LaunchError)


def failure_from(error: BaseException, rank: int, position: Position, log_file: Path) -> Failure:
    """Describes an exception that ended a worker."""
    if isinstance(error, LaunchError):
        kind, remedy, code, detail = error.kind, error.remedy, error.exit_code, str(error)
    elif isinstance(error, SystemExit):
        kind, remedy, code = "exit", "a worker must not call sys.exit()", 70
        detail = f"sys.exit({error.code!r}) was called"
    elif is_echo(error):
        kind, remedy, code = "peer", "the cause is in the log of the rank that left first", 70
        detail = f"another process is gone: {str(error).strip().partition(chr(10))[0]}"
    else:
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        kind, code = ("oom" if memory else "exception"), 70
        remedy = "lower train.global_batch_size or raise train.accumulation_steps" if memory else "see the traceback"
        detail = f"{type(error).__name__}: {str(error).strip()}"
    return Failure(kind, rank, socket.gethostname(), position.step, position.phase, detail, remedy, str(log_file), code)


def failure_from_exit(returncode: int, rank: int, log_file: Path) -> Failure:
    """Describes a worker that ended without a word. returncode: as subprocess gives it, negative for a signal."""
    remedy = f"see {log_file}"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        detail = f"the process was ended by {name}"
        if name == "SIGKILL":
            remedy = "often the kernel's out-of-memory killer: see dmesg; lower train.global_batch_size if so"
    else:
        detail = f"the process left with exit code {returncode} before the run was done"
    return Failure("died", rank, socket.gethostname(), None, "unknown", detail, remedy, str(log_file), 70)


def report(
    run_dir: Path,
    failure: Failure,
    described: dict[str, Any],
    error: BaseException | None = None,
    stream: TextIO | None = None,
) -> bool:
    """Writes failure.json and tells the user, unless another process did so before. Returns whether it did.

    described: what summary.json says of the run beside its failure. stream: where the user reads, standard error
    unless that was redirected into a log file.
    """
    part = run_dir / f"{FILE}.part-{os.getpid()}"
    try:
        part.write_text(json.dumps(asdict(failure), indent=1) + "\n")
        os.link(part, run_dir / FILE)  # link fails if the file exists: the first failure is the one
        write_json(run_dir / SUMMARY, {"status": "failed", **described, "steps": failure.step})
    except FileExistsError:
        return False
    except OSError as cannot:  # the disk is full, or the directory gone: the user must be told all the same
        log.error("%s cannot be written: %s", run_dir / FILE, cannot)
    finally:
        part.unlink(missing_ok=True)
    out = stream or sys.stderr
    if error is not None and not isinstance(error, LaunchError):
        out.write("".join(traceback.format_exception(error)))
    out.write(headline(failure) + "\n")
    out.flush()
    return True


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=1) + "\n")
    part.replace(path)


def headline(failure: Failure) -> str:
    """The FATAL line."""
    step = "" if failure.step is None else f", step {failure.step}"
    who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"
    log_file = f"\n  log: {failure.log}" if failure.log else ""
    return (
        f"FATAL {failure.kind} ({who}{step}, {failure.phase}): {failure.detail}\n  remedy: {failure.remedy}{log_file}"
    )


def wait_for_report(run_dir: Path, seconds: float) -> bool:
    """Waits until somebody reported a failure. A worker that heard an echo gives the guilty one time to speak first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run_dir / FILE).exists():
            return True
        time.sleep(0.05)
    return False
