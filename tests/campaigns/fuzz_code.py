"""The code that fuzzed runs of tests/campaigns/fuzz.py name as their own: data sets, networks,
tasks, a schedule, and a hook that misbehaves.

The environment variable FUZZ holds JSON: `ledger`, a folder; `delay`, seconds per step; and of the
fault its `kind`, `rank`, `step`, `sample`, and `once`, a file that is there after it has happened
once. Without it nothing misbehaves, and no config knows of it: the command of a run that is
disturbed is that of the run that is not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import ddp_train
from tests.support.batch_types import Attributes, Encoding, InPlace


def own_rank() -> int:
    """Not at import: the zygote of tests imports this module too."""
    return int(os.environ["RANK"])


def asked() -> dict[str, Any]:
    return json.loads(os.environ.get("FUZZ", "{}"))


def is_due(fault: dict[str, Any]) -> bool:
    """Whether it happens now: `once` is made as it does."""
    once = fault.get("once")
    if once and Path(once).exists():
        return False
    if once:
        Path(once).touch()
    return True


class Net(nn.Module):
    """Batch norm and dropout: what makes an exact resume hard."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(4 * 36, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Rows(Dataset[tuple[Tensor, int]]):
    """Stripes with noise that torch's generator draws anew in each epoch. A sample of one split may
    raise."""

    classes = tuple("0123456789")

    def __init__(self, train: bool, samples: int = 60, shift: float = 0.0) -> None:
        self.train = train
        self.samples = samples if train else 30
        self.shift = shift

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        fault = asked()
        wanted = fault.get("kind", "").startswith("sample") and fault["of_train"] == self.train
        if wanted and number == fault["sample"] and is_due(fault):
            raise (
                StopIteration
                if fault["kind"] == "sample stops"
                else ValueError(f"sample {number} is broken")
            )
        image = torch.full((1, 8, 8), self.shift)
        image[0, :, number % 8] = 1 + number % 10
        return image + torch.randn(1, 8, 8) * self.train, number % 10


class Drawn:
    """A task that draws keyed noise in each step, and logs a number of each kind."""

    unit = "image"
    units_are_samples = True
    better: ClassVar = {"right": "max"}

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        images, labels = batch
        kept = ddp_train.dropout(images + 0.1 * ddp_train.noise_like(images), 0.1)
        losses = nn.functional.cross_entropy(model(kept), labels, reduction="none")
        is_one = torch.eq(labels, 1)
        ddp_train.log("own/samples", torch.ones_like(losses).sum(), how="sum")
        ddp_train.log("own/loss", losses)
        ddp_train.log("own/ones", losses[is_one].sum(), over=is_one.sum())
        ddp_train.log("own/samples_now", 24, how="last")
        return losses.sum(), len(labels)

    def score(self, model: Any, batch: Any) -> dict[str, Any]:
        images, labels = batch
        outputs = model(images + 0.1 * ddp_train.noise_like(images))
        loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
        right = (outputs.argmax(1) == labels).sum()
        return {"loss": (loss, len(labels)), "right": (right, len(labels))}


class Sentences(Dataset[Tensor]):
    """Words of any number, in batches of some type."""

    def __init__(self, train: bool, samples: int = 60, batch: str = "encoding") -> None:
        self.samples = samples if train else 30
        self.batch = batch
        generator = torch.Generator().manual_seed(int(train))
        self.words = torch.randint(0, 11, (self.samples, 9), generator=generator)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Tensor:
        return self.words[number, : 2 + number % 8]

    def collate_fn(self, samples: list[Tensor]) -> Any:
        words = pad_sequence(samples, batch_first=True, padding_value=-1)
        match self.batch:
            case "encoding":
                return Encoding({"words": words})
            case "attributes":
                return Attributes(words=words)
            case "in place":
                return InPlace(words)
        return {"words": [words], "count": len(samples)}


def words_of(batch: Any) -> Tensor:
    """The words of a batch of any type, [n, longest]."""
    match batch:
        case InPlace():
            return batch.x
        case Encoding() | Attributes():
            return batch["words"]
    return batch["words"][0]


class Reader(nn.Module):
    """Tells the next word; it takes no sentences too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 11)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(words + 1))


class NextWord:
    """The mean is over words, of which batches have different numbers."""

    unit = "word"
    better: ClassVar = {"right": "max"}

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        words = words_of(batch)
        logits = model(words[:, :-1])
        targets = words[:, 1:]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-1
        )
        return losses, (targets >= 0).sum()

    def score(self, model: Any, batch: Any) -> dict[str, Any]:
        words = words_of(batch)
        right = (model(words[:, :-1]).argmax(2) == words[:, 1:]).sum()
        return {"right": (right, (words[:, 1:] >= 0).sum())}


def falling(step: int, steps: int) -> float:
    """A schedule."""
    return 1 - 0.7 * step / steps


class Hook:
    """Notes the samples of each micro-batch before anything is exchanged, and does what FUZZ asks
    for."""

    def __init__(self, job: Any, run_dir: Path, world: Any) -> None:
        self.job = job
        self.fault = asked()

    def __enter__(self) -> None:
        if self.fault:
            self.job.batches = Noted(self.job, self.fault)
            self.job.wrapped = self.misbehaving(self.job.wrapped)

    def __exit__(self, *_: object) -> None:
        return None

    def misbehaving(self, wrapped: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(data: Any) -> Any:
            fault = self.fault
            time.sleep(fault.get("delay", 0))
            loss, units = wrapped(data)
            here = (fault.get("rank"), fault.get("step")) == (own_rank(), self.job.step)
            if not here or fault["kind"].startswith("sample") or not is_due(fault):
                return loss, units
            return FAULTS[fault["kind"]](loss), units

        return call


class Noted:
    """The batches of a job. A line in the ledger is whole or has no end: the process was killed."""

    def __init__(self, job: Any, fault: dict[str, Any]) -> None:
        self.batches = job.batches
        self.ledger = Path(fault["ledger"], f"rank_{own_rank()}")

    def __iter__(self) -> Iterator[Any]:
        last = -1
        number = 0
        for batch in self.batches:
            one = batch.micro_batch
            last, number = one.step, number + 1 if one.step == last else 0
            with self.ledger.open("a") as file:
                file.write(
                    f"{one.step} {number}"
                    f" {' '.join(map(str, one.indices[: one.num_real].tolist()))}\n"
                )
            yield batch


# --- what may happen in a step --------------------------------------------------------------------


def _raise(error: BaseException) -> Callable[[Tensor], Tensor]:
    def act(_: Tensor) -> Tensor:
        raise error

    return act


def _signal(number: int) -> Callable[[Tensor], Tensor]:
    def act(loss: Tensor) -> Tensor:
        os.kill(os.getpid(), number)
        time.sleep(5)
        return loss

    return act


def _hang(loss: Tensor) -> Tensor:
    time.sleep(600)
    return loss


def _slow(loss: Tensor) -> Tensor:
    time.sleep(0.7)
    return loss


def _allocate(_: Tensor) -> Tensor:
    return torch.empty(2**60, dtype=torch.uint8)


def _vanish(code: int) -> Callable[[Tensor], Tensor]:
    return lambda _: os._exit(code)


def _leave(_: Tensor) -> Tensor:
    sys.exit(3)


LINES = (
    "several lines:\n  FATAL is what this one begins with\nTraceback (most recent call last):\n  no"
)
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "raises": _raise(ValueError("boom")),
    "raises lines": _raise(RuntimeError(LINES)),
    "raises as a peer": _raise(ConnectionResetError(104, "Connection reset by peer")),
    "raises KeyboardInterrupt": _raise(KeyboardInterrupt()),
    "raises MemoryError": _raise(MemoryError()),
    "raises OSError": _raise(OSError(28, "No space left on device")),
    "allocates": _allocate,
    "nan": lambda loss: loss * float("nan"),
    "infinite": lambda loss: loss * float("inf"),
    "segmentation fault": _signal(signal.SIGSEGV),
    "abort": _signal(signal.SIGABRT),
    "real-time signal": _signal(37),
    "sys.exit": _leave,
    "os._exit(0)": _vanish(0),
    "os._exit(75)": _vanish(75),
    "os._exit(70)": _vanish(70),
    "hang": _hang,
    "slow": _slow,
}
