"""A schedule by the evaluations: against a plain loop, resumed within an epoch, refused changes."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.training_state import SCHEDULE, TrainingState
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit, train
from ddp_train.engine.plateau_hook import PlateauHook
from ddp_train.errors import ConfigError
from ddp_train.telemetry.metrics_log import read_metrics
from tests.optim.test_ema import run
from tests.support.jobs import config_of, job_of, table
from tests.support.ranks import on_ranks

PLATEAU = {"patience": 1, "threshold": 0.9, "factor": 0.5}
SECTIONS: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": 8},
    "data": {"name": "digits", "limit": 96},
    "optimizer": {"name": "sgd", "lr": 0.1, "groups": [{"match": "*.bias", "lr": 0.02}]},
    "schedule": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", **PLATEAU},
    "train": {"global_batch_size": 24, "epochs": 4, "log_every_steps": 1},
    "checkpoint": {"every_steps": 3, "keep": 99},
    "tuning": {"precision": "fp64"},
}
"""16 steps, an evaluation after each 4; the third one in a row that is no better halves the rate."""


def whole_and_resumed(world: World, folder: str) -> None:
    """A run, and the same once more from its checkpoint of step 9, within the third epoch."""
    run(world, f"{folder}/whole", **SECTIONS)
    if world.is_leader:
        shutil.copytree(f"{folder}/whole", f"{folder}/again", symlinks=True)
        for place in Path(folder, "again/checkpoints").glob("step_*"):
            if place.name > "step_00000009":
                shutil.rmtree(place)
    torch.distributed.barrier()
    run(world, f"{folder}/again", **SECTIONS)


def trained_plainly() -> dict[str, Tensor]:
    """The weights of a loop without this package, but for its model and its batches."""
    config = config_of(World(), strategy={"name": "single"}, **copy.deepcopy(SECTIONS))
    job = job_of(config, World())
    model = job.module.model
    biases = [weight for name, weight in model.named_parameters() if name.endswith("bias")]
    others = [weight for name, weight in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, **PLATEAU)
    batches = iter(job.batches)
    for _ in range(4):
        model.train()
        for _ in range(4):
            batch = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
        model.eval()
        losses = [
            F.cross_entropy(model(batch.inputs), batch.targets, reduction="none").detach()
            for batch in job.evaluation.batches
        ]
        scheduler.step(torch.cat(losses).mean().item())
    return dict(model.state_dict())


def rates_of(folder: Path) -> list[list[float]]:
    """The learning rates of all groups, step by step."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["lrs"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
def test_plateau_on_three_ranks_is_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    on_ranks(3, whole_and_resumed, str(tmp_path))
    whole, again = tmp_path / "whole", tmp_path / "again"
    rates = [[0.1, 0.02]] * 12 + [[0.05, 0.01]] * 4
    assert rates_of(whole) == rates_of(again) == rates
    one, other = (folder / "checkpoints/step_00000016" for folder in (whole, again))
    name = "model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()
    states = [TrainingState.load(place).objects[SCHEDULE] for place in (one, other)]
    assert states[0] == states[1] and states[0]["scheduler"]["last_epoch"] == 4
    model = job_of(config_of(World(), strategy={"name": "single"}, **SECTIONS), World()).module
    reader.load_model(one, model.model)
    for name, weight in trained_plainly().items():
        difference = (weight - model.model.state_dict()[name]).abs().max()
        assert difference < 1e-10, name


def small_job(**sections: Any) -> Any:
    tiny = {"strategy": {"name": "single"}, "model": {"name": "mlp", "hidden": 4}}
    config = config_of(World(), **tiny, train={"global_batch_size": 8, "epochs": 2}, **sections)
    return job_of(config, World(), (table(32), table(8)))


def test_evaluations_of_other_hooks_are_not_counted_twice() -> None:
    job = small_job(schedule=SECTIONS["schedule"])
    hook = PlateauHook(job.stepper.schedule, "loss")
    assert hook.due(job) == 4
    hook.act(job)
    assert job.stepper.schedule.scheduler.last_epoch == 0, "no evaluation, no step"


def test_a_state_by_another_metric_gives_its_rates_alone() -> None:
    hooks = [
        PlateauHook(small_job(schedule=SECTIONS["schedule"]).stepper.schedule, metric)
        for metric in ("loss", "rmse")
    ]
    for _ in range(3):
        hooks[0].schedule.see(4, 1.0)
    notes = hooks[1].load_state(hooks[0].state())
    assert notes == ["note: the schedule follows rmse now; before the resume it followed loss"]
    assert hooks[1].schedule.values(8) == hooks[0].schedule.values(8) == [{"lr": 0.025}]
    assert hooks[1].schedule.scheduler.last_epoch == 0


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_change_of_the_rate_beside_the_schedule_is_refused(schedule: str) -> None:
    job = small_job(schedule={"name": schedule})
    train(job, iter(job.batches), until=2)
    group = job.stepper.optimizer.param_groups[0]
    group["lr"] = float(str(group["lr"]))  # the same
    train(job, iter(job.batches), until=3)
    group["lr"] *= 0.5
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['lr'\] is .* before step 4"):
        train(job, iter(job.batches), until=4)


def test_a_group_of_parameters_beside_the_schedule_is_refused() -> None:
    job = small_job()
    job.stepper.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="2 groups before step 1, but had 1 when training began"):
        fit(job)
