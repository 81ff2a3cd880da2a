"""The score of a data set: exact sums, each sample once, the same on any number of processes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.process_group import ranks, total
from ddp_train.errors import TaskError
from ddp_train.tasks.further_metrics import FurtherMetrics
from ddp_train.tasks.task import BatchScore
from ddp_train.text import by_rank

log = logging.getLogger(__name__)

OF_THE_MODEL = "outputs of the model are not finite, or too large"
Layout = list[tuple[str, int]]
"""Metrics in order, and the number of classes of each: 0 for a scalar."""


@dataclass(frozen=True)
class Score:
    """The result of an evaluation."""

    metrics: dict[str, float]
    """`loss` first."""
    samples: int
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of samples, for metrics that are a part of the samples: {"accuracy": 237}."""

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
        further_metrics: FurtherMetrics | None = None,
    ) -> None:
        """Begin an evaluation.

        batches: of the whole set, on all processes.
        derive: see `tasks.task.Task`.
        further_metrics: metrics beside those of the task.
        """
        self.batches = batches
        self.device = device
        self.derive = derive
        self.further_metrics = further_metrics
        self.states = further_metrics.new_states() if further_metrics else []
        self.layout: Layout = []
        self.slots = torch.empty(0)
        """float64 [batches, 1 + columns]: the number of samples, then sum and weight of each
        metric."""

    def add(self, batch: int, score: BatchScore, samples: int) -> None:
        """Add the score of a batch. batch: its number in the whole set."""
        if self.further_metrics and score.predictions is not None:
            self.further_metrics.update(self.states, batch, score.predictions)
        layout = [(name, _classes(value)) for name, (value, _) in score.sums.items()]
        if not self.layout:
            self._lay_out(layout)
        elif sorted(layout) != sorted(self.layout):
            here = _in_words(layout)
            raise _unlike(f"{_in_words(self.layout)}, and for batch {batch} {here}")
        parts: list[Tensor | float] = [samples]
        for name, _ in self.layout:
            parts += score.sums[name]
        self.slots[batch] = torch.cat([self._column(part) for part in parts])

    def result(self, explain: Callable[[], str] = lambda: OF_THE_MODEL) -> Score | None:
        """The score over all processes, or None on all of them if a batch is missing.

        explain: why a loss is not finite, for a warning. Called on all processes alike, if it is.
        """
        if not self._agree_on_layout():
            return None
        samples_of_batches, *columns = total(self.slots).T.tolist()
        if not all(samples_of_batches):
            return None
        samples = round(sum(samples_of_batches))
        sums = iter([math.fsum(column) for column in columns])
        metrics: dict[str, float] = {}
        counts: dict[str, int] = {}
        has_units = True
        for name, classes in self.layout:
            values = list(islice(sums, max(classes, 1)))
            weights = list(islice(sums, max(classes, 1)))
            metrics[name] = _mean_over_classes(values, weights)
            if not classes and weights == [samples] and values[0].is_integer():
                counts[name] = round(values[0])
            if name == "loss":
                has_units = any(weights)
        metrics |= self.derive(metrics)
        if not all(map(math.isfinite, metrics.values())):
            reason = "there is nothing to average, since every target is left out"
            if has_units:
                reason = OF_THE_MODEL if math.isfinite(metrics["loss"]) else explain()
            _warn_of_non_finite(metrics, reason)
        if self.further_metrics:
            further = self.further_metrics.merged(self.states)
            reason = (
                "the metric may have no value for these samples, for example where a class has"
                " no sample"
            )
            _warn_of_non_finite(further, reason)
            metrics |= further
        return Score(metrics, samples, counts)

    def _agree_on_layout(self) -> bool:
        """Lay out the metrics as on rank 0, also if this process had no batch. A collective.

        Returns False if a process was stopped before its first batch. Raises TaskError, on all
        processes, if they have other metrics.
        """
        texts = texts_from_all_ranks(json.dumps(self.layout), self.device)
        layouts: list[Layout] = []
        for text in texts:
            layouts.append([(name, classes) for name, classes in json.loads(text)])
        is_one_stopped = self.batches >= ranks() and not all(layouts)
        if is_one_stopped or not layouts[0]:
            return False
        known = [layout for layout in layouts if layout]
        if any(sorted(layout) != sorted(known[0]) for layout in known):
            raise _unlike(by_rank(map(_in_words, layouts)))
        self._follow(layouts[0])
        return True

    def _follow(self, layout: Layout) -> None:
        """Put the metrics into the order of another layout."""
        if not self.layout:
            self._lay_out(layout)
        if self.layout == layout:
            return
        widths = [2 * max(classes, 1) for _, classes in self.layout]
        samples, *of_metrics = self.slots.split([1, *widths], dim=1)
        names = [name for name, _ in self.layout]
        by_name = dict(zip(names, of_metrics, strict=True))
        self.slots = torch.cat([samples, *(by_name[name] for name, _ in layout)], dim=1)
        self.layout = layout

    def _lay_out(self, layout: Layout) -> None:
        self.layout = layout
        width = 1 + sum(2 * max(classes, 1) for _, classes in layout)
        self.slots = torch.zeros(self.batches, width, dtype=torch.float64, device=self.device)

    def _column(self, part: Tensor | float) -> Tensor:
        if isinstance(part, Tensor):
            return part.detach().reshape(-1).to(self.device, torch.float64)
        return torch.full((1,), part, dtype=torch.float64, device=self.device)


def _warn_of_non_finite(metrics: dict[str, float], reason: str) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            log.warning("the %s of an evaluation is %s: %s", name, value, reason)


def _classes(value: Tensor | float) -> int:
    """The number of classes of a sum; 0 for a scalar, [1] included."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return value.numel()
    return 0


def _in_words(layout: Layout) -> str:
    names = [f"{name} [{classes}]" if classes else str(name) for name, classes in layout]
    return ", ".join(names) or "no batch"


def _unlike(findings: str) -> TaskError:
    return TaskError(
        f"score() returns different metrics for different batches: {findings}",
        "return the same metrics for each batch, with a sum and a weight of 0 where a batch has"
        " nothing to count",
    )


def _mean_over_classes(values: list[float], weights: list[float]) -> float:
    """The mean of value / weight over the classes that have a weight; NaN if none has."""
    quotients = [value / weight for value, weight in zip(values, weights, strict=True) if weight]
    if not quotients:
        return math.nan
    return math.fsum(quotients) / len(quotients)
