"""The row of a trial that ran in another process."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from ddp_train.sweeps.outcomes import TrialValue
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.pool import TrialPool
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.results import read_rows
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.sweep_state import SweepState
from hydra_plugins.ddp_train_pool._jobs import JobFailedError
from tests.support.commands import PROGRAM

ROW = {"trial": 0, "status": "failed", "exit_code": 70, "reason": "", "overrides": []}


def ended(listener: PoolListener, value: Any, exit_code: int = 0) -> dict[str, Any]:
    """The row of trial 0 once its job has ended."""
    listener.job_started(0, ["a=1"], [])
    returned = JobReturn(
        overrides=["a=1"], status=JobStatus.FAILED if isinstance(value, Exception) else JobStatus(1)
    )
    returned.return_value = value
    listener.job_ended(0, ["a=1"], returned, exit_code, 1.0)
    return listener.state.rows[-1]


@pytest.fixture
def listener(tmp_path: Path) -> PoolListener:
    plan = SweepPlan(tmp_path, swept=frozenset({"a"}), pool=TrialPool(2, 0))
    return PoolListener(TrialRunner(PROGRAM, SweepState(plan), None))


def test_row_of_a_trial_comes_with_its_result(listener: PoolListener) -> None:
    value = TrialValue(0.5)
    value.row = ROW
    received = pickle.loads(pickle.dumps(value))
    assert ended(listener, received) == ROW
    assert read_rows(listener.sweep_dir) == [ROW]


def test_trial_that_was_killed_has_a_row(listener: PoolListener) -> None:
    ended(listener, JobFailedError("killed"), -signal.SIGKILL)
    (row,) = read_rows(listener.sweep_dir)
    assert (row["kind"], row["reason"]) == ("died", "the trial's launcher was killed by SIGKILL")


def test_a_trial_that_fails_in_our_own_code_says_how(listener: PoolListener) -> None:
    row = ended(listener, ValueError("what nobody thought of"), 1)
    assert (row["kind"], row["exit_code"]) == ("died", 70)
    assert row["reason"] == "ValueError: what nobody thought of"
