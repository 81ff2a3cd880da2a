"""Runs of the ordinary launcher, one after the other, each a command of its own; and what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.config.external_checks import unwritable
from ddp_train.distributed.environment import environment
from ddp_train.errors import ConfigError
from ddp_train.launcher.local import StopRequests
from ddp_train.linux import adopting_orphans, end_with_parent
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY, write_json
from ddp_train.study.provenance import conditions
from ddp_train.study.request import Request

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 20.0
"""From the request to stop to SIGKILL, for a run whose study was stopped."""
REASON_LETTERS = 200


@dataclass(frozen=True)
class Trial:
    """One run: its words, without `run_dir`, and its folder; beside that lie its output and how it ended."""

    overrides: list[str]
    run_dir: Path

    @property
    def run_dir_word(self) -> str:
        """As an override: in quotes where Hydra would read something else."""
        path = str(self.run_dir)
        escaped = path.replace("'", "\\'")
        return f"run_dir={path}" if re.fullmatch(r"[\w./-]+", path) else f"run_dir='{escaped}'"

    @property
    def record(self) -> Path:
        return self.run_dir.with_name(self.run_dir.name + ".json")

    @property
    def output(self) -> Path:
        return self.run_dir.with_name(self.run_dir.name + ".log")


@dataclass(frozen=True)
class Outcome:
    """What a run left. `reason`: why there is no result, "" where there is one."""

    exit_code: int
    seconds: float
    """Of the whole command, from its start to its end."""
    summary: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    run_dir: Path = Path()

    @property
    def completed(self) -> bool:
        return not self.reason


@contextlib.contextmanager
def trial_session(request: Request) -> Iterator[None]:
    """Inside, trials may be run. The run directory is this study's from now on, until `request.resources` is closed.

    Raises ConfigError if another study is in it, or if it holds trials of other conditions.
    """
    lock_run_dir(request)
    here = conditions(request.script)
    for path in sorted(request.run_dir.glob("trials/*/*.json")):
        there = json.loads(path.read_text()).get("conditions", {})
        for name in sorted(here.keys() | there.keys()):
            before, now = there.get(name, "unknown"), here.get(name, "none")
            if before != now:
                rule = f"holds trials of other conditions, {name} {before} and not {now}"
                raise ConfigError([f"run_dir={request.run_dir}: {rule}; name another run_dir"])
    with request.stop.listening():
        yield


def lock_run_dir(request: Request) -> None:
    """Takes the lock of the run directory. Raises ConfigError if another study has it, or if it cannot be written."""
    try:
        request.resources.callback(run_lock.acquire(request.run_dir / run_lock.FILE).release)
    except run_lock.LockHeldError as error:
        raise ConfigError([f"run_dir={request.run_dir}: another study is in it, {error}; wait for it"]) from None
    except OSError as error:
        raise ConfigError([unwritable(str(request.run_dir), error.strerror or str(error))]) from None


def run(trial: Trial, script: Path, stop: StopRequests) -> Outcome | None:
    """Runs a trial anew, in a session of its own that ends with this process. None if `stop` was asked for, before or
    meanwhile.

    Must be called inside `trial_session`.
    """
    if stop.received:
        return None
    shutil.rmtree(trial.run_dir, ignore_errors=True)  # of a trial that was cut short: going on would spoil its times
    trial.record.unlink(missing_ok=True)  # it would tell of a run whose folder is gone, should this one be cut short
    trial.run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(script), *trial.overrides, trial.run_dir_word]
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
    write_json(trial.record, {"words": trial.overrides, **ended, "conditions": conditions(script)})
    return recorded_outcome(trial)


def _wait(process: subprocess.Popen[bytes], stop: StopRequests) -> None:
    """Until it ends; after a request to stop, for so long as a run needs to stop by itself."""
    deadline = None
    while process.poll() is None:
        if stop.received and deadline is None:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_SECONDS
        if stop.insists or (deadline is not None and time.monotonic() > deadline):
            return
        time.sleep(POLL_SECONDS)


def recorded_outcome(trial: Trial) -> Outcome | None:
    """What an earlier `run` of this trial left; None if it never came to its end.

    Raises ConfigError if it was a run with other words.
    """
    if not trial.record.is_file():
        return None
    record = json.loads(trial.record.read_text())
    if record["words"] != trial.overrides:
        before, now = set(record["words"]), set(trial.overrides)
        differ = " ".join(sorted(before ^ now))
        rule = f"holds a trial with other settings ({differ})"
        raise ConfigError([f"run_dir={trial.run_dir}: {rule}; name another run_dir"])
    return read_outcome(trial.run_dir, record["exit_code"], record["seconds"], trial.output)


def completed_outcome(trial: Trial) -> Outcome | None:
    """What an earlier `run` of this trial left, if it was completed. Raises as `recorded_outcome` does."""
    before = recorded_outcome(trial)
    return before if before and before.completed else None


def run_or_load(request: Request, trial: Trial, name: str, tell: Callable[[Outcome], str]) -> Outcome | None:
    """What the trial left: earlier, if it was completed, or now. None if it was to be run and the study is stopped.

    name, tell: what is printed before and after it is run.
    """
    before = completed_outcome(trial)
    if before or request.stop.received:
        return before
    print(name, end="  ", flush=True)
    now = run(trial, request.script, request.stop)
    print("stopped" if now is None else now.reason or tell(now), flush=True)
    return now


def read_outcome(run_dir: Path, exit_code: int, seconds: float, output: Path | None = None) -> Outcome:
    """Reads a run directory. output: what the command printed, for a run that ended before it had a directory."""
    summary, failure = _read(run_dir / SUMMARY), _read(run_dir / FAILURE)
    if exit_code == 0 and summary.get("status") == "completed":
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").is_file() else []
        return Outcome(exit_code, seconds, summary, [json.loads(line) for line in lines], "", run_dir)
    if failure:
        reason = f"{failure['kind']}: {failure['detail']}"
    else:
        said = output.read_text().splitlines() if output and output.is_file() else []
        problems = [line.removeprefix("  - ") for line in said if line.startswith("  - ")]
        reason = "; ".join([f"exit code {exit_code}", *(problems or said[-1:])])
    flat = " ".join(reason.split())
    flat = flat if len(flat) <= REASON_LETTERS else flat[: REASON_LETTERS - 3] + "..."
    return Outcome(exit_code, seconds, {}, [], flat, run_dir)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
