"""Loops whose batches are objects, against plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.world import World
from examples import graphs
from tests.support.batch_types import Encoding
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

GRAPHS = 33
"""In batches of 16: the last one has one, and most processes have none."""
EPOCHS = 2
TEXTS = 13


def graphs_on(world: World) -> dict[str, Tensor]:
    with session_on(world) as run:
        return graphs.train(run, EPOCHS, GRAPHS).state_dict()


def graphs_by_hand() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = graphs.GraphNetwork().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = graphs.RingsAndPaths(GRAPHS)
    for epoch in range(EPOCHS):
        for share in torch.as_tensor(epoch_order(0, epoch, GRAPHS)).split(16):
            batch = graphs.together([data[int(number)] for number in share])
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), batch.targets).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "processes",
    [
        1,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_a_graph_network_is_that_of_one_process(processes: int) -> None:
    expected = graphs_by_hand()
    for found in on_ranks(processes, graphs_on):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Classifier(nn.Module):
    """Takes what a tokenizer gives, by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        vectors = self.words(input_ids) * attention_mask[..., None]
        logits = self.head(vectors.sum(1))
        return {"losses": functional.cross_entropy(logits, labels, reduction="none")}


def new_classifier() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().double()


def texts() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (TEXTS, 5), generator=drawn)
    return TensorDataset(ids, ids.sum(1) % 2)


def encoded(samples: Sequence[tuple[Tensor, ...]]) -> Encoding:
    ids, labels = map(torch.stack, zip(*samples, strict=True))
    parts = {"input_ids": ids, "attention_mask": (ids > 2).double(), "labels": labels}
    return Encoding(parts, [object() for _ in samples])


def texts_on(world: World) -> dict[str, Tensor]:
    with session_on(world) as run:
        model = run.wrap(new_classifier())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = run.loader(texts(), global_batch_size=6, collate_fn=encoded)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                assert type(batch) is Encoding and len(batch.words) == len(batch["labels"])
                optimizer.zero_grad()
                run.mean(model(**batch)["losses"]).backward()
                optimizer.step()
        return model.state_dict()


@pytest.mark.slow
def test_batches_of_a_tokenizer_train_as_in_one_process() -> None:
    model = new_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        for share in torch.as_tensor(epoch_order(0, epoch, TEXTS)).split(6):
            batch = encoded([texts()[int(number)] for number in share])
            optimizer.zero_grad()
            model(**batch)["losses"].mean().backward()
            optimizer.step()
    for found in on_ranks(3, texts_on):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=1e-12)
