"""The self-test of gradients: it passes where gradients agree, and fails, by name, where something was done to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.loop import fit
from ddp_train.study.gradient_probe import GradientProbe
from ddp_train.study.gradients import compare
from tests.commands import run
from tests.jobs import config_of, job_of
from tests.ranks import on_ranks


class Stumbling(nn.Module):
    """A bias before batch norm, one before a ReLU in place, which does not count, dropout, and a layer never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.second, self.other_norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.dropout, self.last, self.idle = nn.Dropout(0.5), nn.Linear(16, 10), nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(images.flatten(1)))
        hidden = self.other_norm(torch.relu_(self.second(hidden)))
        return self.last(self.dropout(hidden))


def probed(world: World, folder: str, model: dict[str, Any], strategy: dict[str, Any], spoil: bool = False) -> None:
    """One step on 23 samples: 8, 8 and 7 of three processes."""
    config = config_of(
        world,
        model=model,
        data={"name": "digits", "limit": 23},
        train={"global_batch_size": 24, "max_steps": 1},
        strategy=strategy,
        tuning={"precision": "fp64"},
        deterministic=False,
        trusted_modules=["tests"],
    )
    job = job_of(config, world)
    if spoil and world.rank == 1:
        weight = next(job.module.model.parameters())
        weight.register_hook(lambda gradient: gradient * 2)
    with GradientProbe(job, Path(folder), world.is_leader):
        fit(job)
    assert job.step == 1 and "update" not in vars(job.stepper)


def found(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    probe = folder / "probe"
    return load_file(probe / "gradients.safetensors"), json.loads((probe / "model.json").read_text())


CNN = {"name": "cnn", "channels": 8, "norm": "group"}
SINGLE, DDP = {"name": "single"}, {"name": "ddp"}


def difference(
    tmp_path: Path, model: dict[str, Any], strategy: dict[str, Any], spoil: bool = False
) -> tuple[float, str]:
    """The largest relative one of three processes against one, and where."""
    for ranks, chosen in ((1, SINGLE), (3, strategy)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        on_ranks(ranks, probed, str(folder), model, chosen, spoil)
    worst, *_ = compare(found(tmp_path / "1")[0], found(tmp_path / "3")[0])
    return worst.relative, worst.name


def test_gradients_of_three_processes_are_those_of_one(tmp_path: Path) -> None:
    assert difference(tmp_path, CNN, DDP)[0] < 1e-9
    assert found(tmp_path / "3")[1]["ranks_differ"] == []


def test_batch_norm_needs_the_samples_of_all(tmp_path: Path) -> None:
    assert difference(tmp_path, CNN | {"norm": "batch"}, DDP)[0] > 1e-2
    assert (
        set(found(tmp_path / "3")[1]["batch_norm"].values()) == {8} and len(found(tmp_path / "1")[1]["batch_norm"]) > 1
    )


def test_synchronised_batch_norm_has_them(tmp_path: Path) -> None:
    assert difference(tmp_path, CNN | {"norm": "batch"}, DDP | {"sync_bn": True})[0] < 1e-9


def test_a_gradient_that_one_process_spoils_is_named(tmp_path: Path) -> None:
    relative, name = difference(tmp_path, CNN, DDP, spoil=True)
    assert relative > 1e-2 and name == "0.weight"


def test_what_a_model_may_stumble_over_is_named(tmp_path: Path) -> None:
    model = {"name": "custom", "target": "tests.test_gradients.Stumbling"}
    on_ranks(3, probed, str(tmp_path), model, DDP | {"find_unused_parameters": True})
    gradients, facts = found(tmp_path)
    assert facts["unused"] == ["idle.weight", "idle.bias"] and not {"idle.weight", "idle.bias"} & set(gradients)
    assert facts["bias_before_norm"] == ["first.bias"]
    assert facts["batch_norm"] == {"norm": 8, "other_norm": 8} and facts["dropout"] == ["dropout"]
    assert facts["ranks_differ"] == []


def test_small_gradients_are_measured_by_the_large_ones() -> None:
    one = {"large": np.array([1.0, -2.0]), "zero": np.array([1e-17])}
    other = {"large": np.array([1.0, -2.0]), "zero": np.array([-1e-17])}
    assert compare(one, other)[0].relative < 1e-13
    assert compare(one, other | {"large": np.array([np.nan, 0.0])})[0].name == "large"


@pytest.mark.slow
def test_the_study_from_the_command_line(tmp_path: Path) -> None:
    words = ["mode=study", "study=gradients", "model=cnn", "model.channels=4", "tuning.precision=fp64"]
    ran = run(*words, "model.norm=batch", f"run_dir={tmp_path}")
    assert ran.returncode == 70, ran.stdout + ran.stderr
    summary, *_, stumbles = json.loads((tmp_path / "report.json").read_text())["tables"]
    (row,) = summary["rows"]
    assert row[0] == "fp64" and row[3] > 1e-2 and "strategy.sync_bn=true" in row[5]
    assert any("batch norm" in what for what, _, _ in stumbles["rows"])
