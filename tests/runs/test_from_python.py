"""`ddp_train.run` and `ddp_train.load`: a run from a script, its result, and its model without data
or processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ddp_train
from ddp_train.data.config import DigitsConfig
from ddp_train.errors import ConfigError, DataError
from tests.support.commands import LIMIT_SECONDS, ROOT, THREE
from tests.support.jobs import datasets_of

SCRIPT = f"""
import json
import ddp_train

words = ["model=cnn", "model.norm=batch", "data.limit=120", "train.epochs=2", "train.ema_decay=0.5"]
result = ddp_train.run(*words, "{THREE}")
print("RESULT", json.dumps([str(result.run_dir), result.summary["status"], result.best, len(result.metrics)]))
try:
    ddp_train.run("model=mlp", "train.epochs=1", "hooks=[fails.Fails]")
except ddp_train.RunFailedError as error:
    print("FAILED", error.exit_code, error.kind, error, "|", error.remedy)
"""
FAILS = """
class Fails:
    def __init__(self, job, run_dir, world):
        pass

    def __enter__(self):
        raise ValueError("not today")

    def __exit__(self, *_):
        pass
"""


@pytest.mark.slow
@pytest.mark.true_command
def test_script_without_a_main_guard_trains_and_takes_the_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "fails.py").write_text(FAILS)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("processes      3 x cpu") == 1, "what the run prints is seen"
    found = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    folder, status, best, lines = json.loads(found.removeprefix("RESULT "))
    assert status == "completed" and best["step"] in (2, 4) and lines >= 4
    failed = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert failed == (
        "FAILED 70 exception ValueError: not today; see the traceback | see the traceback"
    )

    run_dir = tmp_path / folder
    model = ddp_train.load(run_dir)
    assert not model.training
    test = datasets_of(DigitsConfig(limit=120))[1]
    summary = json.loads((run_dir / "summary.json").read_text())["test"]
    inputs, labels = test.get_batch(np.arange(len(test)), None)
    with torch.no_grad():
        assert (model(inputs).argmax(1) == labels).sum() == summary["correct"]
        loss = nn.functional.cross_entropy(ddp_train.load(run_dir, average=True)(inputs), labels)
    torch.testing.assert_close(loss.item(), summary["ema_loss"], rtol=1e-5, atol=0)
    with pytest.raises(DataError, match="has no best checkpoint"):
        ddp_train.load(run_dir, which="best")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.epoch=1"], r"train.epoch=1: no such key; did you mean train.epochs\?"),
        (
            ["-m", "optimizer.lr=0.1,0.2"],
            r"ddp_train.run\('-m'\): takes key=value and no flags",
        ),
        (["mode=doctor"], "for mode=doctor use the command line"),
    ],
)
def test_wrong_overrides_are_raised_before_anything_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match=message):
        ddp_train.run(*words)
    assert list(tmp_path.iterdir()) == []


def test_model_of_a_result_is_annotated_as_what_load_returns() -> None:
    declared = ddp_train.Result.model.__annotations__["return"]
    assert declared == ddp_train.load.__annotations__["return"] == "Trained"
