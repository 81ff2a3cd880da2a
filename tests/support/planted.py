"""Models, losses, data sets and transforms for tests/laboratory/test_prove.py: sound ones, and each
with one planted defect."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6
CLASSES = 3


class Net(nn.Module):
    """Rows of numbers to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.last = nn.Linear(8, CLASSES)

    def hidden(self, rows: Tensor) -> Tensor:
        return functional.tanh(self.first(rows))

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.hidden(rows))


class WithDropout(Net):
    """A layer of dropout, one in forward, and noise: none of them is a defect."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def hidden(self, rows: Tensor) -> Tensor:
        rows = self.drop(super().hidden(rows))
        if self.training:
            rows = rows + 0.1 * torch.randn_like(rows)
        return functional.dropout(rows, 0.2, self.training)


class Spare(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def hidden(self, rows: Tensor) -> Tensor:
        return self.norm(super().hidden(rows))


class Counting(Net):
    """A schedule of its own, in an attribute that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def hidden(self, rows: Tensor) -> Tensor:
        self.calls += self.training
        return super().hidden(rows) / (1 + 0.1 * self.calls)


class CountingInBuffer(Net):
    """A schedule of its own, in a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def hidden(self, rows: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().hidden(rows) / (1 + 0.1 * self.calls)


STEPS = [0]


class Global(Net):
    def hidden(self, rows: Tensor) -> Tensor:
        STEPS[0] += self.training
        if self.training:
            return super().hidden(rows) / STEPS[0]
        return super().hidden(rows)


class Noisy(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            return rows + torch.from_numpy(np.random.randn(*rows.shape)).to(rows)
        return rows


class NumpyNoise(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noisy()

    def hidden(self, rows: Tensor) -> Tensor:
        return self.noise(super().hidden(rows))


class Outside(nn.Module):
    """Mixes samples before it calls the layers that would be blamed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows - rows.mean(0))


class Recurrent(nn.Module):
    """Reads the padding of a batch: backwards from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(1, 4, batch_first=True, bidirectional=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.cells(rows[..., None])[0][:, 0])


def padded(samples: list[Any]) -> Any:
    """To the longest of a batch: the last numbers of a row are cut off first, as many as its label
    says."""
    rows = [row[: WIDTH - 2 * int(label)] for row, label in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(
        [int(label) for _, label in samples]
    )


class Shuffled:
    """Its samples are in another order whenever it is made."""

    classes = ("a", "b", "c")

    def __init__(self, train: bool) -> None:
        self.order = np.random.default_rng().permutation(50)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> Any:
        place = int(self.order[number])
        return torch.sin(torch.arange(WIDTH) * (place + 1.0)), place % CLASSES


class ShuffledByGlobals(Shuffled):
    """As above, by generators that are seeded for it: no defect."""

    def __init__(self, train: bool) -> None:
        numbers = list(range(50))
        random.shuffle(numbers)
        self.order = np.random.permutation(50)[numbers]


class Centred(Net):
    def hidden(self, rows: Tensor) -> Tensor:
        return super().hidden(rows - rows.mean(0))


class Weighted:
    """Weighted rows: units of its own, whose number is known when the batch is there."""

    unit = "weight"

    def parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        rows, labels = batch
        losses = functional.cross_entropy(model(rows), labels, reduction="none")
        return losses, 0.5 + labels.to(losses)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        losses, weights = self.parts(model, batch)
        return (losses * weights).sum(), weights.sum()


class Averaging(Weighted):
    """Weights that are made to have a mean of 1, in each micro-batch anew."""

    unit = "row"
    units_are_samples = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        losses, weights = self.parts(model, batch)
        return (losses * weights).sum() / weights.mean(), len(losses)


class Rounding(Weighted):
    """A number of units that does not add up in batches larger than those that a task is tried
    with."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        losses, weights = self.parts(model, batch)
        return (losses * weights).sum(), weights.sum().ceil() if len(losses) > 7 else weights.sum()


class ScoredByBatch(Weighted):
    """The root of a ratio of each batch, and its mean over samples."""

    def score(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        rows, labels = batch
        hits = (model(rows).argmax(1) == labels)[labels > 0].sum()
        root = (hits / (labels > 0).sum().clamp(min=1)).sqrt()
        return {"loss": self.loss(model, batch), "recall": (root * len(labels), len(labels))}


class Clocked(Weighted):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        losses, weights = self.parts(model, batch)
        return (losses * weights).sum() * (1 + time.perf_counter() % 1), weights.sum()


class Smoothed(Weighted):
    """A score with a memory."""

    average = 0.0

    def score(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        losses, _ = self.parts(model, batch)
        self.average = 0.5 * self.average + 0.5 * float(losses.mean())
        return {"smooth": (self.average * len(losses), len(losses))}


class Rows:
    """Rows that follow from their numbers."""

    classes = ("a", "b", "c")

    def __init__(self, train: bool) -> None:
        generator = torch.Generator().manual_seed(int(train))
        self.rows = torch.randn(80, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.rows[number], number % CLASSES


class Remembering(Rows):
    """Each sample is a little larger than the one that was fetched before it."""

    fetched = 0

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.fetched += 1
        row, label = super().__getitem__(number)
        return row * (1 + 0.01 * self.fetched), label


class Unseeded(Rows):
    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        row, label = super().__getitem__(number)
        return row + torch.from_numpy(np.random.default_rng().standard_normal(WIDTH)).float(), label


class Hashed(Rows):
    """The same in one process: another one has other hashes of texts."""

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        row, label = super().__getitem__(number)
        return row + hash(f"row {number}") % 7, label


class Cached(Rows):
    """Augmented once, and never again."""

    def __init__(self, train: bool) -> None:
        super().__init__(train)
        self.train = train
        self.cache = {}

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number not in self.cache:
            row, label = super().__getitem__(number)
            self.cache[number] = (row + 0.1 * torch.randn(WIDTH) * self.train, label)
        return self.cache[number]


class Jitter:
    """Draws from all three generators, which are keyed for it."""

    def __call__(self, row: Tensor) -> Tensor:
        return (
            row * (0.9 + 0.2 * random.random()) + 0.1 * torch.randn(row.shape) + np.random.randn()
        )


class Keep:
    def __call__(self, row: Tensor) -> Tensor:
        return row


class OwnGenerator:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, row: Tensor) -> Tensor:
        return row + torch.randn(row.shape, generator=self.generator)


class SeedsItself:
    def __call__(self, row: Tensor) -> Tensor:
        random.seed(0)
        return row + random.random()
