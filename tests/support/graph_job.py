"""A job of the launcher whose batches are objects: the graph network of examples/graphs.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from examples.graphs import GraphBatch, RingsAndPaths, together


class Rings(RingsAndPaths):
    """31 graphs: in batches of 15 the last one has one."""

    classes = ("path", "ring")
    collate_fn = staticmethod(together)

    def __init__(self, train: bool) -> None:
        super().__init__(31 if train else 9)


class TellRings:
    """Classification of the graphs of a GraphBatch."""

    unit = "graph"
    units_are_samples = True

    def loss(self, model: nn.Module, batch: GraphBatch) -> tuple[Tensor, int]:
        losses = functional.cross_entropy(model(batch), batch.targets, reduction="sum")
        return losses, len(batch.targets)

    def score(self, model: nn.Module, batch: GraphBatch) -> dict[str, Any]:
        correct = model(batch).argmax(1) == batch.targets
        return {"correct": (correct.sum(), len(correct))}
