"""Losses and scores of another form are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import TaskError
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tasks.user_task import complete
from tests.support.task_samples import Returns, Scores


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(()), "a tensor [] of torch.float32"),
        ((torch.zeros(3), 3), "(a tensor [3] of torch.float32, int)"),
        ((torch.zeros((), dtype=torch.int64), 3), "(a tensor [] of torch.int64, int)"),
        (
            (torch.zeros(()), torch.zeros(2)),
            "(a tensor [] of torch.float32, a tensor [2] of torch.float32)",
        ),
        (None, "returned NoneType"),
    ],
)
def test_a_loss_of_another_form_is_told(found: Any, words: str) -> None:
    module = ModelWithTask(nn.Identity(), complete(Returns(found)), "cpu", None)
    with pytest.raises(TaskError) as caught:
        module(torch.zeros(2))
    assert "loss() of the task Returns returned" in str(caught.value)
    assert words in str(caught.value) and caught.value.remedy.startswith(
        "return (sum of the losses"
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(()), "score() of the task Scores returned a tensor [] of torch.float32"),
        ({"iou": torch.zeros(())}, "returned a tensor [] of torch.float32 for the metric iou"),
        (
            {"iou": (torch.zeros(3), 3)},
            "returned (a tensor [3] of torch.float32, int) for the metric iou",
        ),
        ({"iou": (torch.zeros(3, 3), torch.zeros(3, 3))}, "for the metric iou"),
        ({"loss": (1.0, 2), "iou": (1.0, 2, 3)}, "returned (float, int, int) for the metric iou"),
    ],
)
def test_scores_of_another_form_are_told(found: Any, words: str) -> None:
    module = ModelWithTask(nn.Identity(), complete(Scores(found)), "cpu", None)
    with pytest.raises(TaskError) as caught:
        module.score(torch.zeros(2))
    assert (
        words in str(caught.value)
        and "(sum, weight)" in caught.value.remedy
        and caught.value.kind == "task"
    )
