"""State that each process fills by its own samples is named at a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_train.distributed.all_gather import all_gather
from ddp_train.distributed.world import World
from ddp_train.sessions import session_checkpoints
from tests.sessions.loops import SAMPLES, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

gather: Any = all_gather


class Net(nn.Module):
    """It has seen samples: in whole numbers, in an attribute."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1).double()
        self.norm = nn.BatchNorm1d(1).double()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))
        self.largest = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.layer(inputs)).squeeze(1)


class Kept:
    """An object with a state: a baseline, a table of losses."""

    def __init__(self) -> None:
        self.baseline = 0.0
        self.table = torch.zeros(3).double()

    def state_dict(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "tables": [self.table],
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baseline = state["baseline"]
        (self.table,) = state["tables"]


def of_whole_numbers(model: Any, kept: Kept, labels: Tensor) -> None:
    model.seen += torch.bincount(labels.long(), minlength=2)


def of_numbers(model: Any, kept: Kept, labels: Tensor) -> None:
    kept.baseline += labels.sum().item()


def of_tensors(model: Any, kept: Kept, labels: Tensor) -> None:
    kept.table[0] += labels.sum()


def of_attributes(model: Any, kept: Kept, labels: Tensor) -> None:
    model.largest += labels.sum().item()


def of_all(model: Any, kept: Kept, labels: Tensor) -> None:
    labels = gather(labels)[0]
    for fill in (of_whole_numbers, of_numbers, of_tensors):
        fill(model, kept, labels)


FILLED = {
    "seen": of_whole_numbers,
    "kept['baseline']": of_numbers,
    "kept['tables'][0]": of_tensors,
    "model.largest": of_attributes,
}


def told(world: World, fill: Any) -> list[str]:
    """The warnings of two epochs with a checkpoint after each."""
    messages: list[str] = []
    log = session_checkpoints.log
    log.warning = lambda text, *values: messages.append(text % values)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(Net(), sync_batch_norm=False)
        average = AveragedModel(model, use_buffers=True)
        kept = Kept()
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=SAMPLES // 2)
        run.resume(model=model, optimizer=optimizer, kept=kept, average=average)
        for _ in run.epochs(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                run.mean((model(inputs) - labels).square()).backward()
                optimizer.step()
                fill(model, kept, labels)
                average.update_parameters(model)
    return messages


@pytest.mark.parametrize("name", FILLED)
def test_what_each_process_fills_alone_is_named_once(name: str) -> None:
    for messages in on_ranks(3, told, FILLED[name]):
        assert len(messages) == 1
        assert name in messages[0]
        assert "not the same on all processes" in messages[0]


def test_what_is_of_all_samples_is_not() -> None:
    """Statistics of norms and states of generators may differ."""
    for messages in on_ranks(3, told, of_all):
        assert messages == []
