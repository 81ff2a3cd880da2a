"""A user's own task: what is wrong with it is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.tasks.task import ModelWithTask, can_predict
from ddp_train.tasks.user_task import complete
from tests.support.task_samples import Returns


@dataclass(frozen=True)
class Frozen:
    """A task that takes no attribute."""

    scale: float = 2.0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.scale * model(batch).sum(), len(batch)


class Slotted:
    __slots__ = ()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).sum(), len(batch)


class Registered(nn.Module):
    """A task that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (self.scale * model(batch)).sum(), len(batch)


@pytest.mark.parametrize("kind", [Frozen, Registered])
def test_a_task_is_the_object_of_its_author(kind: Any) -> None:
    task = kind()
    module = ModelWithTask(nn.Identity(), complete(task), "cpu", None)
    assert module.task is task and not can_predict(task)
    assert module.score(torch.ones(2, 1)).sums["loss"][1] == 2


def test_what_a_hook_sets_in_a_task_reaches_its_loss() -> None:
    task: Any = Returns((torch.zeros(()), 1))
    module: Any = ModelWithTask(nn.Identity(), complete(task), "cpu", None)
    module.task.found = (torch.ones(()), 1)
    assert module.loss_of(None)[0] == 1 and module.task.found is task.found


def test_a_task_with_slots_needs_the_base_class() -> None:
    with pytest.raises(ConfigError, match="Slotted has __slots__ and lacks unit; derive it: class"):
        complete(Slotted())


def test_weights_in_a_task_that_nobody_trains_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = Returns((torch.zeros(()), 1))
    task.teacher = nn.Linear(2, 2)  # type: ignore[attr-defined]
    complete(task)
    assert (
        "the parameters of Returns.teacher require gradients, but no optimizer updates them; make"
        in caplog.text
    )
    caplog.clear()
    task.teacher.requires_grad_(False).eval()  # type: ignore[attr-defined]
    complete(task)
    assert caplog.text == ""


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"task._target_: Linear has no method loss|Linear has parameters"
    ):
        complete(nn.Linear(2, 2))
    learned = nn.Linear(2, 2)
    learned.loss = lambda model, batch: (model(batch).sum(), 1)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="has parameters, which no optimizer updates"):
        complete(learned)
    odd = Returns((torch.zeros(()), 1))
    odd.better = {"iou": "higher"}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"better\['iou'\]='higher': must be 'min' or 'max'"):
        complete(odd)
