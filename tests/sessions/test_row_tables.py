"""Tables that each process fills by its own samples are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_train.distributed.all_gather import all_gather
from ddp_train.distributed.world import World
from ddp_train.sessions.watches import first_epoch
from ddp_train.sessions.watches.row_tables import rows_of
from tests.sessions.loops import BATCH, SAMPLES, net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

EPOCHS = 3
gather: Any = all_gather
OTHERS = 30
"""Rows of a table that belong to other samples: the loop trains on a subset of some data."""


class Memory(nn.Module):
    """A loss with targets that it keeps, as early-learning regularisation has."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.zeros(SAMPLES + OTHERS, 2).double()

    def update(self, numbers: Tensor, losses: Tensor) -> None:
        self.target[numbers] = 0.9 * self.target[numbers] + 0.1 * losses[:, None].expand(-1, 2)


def in_a_tensor(run: Any, train: Any) -> None:
    losses_of = torch.zeros(SAMPLES + OTHERS).double()
    for numbers, losses in train(lambda numbers: 1 + losses_of[numbers]):
        losses_of[numbers] = losses


def anew(run: Any, train: Any) -> None:
    losses_of = torch.zeros(SAMPLES + OTHERS).double()
    for numbers, losses in train():
        losses_of = losses_of.scatter(0, numbers, losses)


def in_an_array(run: Any, train: Any) -> None:
    priorities = np.ones(SAMPLES + OTHERS)
    for numbers, losses in train():
        priorities[numbers.numpy()] = losses.numpy()


def in_a_list(run: Any, train: Any) -> None:
    seen = [0.0] * (SAMPLES + OTHERS)
    for numbers, losses in train():
        for number, loss in zip(numbers.tolist(), losses.tolist(), strict=True):
            seen[number] = loss


def in_a_dict(run: Any, train: Any) -> None:
    memory: dict[int, Tensor] = {}
    for numbers, losses in train():
        memory.update(zip(numbers.tolist(), losses, strict=True))


def in_an_attribute(run: Any, train: Any) -> None:
    holder = {"criterion": Memory()}
    for numbers, losses in train():
        holder["criterion"].update(numbers, losses)


def of_all(run: Any, train: Any) -> None:
    losses_of = torch.zeros(SAMPLES + OTHERS).double()
    for numbers, losses in train(lambda numbers: 1 + losses_of[numbers]):
        losses_of[gather(numbers)[0]] = gather(losses)[0]


def added_up(run: Any, train: Any) -> None:
    """Each epoch fills it anew, and the whole is added up at its end."""
    whole = torch.zeros(SAMPLES + OTHERS).double()

    def end_epoch(run: Any) -> None:
        nonlocal whole
        whole = run.sum(found)
        found.zero_()

    found = torch.zeros(SAMPLES + OTHERS).double()
    for numbers, losses in train(lambda numbers: 1 + whole[numbers], end_epoch):
        found[numbers] = losses


def of_classes(run: Any, train: Any) -> None:
    """No table of samples: what is counted for a log, and what a step has."""
    counts = torch.zeros(2)
    history = [0.0] * 100
    seen: list[int] = []
    for numbers, losses in train():
        counts[(losses > 0.5).long()] += 1
        history[run.step] = float(losses.sum())
        seen += numbers.tolist()


NAMED: dict[str, tuple[Callable[..., None], str]] = {
    "tensor": (in_a_tensor, "losses_of"),
    "anew": (anew, "losses_of"),
    "array": (in_an_array, "priorities"),
    "list": (in_a_list, "seen"),
    "dict": (in_a_dict, "memory"),
    "attribute": (in_an_attribute, "holder['criterion'].target"),
}
UNNAMED = {"of all": of_all, "added up": added_up, "of classes": of_classes}


def told(world: World, name: str) -> list[Any]:
    """What a loop with a table is told, and its weights."""
    messages: list[str] = []
    first_epoch.log.warning = lambda text, *_: messages.append(text)  # type: ignore[method-assign]
    loop = UNNAMED[name] if name in UNNAMED else NAMED[name][0]
    inputs, labels = rows().tensors
    numbers = torch.arange(OTHERS, OTHERS + SAMPLES)
    with session_on(world) as run:
        model = run.wrap(net())
        optimizer = sgd(model)
        loader = run.loader(TensorDataset(inputs, labels, numbers), global_batch_size=BATCH)
        run.resume(model=model, optimizer=optimizer)

        def train(weigh: Any = torch.ones_like, end_epoch: Any = None) -> Any:
            for _ in run.epochs(EPOCHS):
                for inputs, labels, numbers in loader:
                    optimizer.zero_grad()
                    losses = (model(inputs).squeeze(1) - labels).square()
                    run.mean(losses * weigh(numbers)).backward()
                    optimizer.step()
                    yield numbers, losses.detach()
                if end_epoch:
                    end_epoch(run)

        loop(run, train)
        weights = weights_of(model=model)
    return [messages, weights]


@pytest.mark.parametrize("name", NAMED)
def test_a_table_of_own_rows_is_named_once(name: str) -> None:
    of_ranks = on_ranks(3, told, name)
    messages = of_ranks[0][0]
    assert len(messages) == 1
    assert messages[0].startswith(f"{NAMED[name][1]}: each process has filled in the rows of its")
    assert [messages for messages, _ in of_ranks[1:]] == [[], []]


@pytest.mark.parametrize("name", UNNAMED)
def test_a_table_of_all_rows_is_exact_and_not_named(name: str) -> None:
    (messages, expected), *_ = on_ranks(1, told, name)
    assert messages == []
    for size in (3, 4):
        for messages, weights in on_ranks(size, told, name):
            assert messages == []
            torch.testing.assert_close(weights, expected)


def test_one_process_is_told_nothing() -> None:
    assert on_ranks(1, told, "tensor")[0][0] == []


def test_data_with_gaps_are_not_copied() -> None:
    """A copy of images in another order of dimensions may fill the memory."""
    images = torch.zeros(1).expand(2**13, 2**12)
    assert rows_of(images, 10) is None
    assert rows_of(images.numpy(), 10) is None
    assert rows_of(images[:, :8], 10) is not None
    assert rows_of([0.0] * 2**21, 10) is None
