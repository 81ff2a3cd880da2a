"""The trial of a model sees what moves a loss by less than 2 %, and no count of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.tasks import trial
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tasks.trial import check_model
from ddp_train.tasks.user_task import complete


class Shifted(nn.Module):
    """Its outputs are shifted by a function of the model and the batch."""

    def __init__(self, shift: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.shift = shift
        self.steps = 0
        self.last = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        return self.last(inputs - self.shift(self, inputs))


class Squares:
    units_are_samples = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return model(batch).square().sum(), len(batch)


def weak_mean(model: Shifted, inputs: Tensor) -> Tensor:
    return 0.01 * inputs.mean(0)


def warm_up(model: Shifted, inputs: Tensor) -> float:
    """The same on any number of processes, which count the same steps."""
    return model.steps / 20


@pytest.mark.parametrize(("shift", "is_told"), [(weak_mean, True), (warm_up, False)])
def test_weak_coupling_is_told_and_a_count_of_steps_is_not(
    shift: Any, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "ranks", lambda: 3)
    torch.manual_seed(0)
    module = ModelWithTask(Shifted(shift), complete(Squares()), "cpu", None)
    samples = torch.rand(9, 3)

    def batch_of(numbers: np.ndarray) -> Tensor:
        return samples[torch.from_numpy(numbers)]

    check_model(module, batch_of, len(samples), "model._target_=mine.Net")
    assert (trial.MIXED_BY_MODEL in caplog.text) == is_told
