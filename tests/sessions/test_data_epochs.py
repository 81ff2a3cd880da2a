"""Data sets with a `set_epoch` of their own, in loops that call it and in loops that do not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches import data_epochs
from tests.sessions.loops import sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import told_by

EPOCHS = 4


class Shifted(Dataset[Tensor]):
    """Rows that are shifted by their epoch."""

    def __init__(self, factor: int = 1) -> None:
        """factor: of the shift; with 0 the rows of all epochs are the same."""
        self.epoch = 0
        self.factor = factor

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((4,), 0.01 * (number + self.factor * self.epoch)).double()


def trained(world: World, how: str, workers: int = 0) -> tuple[list[str], list[float]]:
    """The warnings of a loop, and the largest number of each epoch's last batch.

    how: the loop tells its data set the epoch.
    """
    data = Shifted(factor=0 if how == "without effect" else 1)
    messages: list[str] = []
    data_epochs.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]

    def loop(run: Run) -> list[float]:
        inputs = torch.empty(0)
        model = run.wrap(nn.Linear(4, 1).double())
        optimizer = sgd(model)
        read: Any = Subset(data, range(12)) if how == "never, a part" else data
        loader = run.loader(read, global_batch_size=6, num_workers=workers)
        other = run.loader(data, global_batch_size=6, num_workers=workers)
        run.resume(model=model, optimizer=optimizer)
        largest = []
        for epoch in run.epochs(EPOCHS):
            if how in ("at the top", "two loaders"):
                data.set_epoch(epoch)
            elif how == "every second epoch":
                data.set_epoch(epoch // 2)
            elif how == "by its attribute":
                data.epoch = epoch
            for inputs in loader:
                optimizer.zero_grad()
                run.mean(model(inputs).squeeze(1)).backward()
                optimizer.step()
            if how == "two loaders":
                for inputs in other:
                    optimizer.zero_grad()
                    run.mean(model(inputs).squeeze(1)).backward()
                    optimizer.step()
            largest.append(run.gather(inputs).max().item())
            if how == "at the bottom":
                data.set_epoch(epoch + 1)
        return largest

    others, largest = told_by(world, loop)
    assert "set_epoch" not in vars(data)
    return messages + others, largest


@pytest.mark.parametrize("how", ["never", "never, a part"])
def test_a_data_set_that_is_not_told_its_epoch_is_named_once(how: str) -> None:
    for messages, _ in on_ranks(3, trained, how):
        (message,) = messages
        assert message.startswith("Shifted.set_epoch was not called between two epochs")


@pytest.mark.parametrize(
    "how",
    [
        "at the top",
        "at the bottom",
        "every second epoch",
        "by its attribute",
        "two loaders",
        "without effect",
    ],
)
def test_a_data_set_that_is_told_its_epoch_is_not_named(how: str) -> None:
    for messages, _ in on_ranks(3, trained, how):
        assert messages == []


def test_loader_processes_see_the_epoch() -> None:
    alone = on_ranks(1, trained, "at the top")
    assert on_ranks(1, trained, "at the top", 1) == alone


def test_copies_of_a_data_set_have_the_method_itself() -> None:
    data = Shifted()
    data.set_epoch = data_epochs.NotedMethod(data)  # type: ignore[method-assign]
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        other.set_epoch(3)
        assert (other.epoch, data.epoch) == (3, 0)
    assert not data.set_epoch.was_called
