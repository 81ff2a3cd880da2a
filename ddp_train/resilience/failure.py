"""The failure that ended a run, made of an exception, an exit code or a hang. Torch-free."""

from __future__ import annotations

import errno
import re
import signal
import socket
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_train.errors import HangError, LaunchError, NonFiniteLossError, is_out_of_memory
from ddp_train.resilience.hang_detector import Hang
from ddp_train.resilience.heartbeat import START_SECONDS, RankStatus, StatusSnapshot
from ddp_train.resilience.stacks import STOPPED
from ddp_train.text import first_line

SHOWN_SAMPLES = 20
"""Samples of a lost batch that a failure names."""
NO_SAMPLE = "(in this step this process has no sample, and its batch is empty)"
"""The note of an error in such a step."""
_TAKE_NO_SAMPLE = (
    "write code that takes an empty batch: no x[0], no division by len(x), x.flatten(1) in place"
    " of x.view(len(x), -1). If a layer cannot take an empty batch (pack_padded_sequence), use"
    " run.loader(..., drop_last=True), or a global_batch_size that gives each process a sample"
)
READS_AT_ONCE = "reads some samples when it is called"
"""In the note of an error of a data set that is not yet read for training."""
_FILL_BEFORE = (
    "fill the data set before run.loader is called, which reads some samples at once; for another"
    " cause see the traceback"
)
_OWN_NAMES = (
    "the state_dict of a wrapped model has the model's own names, not those of plain DDP. Leave"
    " out `module.`, as in state_dict['layer.weight']"
)
DEAD_LOADER = "DataLoader worker (pid"
"""Begin of torch's message about a loader process that died."""

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
"""Errors that gloo, NCCL and the store raise in surviving ranks when a peer is gone: never the
cause of a failure."""
_OTHER_NUMBER_TYPE = (
    r"the same dtype|share same datatype|Input type \((?!float|torch\.(cuda\.)?Float).*\) and"
    r" (weight|bias) type"
)
"""Torch's message about inputs whose number type is not that of the weights."""
_LIMITS = {
    "Too many open files": "raise the limit of open files before the start: ulimit -n 65536",
    r"memory\(shm\)|/torch_\d+_\d+.*No space| in /dev/shm|signal: Bus": (
        "enlarge /dev/shm, through which loader processes pass their batches (`docker run"
        " --shm-size=8g`), or use tuning.num_workers=0"
    ),
    "Expected more than 1 value per channel": (
        "batch norm cannot train on one sample, and a process has only one here (often in the"
        " last batch of an epoch): change train.global_batch_size, or use another norm. If the"
        " layer is frozen, name it in model.freeze: then it stays in eval mode"
    ),
    "derivative for aten::batch_norm_backward": (
        "torch's batch norm over all processes has no second derivatives on GPUs, as a gradient"
        " penalty needs them. That of ddp_train.synchronised(model) has: return it from the"
        " function that makes the model, or in a session use"
        " run.wrap(ddp_train.synchronised(model))"
    ),
}
"""Limits of the host and of torch: patterns of their messages, and remedies."""
_LESS_MEMORY = (
    "lower train.global_batch_size or raise train.accumulation_steps; to save host memory, also"
    " lower tuning.num_workers or tuning.prefetch_factor"
)


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


@dataclass(frozen=True)
class _Cause:
    """The meaning of an exception, a signal or an exit code."""

    kind: str
    detail: str
    remedy: str
    exit_code: int = LaunchError.exit_code

    def failure(self, rank: int, position: RankStatus | StatusSnapshot, log_file: Path) -> Failure:
        """The failure of a rank of this host."""
        return Failure(
            kind=self.kind,
            rank=rank,
            host=socket.gethostname(),
            step=position.step,
            phase=position.phase,
            detail=self.detail,
            remedy=self.remedy,
            log=str(log_file),
            exit_code=self.exit_code,
        )


# --- exceptions -----------------------------------------------------------------------------------


def failure_from(
    error: BaseException, rank: int, status: RankStatus, log_file: Path, sizes: str
) -> Failure:
    """The Failure for an exception that ended a worker.

    sizes: the memory of each process of this host, as text.
    """
    failure = _cause_of(error, status, sizes).failure(rank, status, log_file)
    for pattern, remedy in _LIMITS.items():
        if re.search(pattern, failure.detail):
            failure = replace(failure, remedy=remedy)
            break
    if isinstance(error, NonFiniteLossError):
        # On a GPU it is found some steps later.
        failure = replace(failure, step=error.step)
    return failure


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


def is_timeout(error: BaseException) -> bool:
    """Whether a peer error is a time-out, after which the peer may still be alive, and not a broken
    connection."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _is_lost_batch(error: BaseException) -> bool:
    """Whether a loader process died after it had announced a batch, so that the batch's memory
    cannot be opened."""
    return _came_by(error, "torch/multiprocessing/reductions.py")


def _came_by(error: BaseException, file: str) -> bool:
    return any(frame.filename.endswith(file) for frame in traceback.extract_tb(error.__traceback__))


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
    if text.startswith(DEAD_LOADER) or _is_lost_batch(error):
        return _cause_of_dead_loader(error, status)
    notes = getattr(error, "__notes__", [])
    remedy = "see the traceback"
    if isinstance(error, RuntimeError) and re.search(_OTHER_NUMBER_TYPE, text):
        remedy = (
            "give the model inputs of the dtype of its weights: return float32 (numpy's default is"
            " float64)"
        )
    elif isinstance(error, KeyError) and text.startswith(("'module.", '"module.')):
        remedy = _OWN_NAMES
    elif NO_SAMPLE in notes:
        remedy = _TAKE_NO_SAMPLE
    elif any(READS_AT_ONCE in note for note in notes):
        remedy = _FILL_BEFORE
    detail = _detail_of(error)
    if "in DataLoader worker process" in text:  # the message contains that process's traceback
        *_, error_line, detail = text.splitlines()
        if detail.startswith("(sample "):
            detail = f"{error_line} {detail}"
    return _Cause("exception", detail, remedy)


def _detail_of(error: BaseException) -> str:
    """Type, message and notes of an exception. A note says which sample it was, for one."""
    notes = getattr(error, "__notes__", [])
    detail = " ".join([f"{type(error).__name__}: {str(error).strip()}", *notes])
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if is_full and _came_by(error, "multiprocessing/synchronize.py"):
        detail += " in /dev/shm"
    return detail


def _cause_of_dead_loader(error: BaseException, status: RankStatus) -> _Cause:
    """The cause, with the samples that the process was to prepare.

    torch raises its error wherever the main thread is. A batch that is lost with its process is a
    broken connection, whose own cause is that error if torch has seen it.
    """
    message = str(error.__cause__ or "").strip()
    if not message.startswith(DEAD_LOADER):
        message = str(error).strip()
    first = message.splitlines()[0] if message else type(error).__name__
    detail = f"a loader process died: {first}"
    if status.fetching:
        samples = status.fetching[0].sample_numbers.tolist()
        detail += f"; the next batch has the samples {samples[:SHOWN_SAMPLES]}"
    remedy = "to see an error of the data set, use tuning.num_workers=0"
    if "signal: Killed" in message:
        remedy = f"{_LESS_MEMORY}; {remedy}"
    return _Cause("data_worker", detail, remedy)


# --- what the launcher sees -----------------------------------------------------------------------


def failure_from_exit(
    returncode: int, rank: int, status: RankStatus, log_file: Path, oom_killed: bool, sizes: str
) -> Failure:
    """The Failure for a worker that ended without a report of its own.

    returncode: as subprocess gives it, negative for a signal.
    oom_killed: whether the kernel's OOM killer has killed a process during the attempt.
    sizes: as in `failure_from`.
    """
    if returncode == -signal.SIGKILL and oom_killed:
        detail = f"killed by the kernel's OOM killer; memory before: {sizes}"
        return _Cause("oom", detail, _LESS_MEMORY).failure(rank, status, log_file)
    remedy = f"see the output of this rank, above or in {log_file}"
    if returncode < 0:
        number = -returncode
        name = f"signal {number}"  # most real-time signals have a number only
        if number not in {*signal.Signals}:
            remedy = "find out who sent this signal, or which library uses it"
        else:
            name = signal.Signals(number).name
        if number == signal.SIGKILL:
            remedy = (
                "find out who sent the signal: a person, a batch system, or a container at its"
                " memory limit"
            )
        detail = f"the process was killed by {name}"
    else:
        detail = f"the process exited with code {returncode} before the run was done"
        if returncode != 1:  # 1: a traceback before the worker could report
            remedy = "a worker must not exit by itself: look for os._exit() and similar calls"
    return _Cause("died", detail, remedy).failure(rank, status, log_file)


def failure_from_hang(hang: Hang, log_file: Path, timeout_seconds: float) -> Failure:
    """The Failure for the rank that blocks a run, as the launcher found it."""
    limit = f"launch.timeout_seconds={timeout_seconds:g}"
    longer = "raise launch.timeout_seconds"
    if not hang.snapshot.has_started and timeout_seconds < START_SECONDS:
        limit = f"the limit is {START_SECONDS:g} s before the second batch, and later {limit}"
        longer += f" above {START_SECONDS:g}"
    silence = f"no progress for {hang.seconds:.1f} s ({limit})"
    evidence = [silence, hang.reason, hang.others, hang.called]
    detail = "; ".join(text for text in evidence if text)
    remedy = f"see the stack of that rank; if the rank is only slow, {longer}"
    if not hang.stack:
        remedy = (
            "the stack of that rank could not be read; find out what the rank waits for, or if"
            f" it is only slow, {longer}"
        )
    if hang.reason == STOPPED:
        remedy = (
            "find out who stopped the process; `kill -CONT PID` continues it, within"
            " launch.timeout_seconds"
        )
    cause = _Cause(HangError.kind, detail, remedy, HangError.exit_code)
    return cause.failure(hang.rank, hang.snapshot, log_file)
