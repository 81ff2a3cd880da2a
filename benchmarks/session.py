"""What a step in `ddp_train.session` costs against plain DDP: two gloo processes, the same model,
data and batch.

    python benchmarks/session.py [--rounds 151] [--steps 20]
        [--output FILE]

The loops run in the same two processes, one epoch of each in turn, in an order that changes from
round to round. The plain one is DistributedDataParallel with DataLoader and DistributedSampler, the
loss with its mean; the other one is that of docs/guides/own_loop.md. A DataLoader collates the rows
of a TensorDataset one by one, a session cuts them out at once: `rows cut` is a plain loop that does
so too, without a DataLoader. What is left against it is what the session itself costs. The first
round is dropped. No checkpoint is written inside of what is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from page import conditions, load_average, publish
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_train
from ddp_train.distributed.environment import launcher_pid

BATCH = 64
"""Global."""


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cut(dataset: TensorDataset, rank: int, processes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shares of a random order, without a DataLoader."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    for batch in order.split(BATCH):
        mine = batch[rank::processes]
        yield dataset.tensors[0][mine], dataset.tensors[1][mine]


def plain_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def measure(run: Any, width: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds per step, of each round."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(steps * BATCH, 64, generator=generator)
    dataset = TensorDataset(rows, torch.randint(10, (len(rows),), generator=generator))
    plain = nn.parallel.DistributedDataParallel(net(width))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // run.processes, sampler=sampler)
    model = run.wrap(net(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session_loader = run.loader(dataset, global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)
    times: dict[str, list[float]] = {"plain DDP": [], "plain DDP, rows cut": [], "session": []}
    for epoch in run.epochs(rounds, save_every=rounds + 1):
        names = list(times)
        for name in names[epoch % 3 :] + names[: epoch % 3]:
            run.sum(0)  # both processes begin together
            began = time.perf_counter()
            if name == "session":
                for inputs, targets in session_loader:
                    optimizer.zero_grad()
                    run.mean(F.cross_entropy(model(inputs), targets, reduction="none")).backward()
                    optimizer.step()
            elif name == "plain DDP":
                sampler.set_epoch(epoch)
                plain_epoch(plain, plain_optimizer, loader)
            else:
                plain_epoch(plain, plain_optimizer, cut(dataset, run.rank, run.processes))
            times[name].append((time.perf_counter() - began) / steps * 1e3)
    return {name: taken[1:] for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=151)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    before = load_average()
    folder = Path(tempfile.gettempdir(), f"ddp_train_session_{launcher_pid() or os.getpid()}")
    with ddp_train.session(folder, processes=2, device="cpu") as run:
        times = measure(run, asked.width, asked.rounds, asked.steps)
        if run.rank == 0:
            lines = [
                "# A step in a session",
                "",
                "| loop | ms per step: median | quartiles |",
                "|---|---:|---:|",
            ]
            for name, taken in times.items():
                low, middle, high = statistics.quantiles(taken, n=4)
                lines.append(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} |")
            pairs = zip(times["session"], times["plain DDP, rows cut"], strict=True)
            low, middle, high = statistics.quantiles(
                [1e3 * (mine - theirs) for mine, theirs in pairs], n=4
            )
            found = f"{middle:.0f} us a step, quartiles {low:.0f} to {high:.0f}"
            lines += [
                "",
                f"Session less plain DDP with rows cut, each round by itself: median {found}.",
            ]
            lines += [
                f"Two gloo processes, one thread each; {asked.width} wide, global batch {BATCH}, "
                f"{asked.rounds - 1} rounds of {asked.steps} steps.",
                "",
                *conditions("session.py", f"{before} before, {load_average()} after"),
            ]
            publish(lines, asked.output)


main()
