"""The arguments of `ddp_train.session`, its errors, and its words for messages of a run.

Torch-free.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.config.folders import SESSION, is_of_run, is_of_sweep
from ddp_train.config.packages import how_to_install
from ddp_train.config.user_code import missing_package
from ddp_train.errors import ConfigError
from ddp_train.options.registry import TRACKERS
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import is_foreign
from ddp_train.telemetry.trackers.tracker import Tracker
from ddp_train.text import did_you_mean, snake_case

_REPLACEMENTS = (
    (
        r"lower train\.global_batch_size or raise train\.accumulation_steps",
        "lower global_batch_size",
    ),
    (r"the same command with run_dir=\S+", "the same command"),
    (r"run_dir=\S+ resumes", "the same command resumes"),
    (
        r"add strategy\.find_unused_parameters=true",
        "call run.wrap(model, find_unused_parameters=True)",
    ),
    (
        r"use another checkpoint, checkpoint\.resume=PATH(, or start over:"
        r" checkpoint\.resume=never)?",
        "to start over, move the folder checkpoints/ away",
    ),
    (
        r"use the model= and data= that the checkpoint was trained with",
        "build that model again. To start over, use a new folder: ddp_train.session('runs/new')",
    ),
    (r" or tuning\.prefetch_factor", ""),
    (
        r"change it in a method set_epoch\(epoch\) of the class, which is called before the"
        r" samples of an epoch are read, or use",
        "change it before the loop over the batches, or use",
    ),
    (
        r" or, with strategy\.init_sync=false, the model's constructor",
        ", or gradients that the loop sets itself (p.grad = g): torch.autograd.grad gives those of"
        " one process, and run.sum(g) / run.processes the mean of all",
    ),
    (r"data\._target_: ", ""),
    # A key, and not the name of a script, train.py.
    (r"\b(?:launch|train|tuning)\.(?!py\b)(\w+)", r"\1"),
)


class UsageError(ConfigError):
    """A session was used as it must not be. `str(error)` begins with the line that did."""

    def __init__(self, detail: str, remedy: str) -> None:
        line = calling_line()
        super().__init__([f"{line}: {detail}" if line else detail])
        self.remedy = remedy

    def __str__(self) -> str:
        return self.problems[0]


def calling_line() -> str:
    """The user's line that called this package, as `train.py:12`; empty if there is none."""
    frame = sys._getframe(1)
    while frame and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    if frame:
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""


def is_interactive() -> bool:
    """True in a notebook or at a prompt.

    There is no script, and ending the process would end that.
    """
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def lock_run_dir(run_dir: Path, patience_seconds: float = 0.0) -> run_lock.Lock:
    """The lock of a run directory for this process. Nothing else is written before.

    patience_seconds: how long an earlier holder may take to end.

    Raises UsageError if another run is there, if it is the folder of something else than a session,
    or if it cannot be written.
    """
    try:
        if is_of_run(run_dir) or is_of_sweep(run_dir):
            raise UsageError(
                f"ddp_train.session: {run_dir} is the folder of a run or a sweep of ddp-train"
                " (launch.py), which a session cannot resume",
                "use a new folder: ddp_train.session('runs/new'). The weights of that run are in"
                " its checkpoints/step_#/model.safetensors",
            )
        return run_lock.acquire(run_dir / run_lock.FILE, patience_seconds)
    except run_lock.LockHeldError as error:
        raise UsageError(
            f"ddp_train.session: another run is in {run_dir}, {error}",
            "wait until that run ends, stop it, or use a new folder: ddp_train.session('runs/new')",
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"ddp_train.session: {run_dir} cannot be written: {reason}",
            "use a folder that can be written",
        ) from None


def trackers_of(trackers: Sequence[str | Tracker]) -> dict[str, Tracker]:
    """Trackers by their names. Raises UsageError for one that there is not.

    trackers: names of ours, and objects of the user's classes.
    """
    found: dict[str, Tracker] = {}
    if isinstance(trackers, str | Tracker):
        trackers = [trackers]
    for tracker in trackers:
        if isinstance(tracker, str) and tracker in TRACKERS:
            found[tracker] = TRACKERS[tracker]()
        elif isinstance(tracker, Tracker):
            found[snake_case(type(tracker).__name__)] = tracker
        else:
            hint = did_you_mean(tracker, list(TRACKERS)) if isinstance(tracker, str) else ""
            raise UsageError(
                f"ddp_train.session: trackers: {tracker!r} is not a tracker{hint}",
                f"use {', '.join(TRACKERS)}, or an object of a class derived from"
                " ddp_train.Tracker",
            )
    for name, tracker in found.items():
        missing = missing_package(type(tracker))
        if missing:
            raise UsageError(
                f"ddp_train.session: trackers: {name} needs {missing}, which is not installed",
                how_to_install(missing),
            )
    return found


def in_words(text: str) -> str:
    """A message of a run, with the arguments of a session in place of the keys of a config."""
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return text


@dataclass(frozen=True)
class Settings:
    """The arguments of `session`, checked."""

    run_dir: Path
    processes: int
    """Number of processes of this host, if this process starts them."""
    device: str
    """cuda or cpu."""
    seed: int
    keep: int
    max_restarts: int
    timeout_seconds: float
    grace_seconds: float
    log_every_steps: int = 50
    trackers: Mapping[str, Tracker] = field(default_factory=dict)
    """The trackers by their names; rank 0 alone opens them."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Values that trackers show of the run."""
    is_proof: bool = False
    """It is a run of `ddp-train prove train.py`: it ends after the first updates."""
    first_draws: int = 0
    """The rank of whom rank 0 has the random draws of a step: a proof compares others."""

    def __post_init__(self) -> None:
        least_values = {
            "processes": 1,
            "keep": 1,
            "max_restarts": 0,
            "timeout_seconds": 0.001,
            "grace_seconds": 0,
            "log_every_steps": 1,
        }
        for name, least in least_values.items():
            value = getattr(self, name)
            if value < least:
                raise UsageError(
                    f"ddp_train.session: {name}={value!r} is less than {least:g}",
                    f"use {least:g} or more",
                )
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise UsageError(
                f"ddp_train.session: {self.run_dir} is not a folder",
                "use a new folder, or the folder of an earlier session",
            )

    def facts(self, processes: int) -> dict[str, Any]:
        """Entries of summary.json. processes: over all hosts."""
        backend = "none"
        if processes > 1:
            backend = "nccl" if self.device == "cuda" else "gloo"
        return {
            "mode": SESSION,
            "world_size": processes,
            "device": self.device,
            "backend": backend,
            "seed": self.seed,
        }
