"""Warnings of a run by config where a checkpoint is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import THREE, environment, run

TABLES = """
import torch
from torch import nn
from torch.nn import functional as F

from ddp_train import all_gather


class Numbered(torch.utils.data.Dataset):
    def __init__(self, train=True):
        self.x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return self.x[number], number


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.register_buffer("table", torch.zeros(24, 3))
        self.register_buffer("counts", torch.zeros(24, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(24, dtype=torch.bool))


class OfOwnRows:
    def rows(self, numbers, outputs):
        return numbers, outputs.detach()

    def loss(self, model, batch):
        x, numbers = batch
        outputs = model(x)
        places, rows = self.rows(numbers, outputs)
        model.table[places] = 0.5 * model.table[places] + rows
        model.counts[places] += 1
        model.seen[places] = model.counts[places] > 0
        return F.mse_loss(outputs, model.table[numbers] + 1, reduction="sum"), len(x)

    def score(self, model, batch):
        x, _ = batch
        return {"loss": (model(x).square().sum(), len(x))}


class OfAllRows(OfOwnRows):
    def rows(self, numbers, outputs):
        return all_gather(numbers)[0], all_gather(outputs.detach())[0]
"""


@pytest.mark.slow
def test_buffers_that_each_process_fills_alone_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text(TABLES)
    env = environment({"PYTHONPATH": str(tmp_path)})
    warnings = {}
    for task in ("OfOwnRows", "OfAllRows"):
        done = run(
            THREE,
            "data._target_=tables.Numbered",
            "data.outputs=3",
            "model._target_=tables.Net",
            f"task._target_=tables.{task}",
            "train.epochs=3",
            "train.global_batch_size=12",
            f"run_dir={tmp_path}/{task}",
            env=env,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        warnings[task] = [line for line in said.splitlines() if "not the same on all" in line]
    (warning,) = warnings["OfOwnRows"]
    assert "model.table, model.counts, model.seen:" in warning
    assert "ddp_train.all_gather(indices)" in warning
    assert warnings["OfAllRows"] == []
