"""Sums that stay on the device until somebody looks, and the file that keeps them: metrics.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.session import total

METRICS = "metrics.jsonl"


class RunningLoss:
    """The losses since the last look. Adding costs no arithmetic and no synchronisation with the device."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.samples = 0

    def add(self, loss: Tensor, samples: int) -> None:
        """loss: the detached sum of the sample losses, or [replicas] of them; samples: how many, 0 for a stand-in."""
        if samples:
            self.losses.append(loss)
            self.samples += samples

    def mean(self, device: str) -> float:
        """The mean loss per sample over all processes, by one reduction; starts over."""
        losses = [loss.view(-1) for loss in self.losses]  # a short batch fills fewer replicas
        local = torch.cat(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64)
        sums = total(
            torch.stack([local.to(device), torch.tensor(float(self.samples), device=device, dtype=torch.float64)])
        )
        self.losses, self.samples = [], 0
        loss, samples = sums.tolist()
        return loss / samples


@dataclass(frozen=True)
class Score:
    """The result of an evaluation: exact counts, each sample once."""

    loss: float
    accuracy: float | None
    correct: int | None
    samples: int

    def as_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "accuracy": self.accuracy, "correct": self.correct, "samples": self.samples}


class Scorer:
    """Collects an evaluation batch by batch, in a slot for each batch of the whole test set.

    The batches are the same on any number of processes, and so are the slots: their sum is bit for bit the same.
    """

    def __init__(self, batches: int, device: str) -> None:
        self.losses = torch.zeros(batches, dtype=torch.float64, device=device)
        self.counts = torch.zeros(batches, 2, dtype=torch.int64, device=device)
        self.labelled = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, batch: int, loss: Tensor, correct: Tensor | None, samples: int) -> None:
        """loss: the sum of the sample losses, a scalar."""
        self.losses[batch] = loss.double()
        self.counts[batch, 1] = samples
        if correct is not None:
            self.counts[batch, 0] = correct
            self.labelled += 1

    def result(self) -> Score:
        """The score over all processes."""
        loss = math.fsum(total(self.losses).tolist())
        correct, samples = total(self.counts).sum(0).tolist()
        labelled = int(total(self.labelled).item()) > 0
        return Score(loss / samples, correct / samples if labelled else None, correct if labelled else None, samples)


class MetricsFile:
    """metrics.jsonl: a line per logging interval and per evaluation. Inactive on all ranks but one."""

    def __init__(self, run_dir: Path, active: bool) -> None:
        self.file = (run_dir / METRICS).open("a", buffering=1) if active else None

    def write(self, **values: Any) -> None:
        if self.file:
            self.file.write(json.dumps(values) + "\n")
