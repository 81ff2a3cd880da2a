"""Trials that end before their time."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus

from ddp_train.sweeps import pruning
from ddp_train.sweeps.outcomes import value_of
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.results import (
    append_row,
    read_rows,
)
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.sweep_state import SweepState
from hydra_plugins.ddp_train_pool import Pruned
from tests.support.commands import (
    PROGRAM,
)


def test_what_a_run_has_scored_so_far_is_read_from_its_metrics(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "step": 1, "loss": 9.0},
        {"kind": "validation", "step": 1, "loss": 2.0, "accuracy": 0.5},
        {"kind": "test", "step": 1, "loss": 3.0},
        {"kind": "validation", "step": 2, "loss": None, "accuracy": 0.75},
    ]
    reports = pruning.ObjectiveValues(tmp_path)
    file = tmp_path / "metrics.jsonl"
    assert reports.read("auto") == []
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(text + '{"kind": "validation", "st')
    first, second = reports.read("auto")
    assert first == 2.0 and math.isnan(second)
    assert reports.read("validation.accuracy") == [0.5, 0.75] and reports.read("test.loss") == [3.0]
    with file.open("a") as more:
        more.write('ep": 3, "accuracy": 0.8}\n')
    assert reports.read("validation.accuracy") == [0.5, 0.75, 0.8], "the rest of a line came later"
    (tmp_path / "part").write_text(text)
    (tmp_path / "part").replace(file)
    assert reports.read("validation.accuracy") == [0.5, 0.75], "it was resumed, before the third"
    assert pruning.pruned_outcome(tmp_path) is None
    pruning.mark_pruned(tmp_path, 2, 0.5)
    row = pruning.pruned_outcome(tmp_path) or {}
    assert (row["status"], row["exit_code"], row["evaluations"], row["last_value"]) == (
        "pruned",
        0,
        2,
        0.5,
    )
    assert isinstance(value_of(row), Pruned)


def listener_of(plan: SweepPlan) -> PoolListener:
    return PoolListener(TrialRunner(PROGRAM, SweepState(plan), None))


def test_a_pruned_trial_keeps_its_row_whoever_was_killed(tmp_path: Path) -> None:
    """The mark is there before the trial is stopped: its launcher, or the sweep, may die at any
    moment after it."""
    listener = listener_of(SweepPlan(tmp_path, pruner="median"))
    (tmp_path / "0").mkdir()
    assert listener.known_value(0, ["a=1"]) is None
    listener.job_pruned(0, 3, 0.5)
    assert isinstance(listener.known_value(0, ["a=1"]), Pruned)
    assert [row["status"] for row in read_rows(tmp_path)] == ["pruned"]
    assert listener.known_value(0, ["a=1"]) == 0.5
    assert len(read_rows(tmp_path)) == 1, "written once"
    returned = JobReturn(status=JobStatus.FAILED)
    returned.return_value = RuntimeError("killed")
    listener.job_pruned(1, 2, 0.25)
    listener.job_ended(1, ["a=2"], returned, -9, 1.0)
    assert isinstance(returned.return_value, Pruned) and listener.state.exit_code() == 0


def test_what_was_pruned_runs_in_a_sweep_that_prunes_nothing(tmp_path: Path) -> None:
    listener = listener_of(SweepPlan(tmp_path))
    append_row(tmp_path, {"trial": 0, "status": "pruned", "words": ["a=1"], "overrides": ["a=1"]})
    listener.job_pruned(0, 3, 0.5)
    assert listener.known_value(0, ["a=1"]) is None
    assert pruning.pruned_outcome(tmp_path / "0") is None, "if it is stopped now, it was not pruned"
