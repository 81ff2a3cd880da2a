"""A loop of a user's own, of which tests/campaigns/fuzz_scripts.py draws the parts.

    python fuzz_loop.py LOOP FOLDER     LOOP is JSON; what it learned goes to FOLDER/learned.json

`train` is given the `run` of a session, or `Alone`: plain torch in one process, which the session
must agree with in float64 on any number of processes, disturbed or not.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)

import ddp_train
from ddp_train.data.batch_plan import NUMBERS, epoch_order
from tests.support.batch_types import Encoding, InPlace, Pair
from tests.support.keyed_numbers import KeyedNumbers
from tests.support.streams import Positioned, Stream

CLASSES = 3
LOG_EVERY_STEPS = 2
SEED = 0
"""The seed of the session."""


@dataclass(frozen=True)
class Loop:
    """The parts of a loop, as they were drawn."""

    samples: int
    test_samples: int
    global_batch_size: int
    test_batch_size: int
    epochs: int
    accumulate: int
    """Batches whose gradients add up; a step may lie in the next epoch."""
    windows: bool
    """Their mean is one over all samples, or numbers of the mask, of these batches."""
    optimizer: str
    norm: bool
    """Batch norm."""
    masked: bool
    """The mean is over the masked numbers, not over samples."""
    changes: str
    """What `set_epoch` changes of the data: nothing, samples or length."""
    workers: int
    order: str
    """One of ORDERS."""
    second: str
    """A further loader in each step: none, one that repeats, or one that may end before."""
    batch: str
    """One of BATCHES."""
    models: int
    """One network, or an encoder and a head with an optimizer each."""
    schedule: str
    """none, by batch, or plateau."""
    noise: bool
    """Keyed, on the inputs."""
    save_every_step: bool
    break_at: int
    """The batch of each epoch after which the loop is left; -1 for none."""
    fault: str = "none"
    """none, kill or stop."""
    fault_rank: int = 0
    fault_step: int = 1

    def learned_at_once(self) -> bool:
        """Whether no epoch began in the middle, so that its sums are whole."""
        return self.fault == "none"


ORDERS = {
    "keyed": "shuffled by the session",
    "as it is": "",
    "weighted": "a sampler of torch's with a generator of its own",
    "pairs": "a batch sampler that draws each batch when it is asked for",
    "loader": "a DataLoader that drops the last batch",
    "stream": "each process reads all",
    "positioned": "a stream that says where it is",
    "split": "each process reads a part",
}
SAMPLED = ("weighted", "pairs", "loader")
"""A sample that comes twice is keyed by its places in the order."""
STREAMS = ("stream", "positioned", "split")
Sample = tuple[Tensor, Tensor, int, int]


class Rows(Dataset[Sample]):
    """Rows with a mask, a class and a number, which `set_epoch` may change."""

    def __init__(self, samples: int, changes: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randn(samples + 20, 4, generator=generator, dtype=torch.float64)
        self.masks = torch.rand(samples + 20, 4, generator=generator, dtype=torch.float64) < 0.7
        self.masks[:, 0] = True  # the mean over nothing is no number in torch, 0 in a session
        self.samples = samples
        self.changes = changes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples + 3 * self.epoch * (self.changes == "length")

    def __getitem__(self, number: int) -> Sample:
        shift = 0.1 * self.epoch * (self.changes == "samples")
        row = self.rows[number]
        return row + shift, self.masks[number], int(row[0] > 0) + int(row[1] > 0), number


class PairBatches(Sampler[list[int]]):
    """Batches of two samples, or of one sample twice."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.random = random.Random(5)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield [self.random.randrange(self.samples) for _ in range(2)]


class Moving(InPlace):
    """An object that moves its inputs, and beside them what stays."""

    def __init__(self, parts: list[Tensor]) -> None:
        super().__init__(parts[0])
        self.rest = parts[1:]

    def to(self, place: Any) -> None:
        super().to(place)
        self.rest = [part.to(place) for part in self.rest]


BATCHES = {
    "list": lambda parts: parts,
    "mapping": lambda parts: Encoding(dict(zip("abcd", parts, strict=True))),
    "named": lambda parts: Pair(parts[0], parts[1:]),
    "object": Moving,
}


class Collate:
    """Puts samples together in a batch of some type."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, samples: list[Sample]) -> Any:
        return BATCHES[self.kind](list(default_collate(samples)))


def parts_of(batch: Any) -> tuple[Tensor, ...]:
    """Rows, masks, classes and numbers of a batch of any type."""
    match batch:
        case Encoding():
            return tuple(batch.data.values())
        case Pair():
            return (batch.inputs, *batch.targets)
        case Moving():
            return (batch.x, *batch.rest)
    return tuple(batch)


class Kept:
    """What the loop keeps over a resume."""

    def __init__(self) -> None:
        self.centre = torch.zeros(4, dtype=torch.float64)
        self.scores: list[list[float]] = []
        self.sums: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Alone:
    """What a plain script does in place of a session's `run`."""

    rank = 0
    step = 0
    epoch = 0

    def __init__(self, processes: int = 1) -> None:
        """processes: of the session, which share a stream that is split."""
        self.processes = processes
        self.has_loader = False
        self.is_trained = False
        """Whether a loss was computed of the current batch: else a loop left it unused."""
        self.place = 0
        """Samples of the epoch before the current batch."""
        self.units: dict[Any, float] = {}
        """What the gradients of an optimizer have added up over."""
        self.logged: dict[int, list[float]] = {}
        """Sum and number of what was logged in each step."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def loader(
        self, data: Any, *, global_batch_size: int = 1, repeat: bool = False, **arguments: Any
    ) -> Batches:
        loader: Any = data
        if not isinstance(data, Stream) and "batch_sampler" not in arguments:
            arguments.pop("num_workers", 0)  # what is drawn does not depend on them
        if arguments.pop("split_by_node", False):
            loader = Shares(data.samples, self.processes, global_batch_size, arguments)
        elif not isinstance(data, DataLoader):
            if arguments.pop("shuffle", False):
                arguments["sampler"] = KeyedOrder(self, data)
            if "batch_sampler" not in arguments:
                arguments["batch_size"] = global_batch_size
            loader = DataLoader(data, **arguments)
        leads = not self.has_loader
        self.has_loader = True
        return Batches(self, loader, leads, repeat)

    def test_loader(self, data: Any, batch_size: int, collate_fn: Any) -> Batches:
        return Batches(self, DataLoader(data, batch_size, collate_fn=collate_fn))

    def resume(self, **_: Any) -> None:
        pass

    def save(self) -> None:
        pass

    def epochs(self, count: int) -> Iterator[int]:
        for self.epoch in range(count):
            yield self.epoch

    def mean(
        self, losses: Tensor, over: Tensor | None = None, of: Any = None, accumulate: Any = None
    ) -> Tensor:
        self.is_trained = True
        units = float(len(losses) if over is None else over)
        if accumulate is None:
            return losses.sum() / units
        parameters = [one for group in accumulate.param_groups for one in group["params"]]
        gradients = [one.grad for one in parameters if one.grad is not None]
        before = self.units.get(accumulate, 0.0) * bool(gradients)
        self.units[accumulate] = before + units
        for gradient in gradients:
            gradient *= before / (before + units)
        return losses.sum() / (before + units)

    def log(self, name: str, values: Tensor) -> None:
        self.logged[self.step + 1] = [values.sum().item(), len(values)]

    def sum(self, value: Any) -> Any:
        return value

    def gather(self, rows: list[Tensor]) -> Tensor:
        return torch.cat(rows) if rows else torch.empty(0)


class KeyedOrder(Sampler[int]):
    """The order of a session in the epoch that it is in."""

    def __init__(self, run: Alone, data: Any) -> None:
        self.run = run
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_order(SEED, self.run.epoch, len(self.data)).tolist())


class Shares:
    """The batches of a stream of which each process reads a part, put together."""

    def __init__(self, rows: Rows, processes: int, size: int, arguments: dict[str, Any]) -> None:
        self.collate = arguments.pop("collate_fn")
        self.parts = []
        for rank in range(processes):
            part = Stream(rows, slice(rank, None, processes))
            share = size // processes + (rank < size % processes)
            self.parts.append(DataLoader(part, share, collate_fn=list, **arguments))
        self.dataset = self

    def set_epoch(self, epoch: int) -> None:
        for part in self.parts:
            part.dataset.set_epoch(epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        for shares in itertools.zip_longest(*self.parts, fillvalue=[]):
            yield self.collate([sample for share in shares for sample in share])


class Batches:
    """The batches of a plain loop."""

    def __init__(self, run: Alone, loader: Any, leads: bool = False, repeat: bool = False) -> None:
        """leads: steps of the loop are counted by its batches. repeat: without an end."""
        self.run = run
        self.loader = loader
        self.leads = leads
        self.repeat = repeat

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._one_pass()
        while self.repeat:
            yield from self._one_pass()

    def _one_pass(self) -> Iterator[Any]:
        if isinstance(self.loader.dataset, Stream | Shares):
            self.loader.dataset.set_epoch(self.run.epoch)
        if not self.leads:
            yield from self.loader
            return
        self.run.place = 0
        for batch in self.loader:
            self.run.is_trained = False
            try:
                yield batch
            finally:
                self.run.place += len(parts_of(batch)[0])
                self.run.step += self.run.is_trained


def network(norm: bool, models: int) -> list[nn.Module]:
    """One network, or its two parts."""
    torch.manual_seed(1)
    # before a norm a bias has no gradient but rounding, which Adam would enlarge
    layers = [nn.Linear(4, 6, bias=not norm), nn.Tanh(), nn.Linear(6, CLASSES)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(6))
    if models == 1:
        return [nn.Sequential(*layers).double()]
    return [nn.Sequential(*layers[:-1]).double(), layers[-1].double()]


def loader_of(loop: Loop, run: Any, data: Rows) -> Any:
    """The loader of the training batches."""
    arguments: dict[str, Any] = {"collate_fn": Collate(loop.batch)}
    size = {"global_batch_size": loop.global_batch_size, "num_workers": loop.workers}
    generator = torch.Generator().manual_seed(3)
    match loop.order:
        case "keyed" | "as it is":
            return run.loader(data, shuffle=loop.order == "keyed", **arguments, **size)
        case "weighted":
            weights = range(1, loop.samples + 1)
            sampler = WeightedRandomSampler(weights, loop.samples, generator=generator)
            return run.loader(data, sampler=sampler, **arguments, **size)
        case "pairs":
            pairs = PairBatches(loop.samples)
            return run.loader(data, batch_sampler=pairs, num_workers=loop.workers, **arguments)
        case "loader":
            plain = DataLoader(
                data,
                loop.global_batch_size,
                shuffle=True,
                drop_last=True,
                generator=generator,
                **arguments,
            )
            return run.loader(plain)
        case "stream" | "positioned":
            kind = {"stream": Stream, "positioned": Positioned}[loop.order]
            return run.loader(kind(data), **arguments, **size)
    part = slice(run.rank, None, run.processes)
    return run.loader(Stream(data, part), split_by_node=True, **arguments, **size)


class Parts:
    """The models, optimizers and schedulers of a loop."""

    def __init__(self, loop: Loop, run: Any) -> None:
        self.models = [run.wrap(model) for model in network(loop.norm, loop.models)]
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[loop.optimizer]
        self.optimizers = [kind(model.parameters(), lr=0.02) for model in self.models]
        self.schedulers: list[Any] = []
        first = self.optimizers[0]
        if loop.schedule == "by batch":
            self.schedulers = [lr_scheduler.ExponentialLR(first, 0.9)]
        elif loop.schedule == "plateau":
            self.schedulers = [lr_scheduler.ReduceLROnPlateau(first, patience=0, threshold=0.05)]

    def __call__(self, rows: Tensor) -> Tensor:
        for model in self.models:
            rows = model(rows)
        return rows

    def named(self) -> dict[str, Any]:
        """All of them, for `run.resume`."""
        lists = {"model": self.models, "optimizer": self.optimizers, "scheduler": self.schedulers}
        return {f"{name}_{n}": one for name, each in lists.items() for n, one in enumerate(each)}

    def set_training(self, is_training: bool) -> None:
        for model in self.models:
            model.train(is_training)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def weights(self) -> list[Any]:
        return [value.tolist() for model in self.models for value in model.state_dict().values()]


def train(loop: Loop, run: Any, folder: Path) -> dict[str, Any]:
    """The loop. Returns what it learned: numbers that a session must have too."""
    data = Rows(loop.samples, loop.changes, seed=1)
    parts = Parts(loop, run)
    loader = loader_of(loop, run, data)
    second = None
    if loop.second != "none":
        further = Rows(6, "nothing", seed=3)
        collate = Collate("list")
        is_endless = loop.second == "repeats"
        second = run.loader(
            further, global_batch_size=2, shuffle=False, repeat=is_endless, collate_fn=collate
        )
    test_data = Rows(loop.test_samples, "nothing", seed=2)
    collate = Collate(loop.batch)
    test_loader = run.test_loader(test_data, batch_size=loop.test_batch_size, collate_fn=collate)
    kept = Kept()
    run.resume(kept=kept, **parts.named())
    for epoch in run.epochs(loop.epochs):
        data.set_epoch(epoch)
        train_epoch(loop, run, folder, kept, (parts, loader, second))
        kept.scores.append(score(run, parts, test_loader))
        if loop.schedule == "plateau":
            parts.schedulers[0].step(kept.scores[-1][1])
    rates = [optimizer.param_groups[0]["lr"] for optimizer in parts.optimizers]
    learned = {"weights": parts.weights(), "centre": kept.centre.tolist(), "rates": rates}
    learned["scores"] = kept.scores
    if loop.learned_at_once():
        learned["sums"] = kept.sums
    return learned


def train_epoch(loop: Loop, run: Any, folder: Path, kept: Kept, objects: tuple[Any, ...]) -> None:
    parts, loader, second = objects
    parts.set_training(True)
    seen = 0
    loss_sum = 0.0
    by_class = torch.zeros(CLASSES, dtype=torch.int64)
    outputs = []
    lead = None
    if second is not None:
        lead = loader
    steps = zip(loader, further_batches(second), strict=False)
    for number, (batch, more) in enumerate(steps):
        disturb(loop, run, folder)
        rows, masks, classes, numbers = parts_of(batch)
        if loop.noise:
            rows = rows + 0.1 * noise_like(loop, run, rows, numbers)
        logits = parts(rows)
        losses = nn.functional.cross_entropy(logits, classes, reduction="none")
        mean_of(loop, run, parts, lead, (losses, masks)).backward()
        if loop.models == 2:  # a loss of the encoder alone
            others = parts.models[0](rows).square().mean(1)
            (run.mean(others, of=lead) / loop.accumulate).backward()
        if second is not None:
            others = parts(parts_of(more)[0]).square().mean(1)
            (run.mean(others, of=second) / loop.accumulate).backward()
        run.log("own/loss", losses.detach())
        if (run.step + 1) % loop.accumulate == 0:
            parts.step()
            if loop.schedule == "by batch":
                parts.schedulers[0].step()
        count = run.sum(len(classes))
        kept.centre = 0.9 * kept.centre + 0.1 * run.sum(rows.sum(0)) / count
        seen += len(classes)
        loss_sum += losses.sum().item()
        by_class = by_class + torch.bincount(classes, minlength=CLASSES)
        outputs.append(logits.detach().sum(1))
        if loop.save_every_step:
            run.save()
        if number == loop.break_at:
            break
    total = run.sum(by_class)
    added = run.gather(outputs).sum().item()
    kept.sums.append([run.sum(seen), run.sum(loss_sum), added, *total.tolist()])


def further_batches(second: Any) -> Any:
    """The batches of the second loader; None in each step if there is none."""
    if second is None:
        return itertools.repeat(None)
    return second


def mean_of(loop: Loop, run: Any, parts: Parts, of: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch. batch: losses and masks. of: the loader, where there are two."""
    losses, masks = batch
    options: dict[str, Any] = {"of": of}
    if loop.masked:
        weights = masks.double().sum(1)
        losses = losses * weights
        options["over"] = weights.sum()
    if loop.windows:
        return run.mean(losses, accumulate=parts.optimizers[0], **options)
    return run.mean(losses, **options) / loop.accumulate


def noise_like(loop: Loop, run: Any, rows: Tensor, numbers: Tensor) -> Tensor:
    if not isinstance(run, Alone):
        return ddp_train.noise_like(rows)
    if loop.order in SAMPLED:
        numbers = numbers + (run.place + torch.arange(len(numbers))) * NUMBERS
    return KeyedNumbers(numbers.numpy(), SEED, run.epoch, run.step).normal(rows.shape[1])


def score(run: Any, parts: Parts, test_loader: Any) -> list[float]:
    parts.set_training(False)
    correct = 0
    loss: Any = 0
    outputs = []
    with torch.no_grad():
        for batch in test_loader:
            rows, _, classes, _ = parts_of(batch)
            logits = parts(rows)
            correct += (logits.argmax(1) == classes).sum().item()
            loss += nn.functional.cross_entropy(logits, classes).item()
            outputs.append(logits)
    everything = run.gather(outputs)
    weighted = everything[:, 0] * torch.arange(1, len(everything) + 1)  # their order counts
    return [run.sum(correct), run.sum(loss) / len(test_loader), weighted.sum().item()]


def disturb(loop: Loop, run: Any, folder: Path) -> None:
    """Kill this rank, or have the run stopped, once."""
    here = (run.rank, run.step) == (loop.fault_rank, loop.fault_step)
    marker = folder / "disturbed"
    if loop.fault == "none" or not here or isinstance(run, Alone) or marker.exists():
        return
    marker.touch()
    if loop.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    starter = os.getppid() if "RANK" in os.environ else os.getpid()
    os.kill(starter, signal.SIGTERM)
    time.sleep(0.3)


def main() -> None:
    loop = Loop(**json.loads(sys.argv[1]))
    folder = Path(sys.argv[2])
    restarts = int(loop.fault == "kill")
    with ddp_train.session(
        folder / "run",
        device="cpu",
        seed=SEED,
        max_restarts=restarts,
        log_every_steps=LOG_EVERY_STEPS,
    ) as run:
        learned = train(loop, run, folder)
        if run.rank == 0:
            (folder / "learned.json").write_text(json.dumps(learned))


def as_argument(loop: Loop) -> str:
    return json.dumps(asdict(loop))


if __name__ == "__main__":
    main()
