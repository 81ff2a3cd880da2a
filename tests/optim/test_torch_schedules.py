"""Schedulers of torch's as schedules: the rates of torch's own, on any step, in any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ddp_train.optim.schedules.schedule import Pace
from ddp_train.optim.schedules.torch_schedules import PlateauSchedule, SteppedSchedule

STEPS = 30
MAKERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 7, 0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.01),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.3], STEPS),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 5, mode="exp_range", gamma=0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        [5],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def two_groups(adam: bool = False) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.1, 0.02)]
    return torch.optim.AdamW(groups) if adam else torch.optim.SGD(groups, momentum=0.9)


def values_of_torch(make: Callable[[Any], Any], adam: bool, names: list[str]) -> list[Any]:
    """What torch's own scheduler has set before each step of a plain loop."""
    optimizer = two_groups(adam)
    scheduler = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append([{name: group[name] for name in names} for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("error")
def test_rates_and_momenta_are_torchs_to_the_bit(name: str) -> None:
    adam = name == "one cycle"
    schedule = SteppedSchedule(MAKERS[name], two_groups(adam), Pace(STEPS))
    found = [schedule.values(step) for step in range(STEPS)]
    names = list(found[-1][0])
    assert names == {"one cycle": ["lr", "betas"], "cyclic": ["lr", "momentum"]}.get(name, ["lr"])
    before = {} if adam else {"momentum": 0.9}  # as long as a scheduler has not changed it
    complete = [[{name: {**before, **of}[name] for name in names} for of in row] for row in found]
    assert complete == values_of_torch(MAKERS[name], adam, names)


def test_any_step_may_be_asked_for_in_any_order() -> None:
    optimizer = two_groups()
    in_order = SteppedSchedule(MAKERS["sequential"], optimizer, Pace(STEPS))
    expected = [in_order.values(step) for step in range(STEPS)]
    resumed = SteppedSchedule(MAKERS["sequential"], optimizer, Pace(STEPS))
    for step in (17, 18, 3, 29, 0):
        assert resumed.values(step) == expected[step]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02], "left as it was"
    assert resumed.values(STEPS + 11) == expected[-1], "a rehearsal may lead behind the end"


def test_by_epoch_and_after_a_warm_up() -> None:
    pace = Pace(steps=24, warmup_steps=7, period=5)
    schedule = SteppedSchedule(lambda o: lr_scheduler.ExponentialLR(o, 0.5), two_groups(), pace)
    rates = [schedule.values(step)[0]["lr"] for step in range(24)]
    rising = [0.1 * (step + 1) / 8 for step in range(7)]
    assert rates == pytest.approx([*rising, *[0.1] * 3, *[0.05] * 5, *[0.025] * 5, *[0.0125] * 4])
    ratios = [values[1]["lr"] / values[0]["lr"] for values in map(schedule.values, range(24))]
    assert ratios == pytest.approx([0.2] * 24), "groups keep their ratio"


METRICS = [0.9, 0.8, 0.81, 0.82, 0.7, math.nan, 0.71, 0.72, 0.73]


def plateau(**arguments: Any) -> PlateauSchedule:
    return PlateauSchedule(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.3, **arguments),
        two_groups(),
        Pace(100, warmup_steps=10),
    )


def test_plateau_is_torchs_and_goes_on_from_its_state() -> None:
    optimizer = two_groups()
    theirs = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.3)
    ours = plateau()
    ours.see(9, -1.0)  # in the warm-up: not counted
    for metric in METRICS:
        again = plateau()
        again.load_state(ours.state(), is_same_metric=True)
        ours = again
        theirs.step(metric)
        ours.see(10, metric)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert [values["lr"] for values in ours.values(10)] == rates
    assert rates == pytest.approx([0.1 * 0.3**3, 0.02 * 0.3**3])
    assert ours.values(4)[0]["lr"] == pytest.approx(rates[0] * 5 / 11)


def test_a_state_keeps_neither_arguments_nor_base_rates_of_another_config() -> None:
    before = plateau(min_lr=0.05)
    for _ in range(3):
        before.see(10, 1.0)
    assert [values["lr"] for values in before.values(10)] == [0.05, 0.02]
    now = plateau(min_lr=0.001)
    now.first_stand_in.param_groups[0]["lr"] = 0.2
    now.load_state(before.state(), is_same_metric=True)
    assert now.scheduler.min_lrs == [0.001, 0.001] and now.scheduler.best == 1.0
    assert now.values(10)[0]["lr"] == pytest.approx(0.1)
    other = plateau()
    other.load_state(before.state(), is_same_metric=False)
    assert other.scheduler.best == math.inf and other.values(10)[0]["lr"] == 0.05
