"""Copies that move along in a task or a hook, and are in no checkpoint, are named."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ddp_train.engine.copies_hook import CopiesHook


class Distillation:
    """A task with a teacher, and one that stays what it is."""

    def __init__(self, model: nn.Module) -> None:
        self.teacher = copy.deepcopy(model)
        self.fixed = copy.deepcopy(model)


class Average:
    """A hook that keeps weights in a dict, and in whose class nothing tells it."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[str, Tensor] = {k: v.clone() for k, v in model.state_dict().items()}
        self.model = model


def lines_of(model: nn.Module, holders: dict[str, Any], move: Any) -> list[str]:
    """What is shown in three checkpoints, two steps apart, with `move()` before each."""
    display = mock.Mock()
    hook = CopiesHook(display, model, holders, lambda job: job.step + 2 - job.step % 2)
    job: Any = SimpleNamespace(step=0)
    for step in range(1, 7):
        hook.due(job)
        job.step = step
        if step % 2 == 0:
            with torch.no_grad():
                model.get_parameter("weight").add_(1)
                move()
            hook.act(job)
    return [call.args[0] for call in display.line.call_args_list]


def test_a_teacher_of_a_task_is_named_once() -> None:
    model = nn.Linear(3, 2)
    task = Distillation(model)
    lines = lines_of(model, {"task": task}, lambda: task.teacher.get_parameter("weight").add_(1))
    (line,) = lines
    assert line.startswith(
        "note: task.teacher (Linear) changed during training but is in no checkpoint"
    )


def test_weights_in_a_dict_of_a_hook_are_named() -> None:
    model = nn.Linear(3, 2)
    hook = Average(model)
    (line,) = lines_of(model, {"my.Average": hook}, lambda: hook.kept["weight"].add_(1))
    assert line.startswith("note: my.Average (Average) changed during training")


def test_a_copy_that_is_made_late_is_named() -> None:
    model = nn.Linear(3, 2)
    task: Any = SimpleNamespace()

    def move() -> None:
        task.teacher = getattr(task, "teacher", None) or copy.deepcopy(model)
        task.teacher.weight.add_(1)

    (line,) = lines_of(model, {"task": task}, move)
    assert "task.teacher (Linear)" in line


def test_nothing_is_said_of_what_stays_or_is_saved() -> None:
    model = nn.Linear(3, 2)
    assert lines_of(model, {"task": Distillation(model), "hook": Average(model)}, lambda: 0) == []
