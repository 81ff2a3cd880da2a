"""Trials: runs of the ordinary launcher, each a command of its own, one after the other; and their
results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_lab.study.provenance import conditions
from ddp_lab.study.request import Request
from ddp_train.config.program import Program
from ddp_train.config.run_directory import unwritten
from ddp_train.distributed.child_environments import environment
from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.linux import adopting_orphans, end_with_parent
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.whole_files import write_json
from ddp_train.text import word

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 20.0
"""Time from SIGTERM to SIGKILL for the running trial when the study is stopped."""
REASON_LETTERS = 200
NEVER = 1_000_000_000
NO_PAGE = "launch.page=false"
"""A study has one page, and its times are those of training."""
TRAIN_ONLY = (
    f"train.evaluate_every_epochs={NEVER}",
    "train.evaluate_every_steps=null",
    f"checkpoint.every_steps={NEVER}",
    f"train.epochs={NEVER}",
)
"""Overrides of a run without evaluation and checkpoints; train.max_steps ends it."""


@dataclass(frozen=True)
class Trial:
    """One run. Its output and its record lie next to its folder."""

    overrides: list[str]
    """Overrides of the run without `run_dir`."""
    run_dir: Path

    @property
    def run_dir_word(self) -> str:
        return word("run_dir", self.run_dir)

    @property
    def record(self) -> Path:
        return self.run_dir.with_name(self.run_dir.name + ".json")

    @property
    def output(self) -> Path:
        return self.run_dir.with_name(self.run_dir.name + ".log")


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    exit_code: int
    seconds: float
    """Wall time of the whole command."""
    summary: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics.jsonl."""
    reason: str = ""
    """Why the run failed; empty if it completed."""
    run_dir: Path = Path()

    @property
    def completed(self) -> bool:
        return not self.reason

    @property
    def train_lines(self) -> list[dict[str, Any]]:
        """The lines of the logging intervals of training."""
        return [line for line in self.metrics if line["kind"] == "train"]


@contextlib.contextmanager
def trial_session(request: Request) -> Iterator[None]:
    """Inside, trials may be run: signals are recorded, and the run directory is locked until
    `request.resources` is closed.

    Raises ConfigError if another study uses the directory, or if it holds trials from other
    conditions.
    """
    lock_run_dir(request)
    here = conditions(request.program)
    for path in sorted(request.run_dir.glob("trials/*/*.json")):
        there = json.loads(path.read_text()).get("conditions", {})
        for name in sorted(here.keys() | there.keys()):
            before = there.get(name, "unknown")
            now = here.get(name, "none")
            if before != now:
                problem = (
                    f"run_dir={request.run_dir}: holds trials from other conditions: {name} was"
                    f" {before} and is {now}; use run_dir={request.run_dir}_new"
                )
                raise ConfigError([problem])
    with request.stop.listening():
        yield


def lock_run_dir(request: Request) -> None:
    """Lock the run directory. Raises ConfigError if another study uses it, or if it cannot be
    written."""
    try:
        request.resources.callback(run_lock.acquire(request.run_dir / run_lock.FILE).release)
    except run_lock.LockHeldError as error:
        raise ConfigError(
            [
                f"run_dir={request.run_dir}: in use by another study, {error}; wait until that"
                f" study ends, or use run_dir={request.run_dir}_new"
            ]
        ) from None
    except OSError as error:
        raise unwritten(request.run_dir, error) from None


def run(trial: Trial, program: Program, stop: StopRequests) -> Outcome | None:
    """Run a trial from the start, in a process session that ends with this process. Must be called
    inside `trial_session`.

    Returns None if the study is stopped, before or during the trial.
    """
    if stop.received:
        return None
    # left by an interrupted trial: resuming it would falsify its times
    shutil.rmtree(trial.run_dir, ignore_errors=True)
    trial.record.unlink(missing_ok=True)
    trial.run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = program.again([*trial.overrides, NO_PAGE, trial.run_dir_word])
    began = time.monotonic()
    with adopting_orphans(), trial.output.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # safe: this process has one thread
        )
        try:
            _wait(process, stop)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if stop.received:
        return None
    seconds = time.monotonic() - began
    ended = {"exit_code": process.returncode, "seconds": round(seconds, 3)}
    write_json(trial.record, {"words": trial.overrides, **ended, "conditions": conditions(program)})
    return recorded_outcome(trial)


def _wait(process: subprocess.Popen[bytes], stop: StopRequests) -> None:
    """Wait for the end. If the study is stopped, send SIGTERM and return after PATIENCE_SECONDS at
    the latest."""
    deadline = None
    while process.poll() is None:
        if stop.received and deadline is None:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_SECONDS
        if stop.repeated or (deadline is not None and time.monotonic() > deadline):
            return
        time.sleep(POLL_SECONDS)


def recorded_outcome(trial: Trial) -> Outcome | None:
    """The outcome of an earlier `run` of this trial; None if there is none that ended.

    Raises ConfigError if that run had other overrides.
    """
    if not trial.record.is_file():
        return None
    record = json.loads(trial.record.read_text())
    if record["words"] != trial.overrides:
        differing = " ".join(sorted(set(record["words"]) ^ set(trial.overrides)))
        problem = (
            f"run_dir={trial.run_dir}: holds a trial with other settings ({differing}); give the"
            " study a new run_dir"
        )
        raise ConfigError([problem])
    return read_outcome(trial.run_dir, record["exit_code"], record["seconds"], trial.output)


def completed_outcome(trial: Trial) -> Outcome | None:
    """The outcome of an earlier `run` of this trial if it completed.

    Raises ConfigError if that run had other overrides.
    """
    outcome = recorded_outcome(trial)
    return outcome if outcome and outcome.completed else None


def run_or_load(
    request: Request, trial: Trial, name: str, describe: Callable[[Outcome], str]
) -> Outcome | None:
    """The outcome of the trial, which is run unless it completed earlier. None if the study is
    stopped.

    name: text to print before the run.
    describe: makes the text to print after a completed run.
    """
    earlier = completed_outcome(trial)
    if earlier or request.stop.received:
        return earlier
    print(name, end="  ", flush=True)
    outcome = run(trial, request.program, request.stop)
    if outcome is None:
        print("stopped", flush=True)
    else:
        print(outcome.reason or describe(outcome), flush=True)
    return outcome


def read_outcome(
    run_dir: Path, exit_code: int, seconds: float, output: Path | None = None
) -> Outcome:
    """The outcome of a run from its directory.

    output: file with the output of the command, for a run that failed without a report.
    """
    summary = _read(run_dir / SUMMARY)
    if exit_code == 0 and summary.get("status") == "completed":
        metrics = [json.loads(line) for line in _lines(run_dir / "metrics.jsonl")]
        return Outcome(exit_code, seconds, summary, metrics, run_dir=run_dir)
    failure = _read(run_dir / FAILURE)
    if failure:
        reason = f"{failure['kind']}: {failure['detail']}"
    else:
        lines = _lines(output) if output else []
        problems = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
        reason = "; ".join([f"exit code {exit_code}", *(problems or lines[-1:])])
    reason = " ".join(reason.split())
    if len(reason) > REASON_LETTERS:
        reason = reason[: REASON_LETTERS - 3] + "..."
    return Outcome(exit_code, seconds, {}, reason=reason, run_dir=run_dir)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
