"""What went wrong, where, and the remedy: failure.json, one FATAL line, the first failing rank's traceback."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ddp_train.errors import LaunchError, NonFiniteLossError, is_out_of_memory
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.stdio import Output
from ddp_train.text import first_line

FILE, SUMMARY = "failure.json", "summary.json"
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
"""What gloo, NCCL and the store say to the survivors when a peer is gone: never the cause."""


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


def is_peer_error(error: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    text = str(error).lower()
    return (
        any(peer_error in text for peer_error in _PEER_ERRORS)
        and not isinstance(error, LaunchError)
        and not _lost_a_batch(error)
    )


def _lost_a_batch(error: BaseException) -> bool:
    """Whether a loader process died after it had announced a batch: its memory cannot be fetched any more."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith("torch/multiprocessing/reductions.py") for frame in frames)


def is_timeout(error: BaseException) -> bool:
    """Whether an echo says that another process is there no more than that it is gone: nothing came for too long."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def failure_from(error: BaseException, rank: int, status: RankStatus, log_file: Path, sizes: str) -> Failure:
    """Describes an exception that ended a worker. sizes: the memory of each process of this host, in words."""
    text = str(error).strip()
    kind, remedy, code, detail = "exception", "see the traceback", 70, f"{type(error).__name__}: {text}"
    if isinstance(error, LaunchError):
        kind, remedy, code, detail = error.kind, error.remedy, error.exit_code, str(error)
    elif isinstance(error, SystemExit):
        kind, remedy = "exit", "a worker must not call sys.exit()"
        detail = f"sys.exit({error.code!r}) was called"
    elif is_peer_error(error):
        kind, remedy = "peer", "the cause is in the log of the rank that left first"
        said = first_line(error).partition(" This is typically caused by")[0]  # gloo's guesses, and good wishes
        detail = f"another process is gone: {said}"
    elif is_out_of_memory(error):
        kind, remedy, detail = "oom", _LESS_MEMORY, f"{detail}; held at the time: {sizes}"
    elif text.startswith("DataLoader worker (pid") or _lost_a_batch(error):
        # In torch's own words, raised wherever the main thread happened to be, or as a connection that broke.
        kind, detail = "data_worker", f"a loader process died: {first_line(error) or type(error).__name__}"
        if status.fetching:
            detail += f"; the next batch was samples {status.fetching[0].indices.tolist()[:20]}"
        remedy = f"{_LESS_MEMORY}; tuning.num_workers=0 lets the data set fail in the rank itself"
    elif "in DataLoader worker process" in text:  # torch's text holds that process's traceback, and ends with it
        detail = text.splitlines()[-1]
    step = error.step if isinstance(error, NonFiniteLossError) else status.step  # a GPU's is found out later
    return Failure(kind, rank, socket.gethostname(), step, status.phase, detail, remedy, str(log_file), code)


_LESS_MEMORY = (
    "lower train.global_batch_size or raise train.accumulation_steps; on the host, tuning.num_workers and "
    "tuning.prefetch_factor hold batches too"
)


def failure_from_exit(
    returncode: int, rank: int, status: RankStatus, log_file: Path, oom_killed: bool, sizes: str
) -> Failure:
    """Describes a worker that ended without a word.

    returncode: as subprocess gives it, negative for a signal. oom_killed: whether the kernel killed processes for want
    of memory meanwhile. sizes: as in `failure_from`.
    """
    kind, remedy = "died", f"see {log_file}"
    if returncode < 0:
        detail = f"the process was ended by {signal.Signals(-returncode).name}"
        if returncode == -signal.SIGKILL and oom_killed:
            kind, remedy = "oom", _LESS_MEMORY
            detail = f"the kernel killed the process for lack of memory; held before: {sizes}"
        elif returncode == -signal.SIGKILL:
            remedy = "somebody killed it: a person, a batch system, or a container at its memory limit"
    else:
        detail = f"the process left with exit code {returncode} before the run was done"
        if not returncode:
            remedy = "a worker must not leave by itself: look for os._exit() and the like"
    step, phase = status.step, status.phase
    return Failure(kind, rank, socket.gethostname(), step, phase, detail, remedy, str(log_file), 70)


def report(
    run_dir: Path,
    failure: Failure,
    described: dict[str, Any],
    error: BaseException | None = None,
    stream: TextIO | Output | None = None,
    stack: Sequence[str] = (),
) -> bool:
    """Writes failure.json and tells the user, unless another process did so before. Returns whether it did.

    described: what summary.json says of the run beside its failure. stream: where the user reads, standard error
    unless that was redirected into a log file. stack: of a process that could not raise, in lines.
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
    if stack:
        out.write("\n".join([f"stack of rank {failure.rank} (most recent call last):", *stack, ""]))
    out.write(headline(failure) + "\n")
    out.flush()
    return True


def append(log_file: Path, lines: Sequence[str]) -> None:
    """To the log of a process that cannot write it itself."""
    try:
        with log_file.open("a") as file:
            file.write("\n".join([*lines, ""]))
    except OSError as cannot:
        log.error("%s cannot be written: %s", log_file, cannot)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all. Numbers that are not finite become null: JSON has none."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_finite(values), indent=1) + "\n")
    part.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
