"""The check that all processes have the same learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from ddp_train.distributed.world import World
from ddp_train.sessions.learning_rates import check_same_rates, warn_of_fractions
from ddp_train.sessions.settings import UsageError
from tests.support.ranks import on_ranks


def findings(world: World) -> list[str]:
    """What is said of the same rates, of a NaN, and of one that differs on the last rank."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups)
    found = []
    for rate in (0.2, float("nan"), None, 0.2 / (1 + world.rank // 2)):
        optimizer.param_groups[1]["lr"] = rate
        try:
            check_same_rates({"scheduler": None, "sgd": optimizer}, "cpu")
            found.append("")
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_rate_that_differs_is_refused_on_all_ranks() -> None:
    message = (
        "the learning rate is not the same on all processes: sgd.param_groups[1]['lr'] is 0.2 on"
        " rank 0 and 0.1 on rank 2"
    )
    for found in on_ranks(3, findings):
        assert found[:3] == ["", "", ""] and found[3].endswith(message)


def test_a_schedule_by_fractions_of_an_epoch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedules = {
        "whole": CosineAnnealingWarmRestarts(optimizer, 2),
        "part": CosineAnnealingWarmRestarts(optimizer, 2),
        "sgd": optimizer,
    }
    schedules["whole"].step(1.0)
    schedules["part"].step(1 + 2 / 5)
    warn_of_fractions(schedules)
    [record] = caplog.records
    assert "part.step(run.step / batches)" in record.getMessage()
