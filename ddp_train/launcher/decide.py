"""Decides what follows a failed attempt of a run: a restart, with how many processes, or the end.

Pure: no clock, no process, no file. The launcher collects the facts, calls `decide` once for each
failed attempt, and then does what the result says. Torch-free.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ddp_train.errors import (
    ConfigError,
    DataError,
    ModelError,
    NonFiniteLossError,
    WriteError,
)
from ddp_train.launcher.size import Size
from ddp_train.resilience.failure import Failure
from ddp_train.text import counted

FINAL = (ConfigError.exit_code, DataError.exit_code, WriteError.exit_code)
"""Exit codes of failures whose cause somebody must remove before a restart helps."""
NOT_SAVED = (ModelError.kind, NonFiniteLossError.kind, WriteError.kind)
"""Kinds of failures after which no step is saved: the weights of the processes have come apart, the
last weights give a loss that is not finite, or the run directory cannot be written."""
SAME_FAILURES = 3
"""Attempts in a row with the same failure after which the run ends."""
DEVICE_FAILURES = 2
"""Failures of one device, without a step kept or saved in between, after which the run does without
it: its rank was replaced once, and failed again."""
CUDA_ERRORS = ("CUDA error", "CUDA driver", "CUDA-capable")
"""Parts of the messages of errors that come from a GPU or its driver."""


@dataclass(frozen=True)
class FailedAttempt:
    """Facts about an attempt that has failed."""

    code: int
    """The exit code of the run if this is its end."""
    failure: Failure | None = None
    """The failure that was reported; None if its file could not be written or read."""
    by_signal: bool = False
    """Whether the process of that failure was killed by a signal."""
    unreachable_gpus: Collection[str] = ()
    newest_checkpoint: int = -1
    """Step of the newest checkpoint; -1 if there is none."""
    kept_step: int | None = None
    """The last step that all ranks have kept outside their processes, if a checkpoint is to be made
    of it."""
    stop_requested: bool = False

    @property
    def newest_step(self) -> int:
        """The last step that this attempt, or one before, has left to the next; -1 if none."""
        return self.newest_checkpoint if self.kept_step is None else self.kept_step

    def signature(self) -> tuple[str, ...]:
        """Traits that two equal failures have in common; empty if none was reported.

        Numbers in the detail are left out: seconds, sizes and process ids differ between attempts.
        Where all ranks raise the same exception, chance decides which of them is reported.
        """
        failure = self.failure
        if failure is None:
            return ()
        rank = "any" if failure.kind == "exception" else str(failure.rank)
        detail = re.sub(r"\d+", "#", failure.detail)
        return failure.kind, rank, str(failure.step), detail

    def suspect_rank(self) -> int | None:
        """The rank that failed, if that may be due to its GPU, or to the host's memory.

        Then its replacement may fail too, and other ranks need not.
        """
        failure = self.failure
        if failure is None:
            return None
        if failure.kind == "exception":
            names_cuda = any(text in failure.detail for text in CUDA_ERRORS)
            is_suspect = failure.phase == "start" or names_cuda
        elif failure.kind == "died":
            is_suspect = self.by_signal
        else:
            is_suspect = failure.kind == "oom"
        return failure.rank if is_suspect else None


@dataclass(frozen=True)
class History:
    """The part of a run's earlier failures that decides."""

    newest_step: int = -1
    """The last step that a checkpoint had at the start, or that a failed attempt has left."""
    restarts_used: int = 0
    """Restarts since the last step that was kept or saved."""
    signature: tuple[str, ...] = ()
    """Signature of the last failure."""
    repeats: int = 0
    """Attempts in a row that ended with that signature."""
    device_failures: Mapping[str, int] = field(default_factory=dict)
    """Failures of each device, by `Size.device_of`, without a step kept or saved in between."""

    def with_failure(self, failed: FailedAttempt, size: Size) -> History:
        """The history that includes a failure.

        A new checkpoint, or a step that was kept for one, refills the budget of restarts.
        """
        has_progressed = failed.newest_step > self.newest_step
        restarts_used = 0 if has_progressed else self.restarts_used
        device_failures = {} if has_progressed else dict(self.device_failures)
        rank = failed.suspect_rank()
        if rank is not None:
            device = size.device_of(rank)
            device_failures[device] = device_failures.get(device, 0) + 1
        signature = failed.signature()
        is_same = bool(signature) and signature == self.signature and not has_progressed
        return dataclasses.replace(
            self,
            newest_step=max(failed.newest_step, self.newest_step),
            restarts_used=restarts_used,
            signature=signature,
            repeats=self.repeats + 1 if is_same else 1,
            device_failures=device_failures,
        )

    def after(self, failed: FailedAttempt, size: Size, restart: Restart) -> History:
        """The history after a failure and the restart that followed.

        Other processes, or the same on other GPUs, have not failed yet.
        """
        seen = self.with_failure(failed, size)
        if restart.size != size:
            return dataclasses.replace(seen, restarts_used=0, repeats=0, device_failures={})
        if restart.counts_as_restart:
            return dataclasses.replace(seen, restarts_used=seen.restarts_used + 1)
        return seen

    def after_resize(self) -> History:
        """The history after a change that was asked for: ranks may be on other devices."""
        return dataclasses.replace(self, device_failures={})


@dataclass(frozen=True)
class Restart:
    """Start all workers again."""

    size: Size
    from_step: int | None
    """The step that was kept; None: the newest checkpoint, or the beginning."""
    counts_as_restart: bool
    number: int = 0
    """Which restart it is since the last step kept or saved, if it counts as one."""
    reason: str = ""
    """Why there are fewer processes, or other GPUs; empty if all stays."""
    otherwise: Restart | End | None = None
    """The decision if the config for another number of processes cannot be written."""


@dataclass(frozen=True)
class End:
    """End the run with an exit code."""

    code: int
    reason: str = ""
    """Why there is no restart; empty if that needs no explanation."""


def decide(failed: FailedAttempt, history: History, size: Size, max_restarts: int) -> Restart | End:
    """Decide what follows a failed attempt.

    history: of the failures before. size: of the failed attempt. max_restarts: without a step kept
    or saved in between.
    """
    if failed.code in FINAL or failed.stop_requested or not max_restarts:
        return End(failed.code)
    seen = history.with_failure(failed, size)
    replacement = _replacement(failed, seen, size, max_restarts)
    lost_devices = _lost_devices(failed, seen, size)
    smaller = size.without(lost_devices) if lost_devices else None
    if smaller is None:
        return replacement
    return Restart(
        size=smaller,
        from_step=failed.kept_step,
        counts_as_restart=False,
        reason=next(iter(lost_devices.values())),
        otherwise=replacement,
    )


def _replacement(
    failed: FailedAttempt, seen: History, size: Size, max_restarts: int
) -> Restart | End:
    """A restart of the same size, within the budget. seen: the history with this failure."""
    if seen.repeats == SAME_FAILURES:
        return End(
            failed.code,
            f"same failure at the same step in {SAME_FAILURES} attempts; restarting again would not"
            " help",
        )
    if seen.restarts_used >= max_restarts:
        budget = f"launch.max_restarts={max_restarts}"
        return End(failed.code, f"{budget} is used up, and no new step was saved in between")
    return Restart(
        size=size,
        from_step=failed.kept_step,
        counts_as_restart=True,
        number=seen.restarts_used + 1,
    )


def _lost_devices(failed: FailedAttempt, seen: History, size: Size) -> dict[str, str]:
    """The devices that the run must do without, each with the reason."""
    lost = {
        gpu: f"GPU {gpu} is gone" for gpu in size.gpus_in_use() if gpu in failed.unreachable_gpus
    }
    rank = failed.suspect_rank()
    if rank is None:
        return lost
    device = size.device_of(rank)
    if device not in lost and seen.device_failures[device] >= DEVICE_FAILURES:
        name = f"rank {rank} (GPU {device})" if size.gpus else f"rank {rank}"
        lost[device] = f"{name} failed twice, and no new step was saved in between"
    return lost


def sentences(
    decision: Restart | End,
    kept_step: int | None,
    max_restarts: int,
    words_to_resume: str,
    steps_redone: int = 0,
    finite_step: int | None = None,
) -> list[str]:
    """The lines that the terminal shows below the report of a failure.

    kept_step: the last step that all ranks have kept outside their processes.
    words_to_resume: the overrides that resume the run.
    steps_redone: how many steps they had done since.
    finite_step: step of the newest checkpoint, -1 for none, where a loss was not finite; else None.
    """
    saved = "" if kept_step is None else _saved_sentence(decision, kept_step, words_to_resume)
    if finite_step is not None and isinstance(decision, End):
        saved = _not_finite_sentence(finite_step, words_to_resume)
    match decision:
        case Restart(counts_as_restart=True):
            next_line = f"restarting ({decision.number} of {max_restarts} restarts)"
            next_line += _from_step(decision, steps_redone)
        case Restart():
            processes = counted(decision.size.count, "process")
            start = _from_step(decision, steps_redone)
            next_line = f"continuing with {processes}{start}; {decision.reason}"
        case End(reason=""):
            next_line = ""
        case End():
            next_line = f"not restarted: {decision.reason}"
    return [line for line in (saved, next_line) if line]


def _saved_sentence(decision: Restart | End, kept_step: int, words_to_resume: str) -> str:
    if isinstance(decision, Restart):
        return f"step {kept_step} is not lost: it was in memory outside the processes"
    where = "which was in memory outside the processes"
    return f"saved step {kept_step}, {where}; {words_to_resume} resumes from it"


def _not_finite_sentence(newest_step: int, words_to_resume: str) -> str:
    """newest_step: of the checkpoints; -1 if there is none."""
    reason = (
        "the steps since the last checkpoint are not saved, for their weights lead to that loss"
    )
    again = f"after the remedy, the same command with {words_to_resume}"
    if newest_step < 0:
        return f"{reason}; {again} starts over"
    return (
        f"{reason}; {again} resumes from step {newest_step}; if that fails too, add"
        " checkpoint.resume=PATH of an older checkpoint, or checkpoint.resume=never to start over"
    )


def _from_step(restart: Restart, steps_redone: int) -> str:
    if restart.from_step is None:
        return ""
    if steps_redone > 0:
        steps = counted(steps_redone, "step")
        return f", from step {restart.from_step}: {steps} after it must be computed again"
    return f", from step {restart.from_step}: no step is lost"
