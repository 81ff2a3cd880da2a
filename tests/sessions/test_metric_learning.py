"""examples/metric_learning.py against a plain loop in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_train
from ddp_train.distributed.world import World
from examples import metric_learning
from examples.metric_learning import ClassBatches, digits, embed, triplet_losses
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

BATCHES = 3


def images() -> TensorDataset:
    inputs, labels = digits(train=True).tensors
    return TensorDataset(inputs.double(), labels)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def in_session(world: World) -> Tensor:
    metric_learning.BATCHES = BATCHES
    train = images()
    with session_on(world) as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(train, batch_sampler=ClassBatches(train.tensors[1]))
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                anchors = embed(model, inputs)
                embeddings, own = ddp_train.all_gather(anchors)
                all_labels, _ = ddp_train.all_gather(labels)
                run.mean(triplet_losses(anchors, own, embeddings, all_labels)).backward()
                optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_triplet_loss_is_that_of_a_plain_loop(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_learning, "BATCHES", BATCHES)
    train = images()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train, batch_sampler=ClassBatches(train.tensors[1]))
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            anchors = embed(model, inputs)
            triplet_losses(anchors, torch.arange(len(labels)), anchors, labels).mean().backward()
            optimizer.step()
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    alone = in_session(World())
    for weights in [alone, *on_ranks(processes, in_session)]:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
