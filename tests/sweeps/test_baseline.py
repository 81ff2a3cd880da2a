"""What sharing a host costs a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.sweeps.baseline import Baseline
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.results import (
    append_row,
    ended_row,
)
from ddp_train.sweeps.trial_numbers import TrialNumbers
from tests.sweeps.test_pruning import listener_of


def test_a_baseline_compares_a_trial_with_itself(tmp_path: Path) -> None:
    rows = [
        {"trial": 0, "status": "failed", "words": ["a=1"], "at_once": 4},
        {
            "trial": 1,
            "status": "completed",
            "words": ["a=2"],
            "at_once": 4,
            "samples_per_second": 600.0,
        },
    ]
    numbers = TrialNumbers(tmp_path, 2, "now")
    baseline = Baseline(is_wanted=True)
    assert (
        Baseline().choose(rows, rows, numbers) is None
        and baseline.choose(rows[:1], rows, numbers) is None
    )
    assert baseline.text(rows) == ""
    assert (
        baseline.choose(rows, rows, numbers) == (2, ["a=2"])
        and baseline.choose(rows, rows, numbers) is None
    )
    own = {
        "trial": 2,
        "alone": 1,
        "status": "completed",
        "words": ["a=2"],
        "samples_per_second": 800.0,
    }
    again = Baseline(is_wanted=True)
    assert again.choose(rows, [*rows, own], TrialNumbers(tmp_path, 2, "later")) is None, (
        "it is known"
    )
    assert "600 samples/s beside 3 other trials, and 800 alone" in again.text(
        rows
    ) and " 3.00 times the work" in again.text(rows)
    append_row(tmp_path, own)
    assert ended_row(tmp_path, ["a=2"], True) is None, "it is no trial"


def test_trials_too_short_to_compare_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "trial": 0,
        "status": "completed",
        "words": ["a=1"],
        "at_once": 2,
        "samples_per_second": 9000.0,
    }
    alone = Baseline(
        is_wanted=True, number=2, row=row | {"trial": 2, "alone": 0, "samples_per_second": 850.0}
    )
    assert (
        "was not measured: trial 0 had 9,000 samples/s beside 1 other trial, and 850 alone, but"
        " trials of 0.2 s are too short" in (alone.text([row | {"seconds": 0.2}]))
    )
    assert "The trial was slower alone, so this host probably" in alone.text(
        [row | {"seconds": 20.0}]
    )
    assert "do 1.00 times the work" in alone.text(
        [row | {"seconds": 20.0, "samples_per_second": 425.0}]
    )
    listener = listener_of(SweepPlan(tmp_path, total=2, swept=frozenset({"a"})))
    listener.state.baseline = alone
    listener.state.begun = {0, 1}
    listener.job_started(2, ["a=1"], [])
    assert capsys.readouterr().out == "trial 2: a=1  (trial 0 alone)\n", "it is no third of two"
