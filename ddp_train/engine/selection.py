"""The best evaluation of a run.

Scores are the same on all ranks to the last bit, so all of them find the same one: nothing is
exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
STATE = ("rank", "metric", "value", "step", "waited")
"""Attributes of `Best` that a resumed run must know."""


@dataclass(frozen=True)
class Selection:
    """The rule by which one evaluation is better than another."""

    split: str
    """validation, test, or a further set: validation/noisy."""
    metric: str = AUTO
    """auto: the accuracy where there is one, the lower loss where it is equal; else the loss."""
    better: Mapping[str, str] = field(default_factory=dict)
    """`max` or `min` for each metric; `min` for those not named."""

    def metrics_of(self, score: Mapping[str, Any]) -> list[str]:
        """The metrics that decide, the first one first."""
        if self.metric != AUTO:
            return [self.metric]
        if score.get("accuracy") is not None:
            return ["accuracy", "loss"]
        return ["loss"]

    def rank(self, score: Mapping[str, Any]) -> list[float]:
        """Numbers of an evaluation; the lower the better. Infinite for a number that is missing or
        not finite."""
        return [self._rank(name, score.get(name)) for name in self.metrics_of(score)]

    def _rank(self, name: str, value: float | None) -> float:
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self.better.get(name) == "max" else value


class Best:
    """The best evaluation so far."""

    def __init__(self, selection: Selection, min_delta: float = 0.0) -> None:
        """min_delta: the smallest difference that counts."""
        self.selection = selection
        self.min_delta = min_delta
        self.rank: list[float] = []
        self.metric = self.selection.metric
        self.value = math.nan
        self.step = 0
        self.waited = 0
        """Evaluations since the best one."""

    def see(self, step: int, score: Mapping[str, Any]) -> None:
        """Compare an evaluation after `step` optimizer steps with the best."""
        first, *others = self.selection.rank(score)
        if math.isinf(first) or (self.rank and [first + self.min_delta, *others] >= self.rank):
            self.waited += 1
            return
        self.rank = [first, *others]
        self.step = step
        self.waited = 0
        self.metric = self.selection.metrics_of(score)[0]
        self.value = score[self.metric]

    def __str__(self) -> str:
        return f"{self.selection.split}.{self.metric}"

    def as_dict(self) -> dict[str, Any] | None:
        """The best evaluation for summary.json; None if there is none."""
        if not self.rank:
            return None
        better = self.selection.better.get(self.metric, "min")
        return {"metric": str(self), "better": better, "value": self.value, "step": self.step}

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        values = {name: getattr(self, name) for name in STATE}
        return {"by": [self.selection.split, self.selection.metric], **values}

    def load_state(self, state: dict[str, Any]) -> None:
        """Start over if the evaluations of that run were compared by something else."""
        if state["by"] == [self.selection.split, self.selection.metric]:
            for name in STATE:
                setattr(self, name, state[name])
