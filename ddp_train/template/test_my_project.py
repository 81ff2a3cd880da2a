"""python -m pytest, in this folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from my_project.data import Spots
from my_project.model import Finder
from my_project.task import FindSpots
from torch.utils.data import default_collate


def test_the_halves_of_a_batch_add_up_to_its_loss() -> None:
    """Then a run has the same result on any number of processes."""
    data = Spots(train=False)
    model = Finder()
    task = FindSpots()
    pictures, places = default_collate([data[number] for number in range(10)])
    whole, count = task.loss(model, (pictures, places))
    halves = [
        task.loss(model, (pictures[part], places[part])) for part in (slice(0, 7), slice(7, 10))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in halves), whole)
    assert sum(number for _, number in halves) == count == 10
    assert task.score(model, (pictures, places)).keys() >= task.better.keys()


# In half a minute prove("experiment=spots"), of ddp_train.testing, fails with a table of what
# breaks if a result depends on the number of processes, or does not survive a kill. On the command
# line: mode=prove.
def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ddp_train",
        "experiment=spots",
        "debug=tiny",
        f"run_dir={tmp_path / 'run'}",
    ]
    subprocess.run(command, cwd=Path(__file__).parent, timeout=300, check=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["test"]["samples"] == 240
    assert {"loss", "distance", "hits"} <= summary["test"].keys()
