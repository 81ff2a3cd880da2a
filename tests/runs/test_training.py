"""A run by steps, whose sets have names: scored within epochs, selected by one of them, resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ddp_train.telemetry.pages.compare_page import scores
from ddp_train.telemetry.pages.run_files import read_run
from ddp_train.telemetry.pages.run_page import run_page
from tests.support.commands import THREE, metrics, read, run, weights

CODE = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

class Rows(Dataset):
    classes = 3

    def __init__(self, split, noise=0.0):
        drawn = torch.Generator().manual_seed(len(split))
        self.inputs = torch.randn({"train": 70}.get(split, 25), 6, generator=drawn)
        self.targets = self.inputs[:, :3].argmax(1)
        self.inputs += noise * torch.randn(self.inputs.shape, generator=drawn)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        return self.inputs[number], self.targets[number].item()
"""
WORDS = (
    THREE,
    "data._target_=rows_by_steps.Rows",
    "model._target_=rows_by_steps.Net",
    "data.validation_sets.noisy.noise=2",
    "data.test_sets.blurred.noise=1",
    "train.global_batch_size=15",  # five steps go once through the data
    "train.max_steps=100",
    "train.evaluate_every_steps=4",
    "train.early_stopping.patience=2",
    "train.early_stopping.min_delta=9",
    "train.early_stopping.metric=validation/noisy.loss",
    "checkpoint.best=true",
    "checkpoint.best_metric=validation/noisy.accuracy",
    "checkpoint.keep=99",
    "schedule=constant",
)
"""The first of three evaluations is the best for early stopping: training ends after step 12."""
WHILE_TRAINING = ["validation", "validation/noisy"]
AT_THE_END = ["test", "test/blurred"]


def trained(folder: Path, run_dir: Path) -> str:
    done = run(*WORDS, f"run_dir={run_dir}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("by_steps")
    (folder / "rows_by_steps.py").write_text(CODE)
    return folder, trained(folder, folder / "run")


def without_clock(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, but for the clock and the hardware."""
    measured = ("time", "figures", "samples_per_second")
    lines = []
    for line in metrics(run_dir):
        lines.append({name: line[name] for name in line if name not in measured})
    return lines


@pytest.mark.slow
def test_a_run_by_steps_scores_sets_by_name(whole: tuple[Path, str]) -> None:
    folder, said = whole
    summary = read(folder / "run", "summary.json")
    lines = metrics(folder / "run")
    scored = [(line["kind"], line["step"]) for line in lines if line["kind"] != "train"]
    expected = [(name, step) for step in (4, 8, 12) for name in WHILE_TRAINING]
    assert scored == [*expected, *((name, 12) for name in AT_THE_END)]
    assert (summary["steps"], summary["epochs"], len(summary["epoch_seconds"])) == (12, None, 3)
    assert summary["stopped_early"]["reason"].startswith("validation/noisy.loss: no improvement")
    best = summary["best"]
    assert best["metric"] == "validation/noisy.accuracy"
    values = {line["step"]: line for line in lines if line["kind"] == "validation/noisy"}
    assert best["value"] == values[best["step"]]["accuracy"]
    assert best["value"] == max(line["accuracy"] for line in values.values())
    link = folder / "run/checkpoints/best"
    assert link.resolve().name == f"step_{best['step']:08d}"
    assert best["test/blurred"]["samples"] == summary["test/blurred"]["samples"] == 25
    assert "100, of which 5 go once through the data, scored every 4" in said
    assert "25 in validation/noisy, 25 in test/blurred" in said
    for title in ("step   4/100  loss ", "step 12/12  loss "):
        assert title in said
    assert "validation/noisy accuracy" in said and "test/blurred accuracy" in said


@pytest.mark.slow
def test_a_run_by_steps_resumes_between_evaluations(whole: tuple[Path, str]) -> None:
    """After step 8, of an epoch that ends after step 10; its checkpoint is that of an evaluation."""
    folder, _ = whole
    again = folder / "again"
    shutil.copytree(folder / "run", again, symlinks=True)
    shutil.rmtree(again / "checkpoints/step_00000012")
    (again / "checkpoints/best").unlink()
    assert "from step 8" in trained(folder, again)
    assert weights(again) == weights(folder / "run")
    assert without_clock(again) == without_clock(folder / "run")
    ours = read(again, "summary.json")
    theirs = read(folder / "run", "summary.json")
    for name in (*WHILE_TRAINING, *AT_THE_END, "stopped_early", "train"):
        assert ours[name] == theirs[name]


@pytest.mark.slow
def test_pages_have_each_set_under_its_name(whole: tuple[Path, str]) -> None:
    files = read_run(whole[0] / "run")
    assert files.sets == [*WHILE_TRAINING, *AT_THE_END]
    assert files.scored_sets == WHILE_TRAINING
    page = run_page(files, {})
    titles = [table.title for table in page.tables]
    assert "Evaluations of the validation/noisy set" in titles
    stands_out = {table.title: table.best for table in page.tables}
    assert stands_out["Evaluations of the validation set"] is None
    assert stands_out["Evaluations of the validation/noisy set"] is not None
    assert any(tile.startswith("best validation/noisy accuracy") for tile in page.numbers)
    columns = scores({"one": files, "other": files}).columns
    assert "validation/noisy.accuracy %, best" in columns
    assert "test/blurred.accuracy %, last" in columns
