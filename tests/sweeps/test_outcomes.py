"""How a trial has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_train.options.schema import Config
from ddp_train.sweeps.outcomes import completed_outcome

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
