"""A trial decides whether compiled steps are captured: by which step, and what happens if not. Without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.optim.stepper import Stepper
from ddp_train.performance.cuda_graph import WARM_UP_STEPS, GraphedStepper
from ddp_train.performance.worth_capturing import CaptureTrial, reason_against


class Noted(CaptureTrial):
    """Says no, and notes what it measured."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.calls: list[str] = []
        self.sizes: list[int] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def why_not(self) -> str:
        self.calls.append("why not")
        return "for a test"


def trained(make: Any, sizes: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    noted: list[int] = []

    def wrapped(data: torch.Tensor) -> tuple[torch.Tensor, None]:
        noted.append(len(data))
        return model(data).pow(2).sum(), None

    stepper, trial = make(wrapped, optimizer)
    forward = stepper.forward if isinstance(stepper, GraphedStepper) else wrapped
    for step, size in enumerate(sizes):
        before = list(trial.calls) if trial else []
        loss, units = forward(torch.arange(4.0 * size).view(size, 4) / (4 * size))
        if trial and "begin" in trial.calls and "begin" not in before:
            trial.sizes.append(size)
        stepper.backward(loss, units, MicroBatch(step, 0, np.arange(size), size, 1 / size, True))
        stepper.step()
    assert noted == sizes
    return model.weight.detach().clone()


@pytest.mark.parametrize("epoch", [12, 13, 40])
def test_a_whole_batch_is_tried_once_and_steps_go_on_without_a_graph(epoch: int) -> None:
    sizes = [2 if step % epoch == epoch - 1 else 8 for step in range(45)]
    trial = Noted()
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def graphed(wrapped: Any, optimizer: torch.optim.Optimizer) -> Any:
        whole = lambda step: sizes[step] == 8  # noqa: E731
        return GraphedStepper(wrapped, None, whole, optimizer, lambda step: 1.0, scaler, trial=trial), trial  # pyright: ignore

    found = trained(graphed, sizes)
    expected = trained(lambda _, optimizer: (Stepper(optimizer, lambda step: 1.0, scaler), None), sizes)
    assert torch.equal(found, expected)
    assert trial.calls == ["begin", "end", "why not"] and trial.sizes == [8]
    assert WARM_UP_STEPS == 11


def test_steps_are_captured_where_the_host_is_slow_and_memory_suffices() -> None:
    assert reason_against(host_share=0.6, memory_share=0.6) == ""
    assert reason_against(0.4, 0.6) == "the host launches a step in 40% of the time that it takes"
    assert reason_against(0.95, 1.2) == "steps and an evaluation might need 120% of a GPU's memory"
