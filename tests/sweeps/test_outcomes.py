"""How a trial has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_train.options.schema import Config
from ddp_train.sweeps.outcomes import completed_outcome
from ddp_train.telemetry.pages.trials import trials_table

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_a_trial_without_its_objective_keeps_its_row(tmp_path: Path) -> None:
    """A regression on data of one's own has no accuracy, which is not known before it ran."""
    test = {"loss": 0.5, "accuracy": None, "correct": None, "samples": 3}
    (tmp_path / "summary.json").write_text(json.dumps({"test": test, "seconds": 1.0}))
    row = completed_outcome(Config(run_dir=str(tmp_path), objective="test.accuracy"))
    assert (row["status"], row["objective"], row["loss"]) == ("completed", None, 0.5)
    assert (
        completed_outcome(Config(run_dir=str(tmp_path), objective="samples_per_second"))[
            "objective"
        ]
        is None
    )


def test_a_metric_of_the_users_replaces_no_field_of_a_row(tmp_path: Path) -> None:
    names = ("status", "objective", "trial", "seconds", "run_dir", "kind", "distance")
    test = {"loss": 0.5, **dict.fromkeys(names, 7.0), "samples": 3}
    (tmp_path / "summary.json").write_text(json.dumps({"test": test, "seconds": 1.0}))
    outcome = completed_outcome(Config(run_dir=str(tmp_path), objective="test.loss"))
    assert (outcome["status"], outcome["objective"], outcome["seconds"]) == ("completed", 0.5, 1.0)
    assert not {"trial", "run_dir", "kind"} & outcome.keys()
    assert outcome["distance"] == 7.0 and outcome["metrics"] == dict.fromkeys(names, 7.0)
    row = {"trial": 4, "overrides": ["optimizer.lr=0.1"], "exit_code": 0} | outcome
    table = trials_table([row], "test.loss")
    line = dict(zip(table.columns, table.rows[0], strict=True))
    assert (line["trial"], line["seconds"], line["test.trial"], line["test.seconds"]) == (
        4,
        1,
        7,
        7,
    )


def test_a_trial_that_scored_chosen_sets_has_a_row(tmp_path: Path) -> None:
    """As by mode=evaluate evaluate.sets=[validation]."""
    summary = {"test": None, "validation": {"loss": 0.5, "samples": 3}, "seconds": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    outcome = completed_outcome(Config(run_dir=str(tmp_path), objective="validation.loss"))
    assert (outcome["objective"], outcome["validation"]["samples"]) == (0.5, 3)
