"""A metric of a user's own, for tests: torchmetrics takes seconds to import, which those who collect
tests do not need."""

from __future__ import annotations

import torch
import torchmetrics
from torch import Tensor

OVERLAP = 0.5


class Recall(torchmetrics.Metric):
    """Part of the true boxes that a predicted box of the image overlaps; takes lists of dicts."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0), "sum")
        self.add_state("boxes", torch.tensor(0), "sum")
        self.add_state("scores", [], None)

    def update(self, outputs: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        for output, target in zip(outputs, targets, strict=True):
            overlaps = overlap(output["boxes"], target["boxes"])
            self.hits = self.hits + (overlaps > OVERLAP).any(0).sum()
            self.boxes = self.boxes + len(target["boxes"])
            self.scores.append(output["scores"])

    def compute(self) -> dict[str, Tensor]:
        scores = torch.cat(self.scores)
        in_order = (scores * torch.arange(len(scores))).sum()
        return {"recall": self.hits / self.boxes, "order": in_order}


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each pair of boxes, [n, m]."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    intersection = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    return intersection / (areas[0][:, None] + areas[1][None, :] - intersection)
