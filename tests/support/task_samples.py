"""Samples, models and tasks of every kind, small enough to train in a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from ddp_train.data.datasets import ArraySource
from ddp_train.data.user_dataset import UserDataset

SAMPLES = 29


CLASSES = 3


WORDS = 7


LENGTH = 6
"""A prime: the last global batch has 13 of 16 samples, which 2, 3 and 4 processes share
unevenly."""


DRAW = torch.Generator().manual_seed(0)


INPUTS = torch.randn(SAMPLES, 4, generator=DRAW)


LABELS = torch.randint(0, CLASSES, (SAMPLES,), generator=DRAW)


IMAGES = torch.randn(SAMPLES, 2, 4, 4, generator=DRAW)


MASKS = torch.randint(0, CLASSES, (SAMPLES, 4, 4), generator=DRAW)


MASKS[
    torch.rand(MASKS.shape, generator=DRAW) < torch.linspace(0, 0.9, SAMPLES)[:, None, None]
] = -100


IDS = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=DRAW)


NEXT = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=DRAW)


NEXT[
    torch.arange(LENGTH) >= 1 + torch.arange(SAMPLES)[:, None] % LENGTH
] = -100  # from 1 to 6 valid tokens each


NEXT[3] = -100  # and one sample without any


class Ragged:
    """Sentences of 1 to 5 vectors, each with a weight: dicts, put together by the data set
    itself."""

    classes = ("no", "yes")

    def __init__(self, train: bool) -> None:
        self.lengths = [1 + number * 7 % 5 for number in range(SAMPLES)]
        self.words = torch.randn(SAMPLES, 5, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {
            "words": self.words[number, : self.lengths[number]],
            "weight": torch.tensor(1.0 + number % 3),
        }

    def collate_fn(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        counts = torch.tensor([len(sample["words"]) for sample in samples])
        return {
            "words": nn.utils.rnn.pad_sequence(
                [sample["words"] for sample in samples], batch_first=True
            ),
            "about": {
                "counts": counts,
                "weights": default_collate([sample["weight"] for sample in samples]),
            },
        }


class WeightedNorm:
    """No base class: what it lacks comes from `Task`. The mean is over weighted words, whose number
    is no integer."""

    better = {"mean_output": "max"}  # noqa: RUF012

    def parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        counts = batch["about"]["counts"]
        weights = batch["about"]["weights"]
        outputs = model(batch["words"]).squeeze(-1)
        valid = torch.arange(outputs.shape[1])[None] < counts[:, None]
        return outputs, valid * weights[:, None] / 3

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, weights = self.parts(model, batch)
        return ((outputs - 1).square() * weights).sum(), weights.sum()

    def score(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        outputs, weights = self.parts(model, batch)
        return {"mean_output": ((outputs * weights).sum(), weights.sum())}


class Head(nn.Module):
    """A model for every task here: a layer over the last dimension of numbers, or over channels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers: dict[str, nn.Module] = {
            "table": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
            "number": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
            "image": nn.Conv2d(2, CLASSES, 3, padding=1),
            "text": nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, WORDS)),
        }
        self.layers = layers[kind]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


SOFT = functional.one_hot(LABELS, CLASSES) * 0.8 + 0.2 / CLASSES


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "classification": (
        "table",
        {"name": "classification", "label_smoothing": 0.1, "class_weights": [1, 2, 3]},
        ArraySource(INPUTS, LABELS),
    ),
    "soft labels": ("table", {"name": "classification"}, ArraySource(INPUTS, SOFT)),
    "multilabel": (
        "table",
        {"name": "multilabel", "pos_weight": [1, 2, 3]},
        ArraySource(INPUTS, (SOFT > 0.5).float()),
    ),
    "regression": ("table", {"name": "regression", "loss": "huber"}, ArraySource(INPUTS, SOFT)),
    "segmentation": ("image", {"name": "segmentation"}, ArraySource(IMAGES, MASKS)),
    "language_model": ("text", {"name": "language_model"}, ArraySource(IDS, NEXT)),
    "custom": ("number", {"_target_": f"{__name__}.WeightedNorm"}, UserDataset(Ragged(True), 0)),
}


class Returns:
    def __init__(self, found: Any) -> None:
        self.found = found

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.found


class Scores(Returns):
    def score(self, model: nn.Module, batch: Any) -> Any:
        return self.found
