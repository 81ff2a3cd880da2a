"""Studies in this process, whose runs are real commands, or leave what those would leave: seconds,
not minutes."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ddp_lab.study.provenance import conditions
from ddp_lab.study.request import Request, read_request
from ddp_lab.study.trials import Outcome, Trial, recorded_outcome
from ddp_lab.study.variants import Study, plan
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.whole_files import write_json
from tests.support.commands import PROGRAM

TINY = (
    "data.limit=48",
    "train.global_batch_size=24",
    "model=mlp",
    "train.epochs=2",
    "train.log_every_steps=1",
)
"""Two epochs of two steps each."""


def asked(*overrides: str) -> Request:
    """What a command line with mode=study asks for."""
    return read_request(PROGRAM, ["mode=study", *overrides])


def value(trial: Trial, key: str) -> str:
    """That a trial is given on its command line."""
    return next(word.partition("=")[2] for word in trial.overrides if word.startswith(f"{key}="))


def leave(
    trial: Trial,
    script: Path,
    lines: Sequence[dict[str, Any]],
    summary: dict[str, Any] | None = None,
    failure: dict[str, str] | None = None,
) -> Outcome | None:
    """In place of `trials.run`: the files of a run. lines: of metrics.jsonl; failure: of a run that
    failed."""
    shutil.rmtree(trial.run_dir, ignore_errors=True)
    trial.run_dir.mkdir(parents=True)
    (trial.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(
        trial.run_dir / SUMMARY, {"status": "failed" if failure else "completed", **(summary or {})}
    )
    if failure:
        write_json(trial.run_dir / FAILURE, failure)
    record = {"words": trial.overrides, "exit_code": 70 if failure else 0, "seconds": 1.0}
    write_json(trial.record, {**record, "conditions": conditions(script)})
    return recorded_outcome(trial)


def planned(*words: str) -> Study:
    """The study of a command line."""
    return plan(read_request(PROGRAM, ["mode=study", *words]))


@functools.cache
def whole(name: str) -> tuple[Request, Study]:
    """A study as it is in its file, on a machine without GPUs: to compose all runs of one takes
    seconds."""
    request = read_request(PROGRAM, ["mode=study", f"study={name}"])
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        return request, plan(request)


def outcome(
    epoch_seconds: list[float], accuracy: float = 0.9, losses: tuple[float, ...] = (1.0, 0.5)
) -> Outcome:
    """As `trials.read_outcome` reads it from the files of a run."""
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    test = {"loss": 0.1, "accuracy": accuracy}
    seen = 100 * len(epoch_seconds)
    summary = {
        "epoch_seconds": epoch_seconds,
        "samples_seen": seen,
        "seconds": 9.0,
        "test": test,
        "epochs": 2,
        "steps": 2,
    }
    return Outcome(0, 12.0, summary, lines)
