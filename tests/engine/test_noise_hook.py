"""What a run says of random numbers that its steps draw."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.data.rng import StepSeed
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit
from ddp_train.engine.noise_hook import BY_RANK, NOT_SEEDED, NoiseHook
from tests.support.commands import THREE, run
from tests.support.jobs import config_of, job_of, table


class Draws(nn.Module):
    """Draws from one of the generators in training."""

    def __init__(self, whose: str) -> None:
        super().__init__()
        self.whose = whose

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        if self.whose == "torch":
            return inputs + torch.randn_like(inputs)
        if self.whose == "numpy":
            return inputs + float(np.random.rand())
        if self.whose == "Python":
            return inputs + random.random()
        return inputs


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        ("nobody", []),
        ("torch", [BY_RANK]),
        ("numpy", [NOT_SEEDED.format("numpy's")]),
        ("Python", [NOT_SEEDED.format("Python's")]),
    ],
)
def test_draws_of_a_step_are_told_once(whose: str, said: list[str]) -> None:
    config = config_of(
        World(),
        strategy={"name": "single"},
        model={"name": "mlp", "hidden": 4},
        train={"global_batch_size": 12, "epochs": 2},
    )
    job = job_of(config, World(), (table(24), table(24)))
    job.module.model = nn.Sequential(Draws(whose), job.module.model)
    display = mock.Mock()
    seed = StepSeed(config.seed, 0, "cpu")
    job.hooks = [NoiseHook(display, seed.has_moved)]
    fit(job)
    assert job.step == 4
    assert [call.args[0] for call in display.line.call_args_list] == said


NOISY = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10)
        )
"""


@pytest.mark.slow
def test_plan_says_what_depends_on_the_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    words = ["model._target_=noisy.Net", "data.limit=60", "train.global_batch_size=30"]
    words += ["train.max_steps=1"]
    done = run(*words, THREE, "run_dir=a", cwd=tmp_path)
    assert "batch norm     statistics of each process's own samples" in done.stdout, done.stderr
    assert done.stdout.count(BY_RANK) == 1
    done = run(*words, THREE, "strategy.sync_bn=true", "run_dir=b", cwd=tmp_path)
    assert "batch norm     statistics" not in done.stdout and BY_RANK in done.stdout, done.stderr
    done = run(*words, "launch.nproc_per_node=1", "run_dir=c", cwd=tmp_path)
    assert "batch norm" not in done.stdout and BY_RANK not in done.stdout, done.stderr
