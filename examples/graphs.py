"""A graph network (GIN) that tells rings from paths, in a loop of your own.

Its batches are objects of a class of this file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import ddp_train

GRAPHS = 90
EPOCHS = 12
WIDTH = 16


@dataclass
class Graph:
    """Nodes [n, 2], edges between their numbers [2, e], and what the graph is."""

    nodes: Tensor
    edges: Tensor
    target: int


class GraphBatch:
    """Several graphs as one: their nodes one after the other, and the graph of each node."""

    def __init__(self, nodes: Tensor, edges: Tensor, graph: Tensor, targets: Tensor) -> None:
        self.nodes = nodes
        self.edges = edges
        self.graph = graph
        self.targets = targets

    def to(self, device: torch.device) -> GraphBatch:
        """The batch on a device: a batch that is no tuple or dict says itself how it gets there."""
        return GraphBatch(*(part.to(device) for part in vars(self).values()))


def together(graphs: list[Graph]) -> GraphBatch:
    """The collate function."""
    sizes = torch.tensor([len(graph.nodes) for graph in graphs])
    first = sizes.cumsum(0) - sizes
    return GraphBatch(
        torch.cat([graph.nodes for graph in graphs]),
        torch.cat([graph.edges + start for graph, start in zip(graphs, first, strict=True)], 1),
        torch.arange(len(graphs)).repeat_interleave(sizes),
        torch.tensor([graph.target for graph in graphs]),
    )


class RingsAndPaths(Dataset[Graph]):
    """Rings (1) and paths (0) of 3 to 11 nodes, with noise at each node."""

    def __init__(self, count: int = GRAPHS) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Graph:
        size = 3 + number % 9
        is_ring = number // 9 % 2
        noise = torch.randn(size, 1, generator=torch.Generator().manual_seed(number))
        nodes = torch.cat([torch.ones(size, 1), noise], 1)
        one_way = torch.arange(size - 1 + is_ring)
        edges = torch.stack([one_way, (one_way + 1) % size])
        return Graph(nodes.double(), torch.cat([edges, edges.flip(0)], 1), is_ring)


class IsomorphismLayer(nn.Module):
    """A network of each node and the sum of its neighbours.

    Xu et al., "How Powerful are Graph Neural Networks?", 2019.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(()))
        self.network = nn.Sequential(
            nn.Linear(inputs, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        neighbours = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        return self.network((1 + self.epsilon) * nodes + neighbours)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([IsomorphismLayer(2), IsomorphismLayer(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, batch: GraphBatch) -> Tensor:
        nodes = batch.nodes
        for layer in self.layers:
            nodes = layer(nodes, batch.edges).relu()
        sums = nodes.new_zeros(len(batch.targets), WIDTH).index_add(0, batch.graph, nodes)
        return self.head(sums)


def train(run: Any, epochs: int = EPOCHS, graphs: int = GRAPHS) -> nn.Module:
    torch.manual_seed(0)
    model = run.wrap(GraphNetwork().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = RingsAndPaths(graphs)
    loader = run.loader(data, global_batch_size=16, collate_fn=together)
    test_loader = run.test_loader(data, batch_size=16, collate_fn=together)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            losses = functional.cross_entropy(model(batch), batch.targets, reduction="none")
            run.mean(losses).backward()
            optimizer.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in test_loader:
                correct += (model(batch).argmax(1) == batch.targets).sum().item()
        print(f"epoch {epoch}: {run.sum(correct)} of {graphs} graphs are told")
    return model


if __name__ == "__main__":
    run_dir = "runs/graphs"
    if len(sys.argv) > 1:
        run_dir = sys.argv[1]
    with ddp_train.session(run_dir) as run:
        train(run)
