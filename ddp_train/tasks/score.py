"""The score of a data set: exact sums, each sample once, the same on any number of processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.process_group import from_leader, ranks, total
from ddp_train.tasks.further_metrics import FurtherMetrics
from ddp_train.tasks.predictions import PREDICTIONS, Predictions
from ddp_train.tasks.task import ScoreSums

log = logging.getLogger(__name__)

Layout = list[tuple[str, int]]
"""Metrics in order, and the number of classes of each: 0 for a scalar."""


@dataclass(frozen=True)
class Score:
    """The result of an evaluation."""

    metrics: dict[str, float]
    """`loss` first."""
    samples: int
    counts: dict[str, int] = field(default_factory=dict)
    """Where a metric is a part of the samples, their number: {"accuracy": 237}."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]

    def as_dict(self) -> dict[str, Any]:
        correct = {"correct": self.counts["accuracy"]} if "accuracy" in self.counts else {}
        return {**self.metrics, **correct, "samples": self.samples}


class Scorer:
    """Collects an evaluation batch by batch, in a slot for each batch of the whole set.

    The batches are the same on any number of processes, and so are the slots: their sum is bit for
    bit the same.
    """

    def __init__(
        self,
        batches: int,
        device: str,
        derive: Callable[[dict[str, float]], dict[str, float]] = lambda _: {},
        further: FurtherMetrics | None = None,
    ) -> None:
        """batches: of the whole set, on all processes. derive: see `tasks.task.Task`. further:
        metrics beside those of the task."""
        self.device = device
        self.further = further
        self.states = further.new_states() if further else None
        self.derive = derive
        self.batches = batches
        self.layout: Layout = []

    def add(self, batch: int, scores: ScoreSums, samples: int) -> None:
        """scores: name -> (sum, weight), and perhaps `PREDICTIONS`; see `ModelWithTask.score`."""
        scores = dict(scores)
        predictions = scores.pop(PREDICTIONS, None)
        if self.further and self.states is not None and isinstance(predictions, Predictions):
            self.further.update(self.states, batch, predictions)
        if not self.layout:
            self._lay_out([(name, _classes(sums)) for name, (sums, _) in scores.items()])
        parts = [samples, *(part for pair in scores.values() for part in pair)]
        self.slots[batch] = torch.cat([self._column(part) for part in parts])

    def _column(self, part: Tensor | float) -> Tensor:
        if isinstance(part, Tensor):
            return part.detach().view(-1).double()
        return torch.full((1,), part, dtype=torch.float64, device=self.device)

    def _lay_out(self, layout: Layout) -> None:
        self.layout = layout
        width = 1 + sum(2 * max(classes, 1) for _, classes in layout)
        self.slots = torch.zeros(self.batches, width, dtype=torch.float64, device=self.device)

    def result(self) -> Score | None:
        """The score over all processes, or None on all of them if a batch is missing."""
        if self.batches < ranks():  # those without a batch do not know what the others count
            layout = from_leader(self.layout, self.device)
            if not layout:  # stopped before its first batch
                return None
            if not self.layout:
                self._lay_out(layout)
        elif total(
            torch.tensor(float(not self.layout), device=self.device)
        ).item():  # a rank was stopped so early
            return None
        samples, *columns = total(self.slots).T.tolist()
        if not all(samples):
            return None
        whole = round(sum(samples))
        sums = iter(map(math.fsum, columns))
        metrics = {}
        counts = {}
        empty = False
        for name, classes in self.layout:
            values = [next(sums) for _ in range(max(classes, 1))]
            weights = [next(sums) for _ in range(max(classes, 1))]
            metrics[name] = _mean_over_classes(values, weights)
            empty = empty or (name == "loss" and not any(weights))
            if not classes and weights == [whole] and values[0].is_integer():
                counts[name] = round(values[0])
        metrics |= self.derive(metrics)
        why = "there is no unit in all of the data: each target is left out" if empty else ""
        _warn(metrics, why or "outputs of the model are not finite, or too large")
        if self.further and self.states is not None:
            found = self.further.merged(self.states)
            _warn(
                found, "it may have no value for these samples, of a class without a sample for one"
            )
            metrics |= found
        return Score(metrics, whole, counts)


def _warn(metrics: dict[str, float], reason: str) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            log.warning("the %s of an evaluation is %s: %s", name, value, reason)


def _classes(sums: Tensor | float) -> int:
    if isinstance(sums, Tensor) and sums.ndim:
        return sums.numel()
    return 0


def _mean_over_classes(values: list[float], weights: list[float]) -> float:
    """NaN if no class has a weight."""
    parts = [value / weight for value, weight in zip(values, weights, strict=True) if weight]
    return math.fsum(parts) / len(parts) if parts else math.nan
