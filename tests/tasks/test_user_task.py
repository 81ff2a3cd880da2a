"""A user's own task: what is wrong with it is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.tasks.user_task import complete
from tests.support.task_samples import Returns


def test_weights_in_a_task_that_nobody_trains_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = Returns((torch.zeros(()), 1))
    task.teacher = nn.Linear(2, 2)  # type: ignore[attr-defined]
    complete(task)
    assert (
        "the parameters of Returns.teacher require gradients, and no optimizer has them; make it"
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
    with pytest.raises(ConfigError, match="has parameters that no optimizer gets"):
        complete(learned)
    odd = Returns((torch.zeros(()), 1))
    odd.better = {"iou": "higher"}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"better\['iou'\]='higher': must be 'min' or 'max'"):
        complete(odd)
