"""Losses whose own mean is not that over samples."""

import pytest
import torch
from torch.nn import functional

from ddp_train.sessions.watches.other_means import other_mean

LOGITS = torch.zeros(2, 3, 4, requires_grad=True)
"""Of three classes, for four tokens of two samples."""
TARGETS = torch.tensor([[0, 1, 2, 0], [1, 1, -100, -100]])
WEIGHT = torch.ones(3)


def test_class_weights_are_told_beside_smoothing_too() -> None:
    targets = TARGETS.clamp(min=0)
    for smoothing in (0.0, 0.1):
        losses = functional.cross_entropy(
            LOGITS, targets, WEIGHT, reduction="none", label_smoothing=smoothing
        )
        assert "over=weight[targets]" in str(other_mean(losses.mean(1) * 0.5))


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_targets_that_are_left_out_are_told(ignore_index: int) -> None:
    targets = TARGETS.where(TARGETS >= 0, ignore_index)
    losses = functional.cross_entropy(LOGITS, targets, reduction="none", ignore_index=ignore_index)
    assert f"over=targets != {ignore_index}" in str(other_mean(losses.mean(1)))


def test_nothing_is_told_of_other_losses() -> None:
    whole = functional.cross_entropy(LOGITS, TARGETS.clamp(min=0), reduction="none")
    soft = functional.cross_entropy(LOGITS, LOGITS.softmax(1), reduction="none")
    squares = functional.mse_loss(LOGITS, LOGITS.detach(), reduction="none")
    for losses in (whole, soft, squares, squares.detach()):
        assert other_mean(losses) is None
