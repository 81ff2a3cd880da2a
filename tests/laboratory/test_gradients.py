"""The self-test of gradients: it passes where gradients agree, and fails, by name, where something
was done to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from ddp_lab.study import gradients, trials
from ddp_lab.study.gradient_difference import compare
from ddp_lab.study.gradient_probe import GradientProbe
from ddp_lab.study.model_pitfalls import pitfalls_of
from ddp_lab.study.trials import Outcome, Trial, run
from ddp_train.distributed.world import World
from ddp_train.engine.hook_context import HookContext
from ddp_train.engine.loop import fit
from ddp_train.launcher.stop_requests import StopRequests
from tests.support.jobs import config_of, job_of
from tests.support.ranks import on_ranks
from tests.support.studies import asked, leave, value


class Stumbling(nn.Module):
    """A bias before batch norm, one before a ReLU in place, which does not count, dropout, and a
    layer never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.other_norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(16, 10)
        self.idle = nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(input=self.first(images.flatten(1)))
        hidden = self.other_norm(torch.relu_(self.second(hidden)))
        return self.last(self.dropout(hidden))


class LooksAtValues(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * (2 if images.isfinite().all() else 1)


def probed(
    world: World, folder: str, model: dict[str, Any], strategy: dict[str, Any], spoil: bool = False
) -> None:
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
    with GradientProbe(HookContext(job, Path(folder), world), Path(folder), world):
        fit(job)
    assert job.step == 1 and "update" not in vars(job.stepper)
    assert not any(layer._forward_pre_hooks for layer in job.module.model.modules())


def found(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    probe = folder / "probe"
    return load_file(probe / "gradients.safetensors"), json.loads(
        (probe / "model.json").read_text()
    )


CNN = {"name": "cnn", "channels": 8, "norm": "group"}
SINGLE = {"name": "single"}
DDP = {"name": "ddp"}
ONE = {
    "group": (CNN, SINGLE),
    "batch": (CNN | {"norm": "batch"}, SINGLE),
    "values": (
        {"name": "custom", "target": "tests.laboratory.test_gradients.LooksAtValues"},
        SINGLE,
    ),
}
"""Name: model and strategy."""
THREE = {
    "group": (CNN, DDP),
    "spoilt": (CNN, DDP),
    "batch": (CNN | {"norm": "batch"}, DDP),
    "sync_bn": (CNN | {"norm": "batch"}, DDP | {"sync_bn": True}),
    "stumbling": (
        {"name": "custom", "target": "tests.laboratory.test_gradients.Stumbling"},
        DDP | {"find_unused_parameters": True},
    ),
}


def all_probed(
    world: World, folder: str, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    for name, (model, strategy) in cases.items():
        probed(world, str(Path(folder, name)), model, strategy, spoil=name == "spoilt")


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one process and of three: a folder for each, with one for each case."""
    folder = tmp_path_factory.mktemp("probes")
    for ranks, cases in ((1, ONE), (3, THREE)):
        for name in cases:
            (folder / str(ranks) / name).mkdir(parents=True)
        on_ranks(ranks, all_probed, str(folder / str(ranks)), cases)
    return folder


def difference(probes: Path, one: str, three: str) -> tuple[float, str]:
    """The largest relative one of three processes against one, and where."""
    worst, *_ = compare(found(probes / "1" / one)[0], found(probes / "3" / three)[0])
    return worst.relative, worst.name


def test_gradients_of_three_processes_are_those_of_one(probes: Path) -> None:
    assert difference(probes, "group", "group")[0] < 1e-9
    assert found(probes / "3" / "group")[1]["ranks_differ"] == []


def test_batch_norm_needs_the_samples_of_all(probes: Path) -> None:
    assert difference(probes, "batch", "batch")[0] > 1e-2
    assert set(found(probes / "3" / "batch")[1]["batch_norm"].values()) == {8}
    assert len(found(probes / "1" / "batch")[1]["batch_norm"]) > 1


def test_synchronised_batch_norm_has_them(probes: Path) -> None:
    assert difference(probes, "batch", "sync_bn")[0] < 1e-9


def test_a_gradient_that_one_process_spoils_is_named(probes: Path) -> None:
    relative, name = difference(probes, "group", "spoilt")
    assert relative > 1e-2 and name == "0.weight"


def test_what_a_model_may_stumble_over_is_named(probes: Path) -> None:
    named, facts = found(probes / "3" / "stumbling")
    assert facts["unused"] == ["idle.weight", "idle.bias"] and not {
        "idle.weight",
        "idle.bias",
    } & set(named)
    assert facts["bias_before_norm"] == ["first.bias"]
    assert facts["batch_norm"] == {"norm": 8, "other_norm": 8} and facts["dropout"] == ["dropout"]
    assert facts["ranks_differ"] == []


def test_what_could_not_be_looked_at_is_named(probes: Path) -> None:
    facts = found(probes / "1" / "values")[1]
    assert facts["bias_before_norm"] == [] and facts["batch_norm"] == {"2": 23}
    assert facts["unseen"] == ["biases before norm layers: the model cannot run on the meta device"]
    assert facts["unseen"] in pitfalls_of(facts, 1).values()
    assert found(probes / "1" / "batch")[1]["unseen"] == []


def test_small_gradients_are_measured_by_the_large_ones() -> None:
    one = {"large": np.array([1.0, -2.0]), "zero": np.array([1e-17])}
    other = {"large": np.array([1.0, -2.0]), "zero": np.array([-1e-17])}
    assert compare(one, other)[0].relative < 1e-13
    assert compare(one, other | {"large": np.array([np.nan, 0.0])})[0].name == "large"


WORDS = (
    "study=gradients",
    "model=cnn",
    "model.channels=8",
    "data.limit=23",
    "train.global_batch_size=24",
)


def runs_of(
    probes: Path, case: str, real: str = ""
) -> Callable[[Trial, Path, StopRequests], Outcome | None]:
    """What a study runs: processes that were probed before. real: the number of them in runs that
    are real ones."""

    def made(trial: Trial, script: Path, stop: StopRequests) -> Outcome | None:
        processes = value(trial, "launch.nproc_per_node")
        if processes == real:
            return run(trial, script, stop)
        left = leave(trial, script, [])
        shutil.copytree(probes / processes / case / "probe", trial.run_dir / "probe")
        return left

    return made


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_a_real_run_of_three_processes_agrees_with_one(
    probes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(trials, "run", runs_of(probes, "group", real="3"))
    report, code = gradients.study(asked(*WORDS, "tuning.precision=fp64", f"run_dir={tmp_path}"))
    (row,) = report.tables[0].rows
    assert code == 0 and row[0] == "fp64" and 0 < row[3] < 1e-9 and row[5] == "agree", row


@pytest.mark.slow
def test_a_study_fails_where_gradients_differ_and_says_why(
    probes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(trials, "run", runs_of(probes, "batch"))
    report, code = gradients.study(asked(*WORDS, "model.norm=batch", f"run_dir={tmp_path}"))
    summary, *_, pitfalls = report.tables
    assert code == 70 and [row[0] for row in summary.rows] == ["fp64", "fp32"]
    assert all(row[3] > 1e-2 and "strategy.sync_bn=true" in row[5] for row in summary.rows)
    assert any("batch norm" in what for what, _, _ in pitfalls.rows)
