"""A loop of a user's own, of which tests/campaigns/fuzz_scripts.py draws the parts.

    python fuzz_loop.py LOOP FOLDER     LOOP is JSON; what it learned goes to FOLDER/learned.json

`train` is given the `run` of a session, or `Alone`: plain torch in one process, which the session
must agree with in float64 on any number of processes, disturbed or not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_train.data.batch_plan import epoch_order

CLASSES = 3


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
    optimizer: str
    norm: bool
    """Batch norm."""
    masked: bool
    """The mean is over the masked numbers, not over samples."""
    changes: str
    """What `set_epoch` changes of the data: nothing, samples or length."""
    workers: int
    shuffle: bool
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


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Rows with a mask and a class, which `set_epoch` may change."""

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

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        shift = 0.1 * self.epoch * (self.changes == "samples")
        row = self.rows[number]
        return row + shift, self.masks[number], int(row[0] > 0) + int(row[1] > 0)


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
    processes = 1
    step = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def loader(self, data: Any, global_batch_size: int, shuffle: bool, **_: Any) -> Batches:
        return Batches(self, data, global_batch_size, shuffle)

    def test_loader(self, data: Any, batch_size: int) -> Batches:
        return Batches(None, data, batch_size, False)

    def resume(self, **_: Any) -> None:
        pass

    def save(self) -> None:
        pass

    def epochs(self, count: int) -> Iterator[int]:
        for self.epoch in range(count):
            yield self.epoch

    def mean(self, losses: Tensor, over: Tensor | None = None) -> Tensor:
        return losses.mean() if over is None else losses.sum() / over

    def sum(self, value: Any) -> Any:
        return value

    def gather(self, rows: list[Tensor]) -> Tensor:
        return torch.cat(rows)


class Batches:
    """The batches of a plain loop. run: that of the training batches, whose steps are counted."""

    def __init__(self, run: Alone | None, data: Any, size: int, shuffle: bool) -> None:
        self.run = run
        self.data = data
        self.size = size
        self.shuffle = shuffle

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __iter__(self) -> Iterator[Any]:
        order = torch.arange(len(self.data))
        if self.run and self.shuffle:
            order = torch.as_tensor(epoch_order(0, self.run.epoch, len(self.data)))
        for numbers in order.split(self.size):
            samples = [self.data[int(number)] for number in numbers]
            rows, masks, classes = zip(*samples, strict=True)
            try:
                yield torch.stack(rows), torch.stack(masks), torch.tensor(classes)
            finally:
                if self.run:
                    self.run.step += 1


def network(norm: bool) -> nn.Module:
    torch.manual_seed(1)
    # before a norm a bias has no gradient but rounding, which Adam would enlarge
    layers = [nn.Linear(4, 6, bias=not norm), nn.Tanh(), nn.Linear(6, CLASSES)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(6))
    return nn.Sequential(*layers).double()


def train(loop: Loop, run: Any, folder: Path) -> dict[str, Any]:
    """The loop. Returns what it learned: numbers that a session must have too."""
    data = Rows(loop.samples, loop.changes, seed=1)
    model = run.wrap(network(loop.norm))
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[loop.optimizer]
    optimizer = kind(model.parameters(), lr=0.02)
    loader = run.loader(
        data,
        global_batch_size=loop.global_batch_size,
        shuffle=loop.shuffle,
        num_workers=loop.workers,
    )
    test_data = Rows(loop.test_samples, "nothing", seed=2)
    test_loader = run.test_loader(test_data, batch_size=loop.test_batch_size)
    kept = Kept()
    run.resume(model=model, optimizer=optimizer, kept=kept)
    for epoch in run.epochs(loop.epochs):
        data.set_epoch(epoch)
        train_epoch(loop, run, folder, kept, (model, optimizer, loader))
        kept.scores.append(score(run, model, test_loader))
    weights = [value.tolist() for value in model.state_dict().values()]
    learned = {"weights": weights, "centre": kept.centre.tolist(), "scores": kept.scores}
    if loop.learned_at_once():
        learned["sums"] = kept.sums
    return learned


def train_epoch(loop: Loop, run: Any, folder: Path, kept: Kept, parts: tuple[Any, ...]) -> None:
    model, optimizer, loader = parts
    model.train()
    seen = 0
    loss_sum = 0.0
    by_class: Any = 0
    outputs = []
    for number, (rows, masks, classes) in enumerate(loader):
        disturb(loop, run, folder)
        logits = model(rows)
        losses = nn.functional.cross_entropy(logits, classes, reduction="none")
        if loop.masked:
            weights = masks.double().sum(1)
            loss = run.mean(losses * weights, over=weights.sum())
        else:
            loss = run.mean(losses)
        (loss / loop.accumulate).backward()
        if (run.step + 1) % loop.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
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


def score(run: Any, model: nn.Module, test_loader: Any) -> list[float]:
    model.eval()
    correct = 0
    loss: Any = 0
    outputs = []
    with torch.no_grad():
        for rows, _, classes in test_loader:
            logits = model(rows)
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
    import ddp_train

    loop = Loop(**json.loads(sys.argv[1]))
    folder = Path(sys.argv[2])
    restarts = int(loop.fault == "kill")
    with ddp_train.session(folder / "run", device="cpu", max_restarts=restarts) as run:
        learned = train(loop, run, folder)
        if run.rank == 0:
            (folder / "learned.json").write_text(json.dumps(learned))


def as_argument(loop: Loop) -> str:
    return json.dumps(asdict(loop))


if __name__ == "__main__":
    main()
