"""The schedule that a config names: functions, schedulers within schedulers, what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ddp_train.assembly.schedule import schedule_of
from ddp_train.config.bind import bind
from ddp_train.errors import ConfigError

TORCH = "torch.optim.lr_scheduler"
PLAN: Any = SimpleNamespace(steps=12, steps_per_epoch=5)


def half_way(step: int, steps: int, low: float = 0.5) -> float:
    return low if 2 * step >= steps else 1.0


def nothing(step: int, steps: int) -> Any:
    return None if step == 7 else 1.0


def decay(step: int) -> float:
    return 0.5**step


def no_scheduler(optimizer: Any) -> Any:
    return optimizer


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.1, 0.02)]
    return torch.optim.SGD(groups, momentum=0.9)


def made(values: dict[str, Any], captured: bool = False) -> Any:
    config, problems = bind({"schedule": copy.deepcopy(values)})
    assert not problems
    better = {"loss": "min", "accuracy": "max"}
    return schedule_of(config.schedule, PLAN, optimizer(), better, captured)


def rates(values: dict[str, Any]) -> list[float]:
    schedule = made(values)
    return [schedule.values(step)[0]["lr"] for step in range(PLAN.steps)]


def test_a_function_of_step_and_steps_is_a_factor() -> None:
    of_steps = {"_target_": f"{__name__}.half_way", "low": 0.25}
    assert rates(of_steps) == [0.1] * 6 + [0.025] * 6
    by_epoch = {**of_steps, "interval": "epoch"}
    assert rates(by_epoch) == [0.1] * 10 + [0.025] * 2, "three epochs, the last one cut short"
    warm = rates({**of_steps, "warmup_steps": 4})
    assert warm == pytest.approx([0.02, 0.04, 0.06, 0.08] + [0.1] * 4 + [0.025] * 4)


def test_length_of_the_run_is_filled_in_where_it_is_left_out() -> None:
    schedule = made({"_target_": f"{TORCH}.CosineAnnealingLR", "warmup_steps": 2})
    schedule.values(3)
    assert schedule.scheduler.T_max == 10
    assert made({"_target_": f"{TORCH}.OneCycleLR", "max_lr": 0.1}).scheduler.total_steps == 12
    by_epoch = {"_target_": f"{TORCH}.CosineAnnealingLR", "interval": "epoch"}
    assert made(by_epoch).scheduler.T_max == 3


def test_schedulers_and_functions_may_stand_within_a_scheduler() -> None:
    first = {"_target_": f"{TORCH}.LinearLR", "start_factor": 0.1, "total_iters": 3}
    then = {"_target_": f"{TORCH}.LambdaLR", "lr_lambda": f"{__name__}.decay"}
    found = rates(
        {"_target_": f"{TORCH}.SequentialLR", "schedulers": [first, then], "milestones": [3]}
    )
    theirs = optimizer()
    parts = [lr_scheduler.LinearLR(theirs, 0.1, 1.0, 3), lr_scheduler.LambdaLR(theirs, decay)]
    scheduler = lr_scheduler.SequentialLR(theirs, parts, [3])
    for rate in found:
        assert rate == theirs.param_groups[0]["lr"]
        theirs.step()
        scheduler.step()
    parts = [{"_target_": f"{TORCH}.ExponentialLR", "gamma": gamma} for gamma in (0.5, 0.4)]
    chained = {"_target_": f"{TORCH}.ChainedScheduler", "schedulers": parts}
    assert rates(chained)[:3] == pytest.approx([0.1, 0.02, 0.004])


def test_plateau_has_the_direction_of_its_metric() -> None:
    values = {"_target_": f"{TORCH}.ReduceLROnPlateau"}
    assert made(values).scheduler.mode == "min"
    assert made({**values, "metric": "test.accuracy"}).scheduler.mode == "max"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"_target_": f"{__name__}.nothing"},
            "returned None for the arguments (7, 12); it must return",
        ),
        ({"_target_": f"{__name__}.no_scheduler"}, "returns an object of StandIn"),
        ({"_target_": f"{__name__}.decay"}, "must accept (step, steps)"),
        ({"_target_": f"{__name__}.half_way", "lo": 0.1}, "unexpected keyword argument 'lo'"),
        ({"_target_": f"{TORCH}.StepLR"}, "missing a required argument: 'step_size'"),
        ({"_target_": f"{TORCH}.StepLR", "step_sizes": 2}, "did you mean step_size?"),
        (
            {"_target_": f"{TORCH}.OneCycleLR", "max_lr": 1.0, "total_steps": 7},
            "the schedule ends after 7 steps, but the run has 12; leave out schedule.total_steps",
        ),
        (
            {"_target_": f"{TORCH}.OneCycleLR", "max_lr": 1.0, "epochs": 1, "steps_per_epoch": 7},
            "leave out schedule.epochs and schedule.steps_per_epoch: the schedule then has the",
        ),
        ({"_target_": f"{TORCH}.CyclicLR", "base_lr": 1, "max_lr": 2, "mode": "up"}, "ValueError"),
        ({"_target_": f"{TORCH}.ExponentialLR", "gamma": 1e99}, "OverflowError|learning rates"),
        (
            {"_target_": f"{TORCH}.SequentialLR", "schedulers": [], "milestones": []},
            "SequentialLR: ",
        ),
        (
            {"_target_": f"{TORCH}.ReduceLROnPlateau", "metric": "test.accuracy", "mode": "min"},
            "schedule.mode=min: a higher accuracy is better; leave schedule.mode out",
        ),
    ],
)
def test_what_makes_no_schedule_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(values)
    assert any(part in str(caught.value) for part in message.split("|")), caught.value


def test_a_captured_step_changes_no_momentum() -> None:
    values = {"_target_": f"{TORCH}.OneCycleLR", "max_lr": 0.1}
    with pytest.raises(ConfigError, match="changes lr, momentum"):
        made(values, captured=True)
    made({**values, "cycle_momentum": False}, captured=True)


def test_one_rate_for_all_groups_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made({"_target_": f"{TORCH}.OneCycleLR", "max_lr": [0.1, 0.02]})
    assert not caplog.records
    made({"_target_": f"{TORCH}.OneCycleLR", "max_lr": 0.1})
    assert "sets the same learning rate for all 2 groups" in caplog.text
