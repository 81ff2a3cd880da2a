"""Copies that move along and are in no checkpoint are named."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from tests.sessions.loops import BATCH, rows, sgd
from tests.sessions.moving_copies import Distillation, LikeTimm, follow, net
from tests.support.session_ranks import session_on

IN_NO_CHECKPOINT = "changed during training but is in no checkpoint"


class ShadowEma:
    """As many public scripts have it: tensors in a dict, and no state_dict."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow: dict[str, Tensor] = {
            name: weight.data.clone() for name, weight in model.named_parameters()
        }

    def update(self, model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * weight.data


class Trainer:
    teacher: Any


def warnings_of(
    run: Run, caplog: pytest.LogCaptureFixture, make: Any, move: Any, **saved: Any
) -> str:
    """What is logged in a loop of three epochs, with a checkpoint after each."""
    model = run.wrap(net())
    moving = make(model)
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=BATCH)
    objects = dict.fromkeys(saved, moving)
    run.resume(model=model, optimizer=optimizer, **objects)
    with caplog.at_level(logging.WARNING):
        for _ in run.epochs(3):
            for inputs, labels in loader:
                optimizer.zero_grad()
                run.mean((model(inputs).squeeze(1) - labels).square()).backward()
                optimizer.step()
                move(moving, model)
    return caplog.text


def student(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def no_move(*_: Any) -> None: ...


MOVING = [
    (student, follow, "moving (Sequential)", "Create it before run.resume", "moving=moving"),
    (
        AveragedModel,
        lambda average, model: average.update_parameters(model),
        "moving (AveragedModel)",
        "Create it",
        "run.resume(..., moving=moving)",
    ),
    (
        ShadowEma,
        lambda average, model: average.update(model),
        "moving (ShadowEma)",
        "Give ShadowEma state_dict and load_state_dict, create it before",
        "moving=moving",
    ),
    (
        lambda model: Distillation(),
        lambda criterion, model: criterion.move_centre(torch.ones(2, 3).double()),
        "moving (Distillation)",
        "Create it",
        "moving=moving",
    ),
]


@pytest.mark.parametrize(("make", "move", "what", "remedy", "argument"), MOVING)
def test_a_copy_that_moves_is_named_once(
    caplog: pytest.LogCaptureFixture, make: Any, move: Any, what: str, remedy: str, argument: str
) -> None:
    with session_on(World()) as run:
        text = warnings_of(run, caplog, make, move)
    assert text.count(IN_NO_CHECKPOINT) == 1
    assert f"{what} {IN_NO_CHECKPOINT}" in text
    assert remedy in text
    assert argument in text


class InOneList:
    """By a class whose name tells nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = tensors_in_list(model)


def tensors_in_list(model: nn.Module) -> list[Tensor]:
    return [weight.data.clone() for weight in model.parameters()]


def move_tensors(tensors: list[Tensor], model: nn.Module) -> None:
    for tensor, weight in zip(tensors, model.parameters(), strict=True):
        tensor.lerp_(weight.data, 0.1)


VARIABLES = [
    (tensors_in_list, move_tensors),
    (
        lambda model: {"slow": dict(enumerate(tensors_in_list(model)))},
        lambda ema, model: move_tensors(list(ema["slow"].values()), model),
    ),
    (
        lambda model: [InOneList(model)],
        lambda ema, model: move_tensors(ema[0].tensors, model),
    ),
]


@pytest.mark.parametrize(("make", "move"), VARIABLES)
def test_an_average_in_a_variable_is_named_once(
    caplog: pytest.LogCaptureFixture, make: Any, move: Any
) -> None:
    model = net()
    moving = ema = make(model)
    with session_on(World()) as run:
        text = warnings_of(run, caplog, lambda _: ema, move)
        assert moving is ema
    assert text.count(IN_NO_CHECKPOINT) == 1
    assert f"ema {IN_NO_CHECKPOINT}" in text and "run.resume(..., ema=ema)" in text


def test_averages_that_stand_still_or_are_saved_are_no_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ema_at_start = tensors_in_list(net())
    kept = LikeTimm(net(), 0.9)
    ema_weights = kept.module.state_dict()
    ema_losses = [torch.zeros(())] * 9
    with session_on(World()) as run:
        text = warnings_of(run, caplog, lambda _: kept, lambda a, model: a.update(model, 1), ema=1)
        assert IN_NO_CHECKPOINT not in text
    assert ema_at_start and ema_weights and ema_losses


@pytest.mark.parametrize(
    ("make", "move", "saved"),
    [
        (student, no_move, {}),
        (student, follow, {"teacher": True}),
        (lambda model: LikeTimm(model, 0.9), lambda a, model: a.update(model, 1), {"ema": True}),
    ],
)
def test_what_stands_still_or_is_saved_is_no_cause(
    caplog: pytest.LogCaptureFixture, make: Any, move: Any, saved: dict[str, Any]
) -> None:
    with session_on(World()) as run:
        assert IN_NO_CHECKPOINT not in warnings_of(run, caplog, make, move, **saved)


def test_a_copy_of_an_object_and_a_late_one_are_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    trainer.teacher = student(net())

    def move(late: list[nn.Module], model: nn.Module) -> None:
        if not late:
            late.append(student(model))
        follow(late[0], model)
        follow(trainer.teacher, model)

    with session_on(World()) as run:
        text = warnings_of(run, caplog, lambda model: [], move)
    assert "trainer.teacher (Sequential) changed" in text
    assert "run.resume(..., teacher=trainer.teacher)" in text
    assert "a Sequential changed" in text
