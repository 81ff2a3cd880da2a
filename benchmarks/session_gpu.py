"""A loop of one's own on GPUs: plain DDP, Accelerate and `ddp_train.session` in turns.

    python benchmarks/session_gpu.py --model resnet50|bert|gpt2
        [--compile no|before|after|one_graph] [--sync-batch-norm] [--rounds 5] [--steps 30]
        [--output FILE]

One process for each GPU; on one GPU "plain" is a loop without DDP. All contenders train copies of
one model in the same processes, with the same data, loader processes and bf16 autocast, one after
the other in each round, in an order that changes from round to round. The first round, in which
models are compiled, is dropped. Without GPUs it runs a few small steps on the CPU, which only shows
that the script works.

compile: `torch.compile` before the model is wrapped or after it, or after it as one graph, with
torch._dynamo.config.optimize_ddp=False. Accelerate's are compiled by its own plugin.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from page import conditions, load_average, publish
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddp_train
from ddp_train.distributed.environment import launcher_pid

ON_GPUS = torch.cuda.is_available()
WORKERS = 6 if ON_GPUS else 0
TOKENS = 128
VOCABULARY = 30_522


class Classifier(nn.Module):
    """A network of transformers, of which the logits are wanted."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(input_ids=inputs).logits


class Repeated(Dataset[Any]):
    """A few random samples, again and again: what is read and sent is as large as of real ones."""

    def __init__(self, inputs: Tensor, targets: Tensor, length: int) -> None:
        self.inputs = inputs
        self.targets = targets
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        row = number % len(self.inputs)
        return self.inputs[row], self.targets[row]


@dataclass(frozen=True)
class Subject:
    """A model with random data."""

    net: Callable[[], nn.Module]
    rows: Callable[[int], tuple[Tensor, Tensor]]
    """Number of samples -> inputs and targets."""
    batch: int
    """Samples of one process in a step."""


def images(count: int) -> tuple[Tensor, Tensor]:
    side = 224 if ON_GPUS else 32
    return torch.randn(count, 3, side, side), torch.randint(1000, (count,))


def texts(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (count, TOKENS)), torch.randint(2, (count,))


def windows(count: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(50_257, (count, 1025 if ON_GPUS else 33))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def resnet50() -> nn.Module:
    from torchvision.models import resnet18, resnet50

    return resnet50() if ON_GPUS else resnet18()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=2, num_hidden_layers=12 if ON_GPUS else 1)
    return Classifier(BertForSequenceClassification(config))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, n_layer=12 if ON_GPUS else 1)
    return Classifier(GPT2LMHeadModel(config))


SUBJECTS = {
    "resnet50": Subject(resnet50, images, 128 if ON_GPUS else 4),
    "bert": Subject(bert, texts, 32 if ON_GPUS else 2),
    "gpt2": Subject(gpt2, windows, 8 if ON_GPUS else 1),
}


def losses_of(model: nn.Module, inputs: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    """One for each sample, float32 [n]."""
    with torch.autocast(device.type, torch.bfloat16):
        outputs = model(inputs)
    losses = F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


def compiled(model: nn.Module, asked: str, when: str) -> nn.Module:
    """The model, compiled if that is asked for now. when: before or after it is wrapped."""
    moment = "after" if asked == "one_graph" else asked
    return torch.compile(model) if moment == when else model  # type: ignore[return-value]


class Contender:
    """A loop with its model, optimizer and loader."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def epoch(self, batches: Iterable[Any]) -> None:
        for inputs, targets in batches:
            on_device = [part.to(self.device, non_blocking=True) for part in (inputs, targets)]
            self.optimizer.zero_grad()
            self.backward(losses_of(self.model, *on_device, self.device))
            self.optimizer.step()

    def backward(self, losses: Tensor) -> None:
        losses.mean().backward()


class InSession(Contender):
    """The loop of docs/guides/own_loop.md."""

    def __init__(self, model: nn.Module, run: Any) -> None:
        super().__init__(model, run.device)
        self.run = run

    def backward(self, losses: Tensor) -> None:
        self.run.mean(losses).backward()


class Accelerated(Contender):
    def __init__(self, net: nn.Module, loader: Any, device: torch.device, compile: str) -> None:
        from accelerate import Accelerator
        from accelerate.utils import TorchDynamoPlugin

        plugin = None if compile == "no" else TorchDynamoPlugin(backend="inductor")
        self.accelerator = Accelerator(dynamo_plugin=plugin, cpu=not ON_GPUS)
        super().__init__(net, device)
        prepared = self.accelerator.prepare(net, self.optimizer, loader)
        self.model, self.optimizer, self.loader = prepared

    def backward(self, losses: Tensor) -> None:
        self.accelerator.backward(losses.mean())


def shuffled(dataset: Dataset[Any], batch: int, sampler: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=WORKERS,
        pin_memory=ON_GPUS,
        persistent_workers=WORKERS > 0,
        drop_last=True,
    )


def wrapped(net: nn.Module, run: Any) -> nn.Module:
    """By DDP, where there are several processes."""
    if run.processes == 1:
        return net
    arguments = {"device_ids": [run.device.index]} if ON_GPUS else {}
    return nn.parallel.DistributedDataParallel(net, **arguments)


def epochs_of(
    run: Any, asked: argparse.Namespace, dataset: Dataset[Any]
) -> dict[str, Callable[[], None]]:
    """An epoch of each contender."""
    subject = SUBJECTS[asked.model]
    torch.manual_seed(0)
    net = subject.net()
    copies = [copy.deepcopy(net).to(run.device) for _ in range(3)]

    inner = compiled(copies[0], asked.compile, "before")
    plain = Contender(compiled(wrapped(inner, run), asked.compile, "after"), run.device)
    sampler = DistributedSampler(dataset, drop_last=True) if run.processes > 1 else None
    plain_loader = shuffled(dataset, subject.batch, sampler)

    options = {"sync_batch_norm": asked.sync_batch_norm}
    model = run.wrap(compiled(copies[1], asked.compile, "before"), **options)
    ours = InSession(compiled(model, asked.compile, "after"), run)
    global_batch = subject.batch * run.processes
    our_loader = run.loader(dataset, global_batch_size=global_batch, num_workers=WORKERS)
    run.resume(model=model, optimizer=ours.optimizer)

    name = "plain DDP" if run.processes > 1 else "plain"
    found = {
        name: lambda: plain.epoch(plain_loader),
        "session": lambda: ours.epoch(our_loader),
    }
    if asked.accelerate:
        loader = shuffled(dataset, subject.batch, None)
        other = Accelerated(copies[2], loader, run.device, asked.compile)
        found["Accelerate"] = lambda: other.epoch(other.loader)
    return found


def orders(names: list[str]) -> Iterator[list[str]]:
    """The names, each time from the next one on."""
    place = 0
    while True:
        yield names[place:] + names[:place]
        place = (place + 1) % len(names)


def measure(run: Any, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Samples a second of all processes, of each round but the first."""
    subject = SUBJECTS[asked.model]
    samples = asked.steps * subject.batch * run.processes
    torch.manual_seed(1)
    dataset = Repeated(*subject.rows(16), samples)
    if asked.compile == "one_graph":
        torch._dynamo.config.optimize_ddp = False
    epochs = epochs_of(run, asked, dataset)
    rates: dict[str, list[float]] = {name: [] for name in epochs}
    turns = orders(list(epochs))
    for _ in run.epochs(asked.rounds + 1, save_every=asked.rounds + 2):
        for name in next(turns):
            run.sum(0)  # all processes begin together
            began = time.perf_counter()
            epochs[name]()
            if ON_GPUS:
                torch.cuda.synchronize()
            rates[name].append(samples / (time.perf_counter() - began))
    return {name: found[1:] for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(SUBJECTS), default="resnet50")
    parser.add_argument("--compile", choices=["no", "before", "after", "one_graph"], default="no")
    parser.add_argument("--sync-batch-norm", action="store_true")
    parser.add_argument("--no-accelerate", dest="accelerate", action="store_false")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, default=None if ON_GPUS else 2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    before = load_average()
    folder = Path(tempfile.gettempdir(), f"ddp_train_session_{launcher_pid() or os.getpid()}")
    with ddp_train.session(folder, processes=asked.processes) as run:
        rates = measure(run, asked)
        if run.rank == 0:
            kind = f"{asked.model}, compile={asked.compile}"
            if asked.sync_batch_norm:
                kind += ", session with batch norm over all processes"
            lines = [f"| {kind} | samples/s: median | lowest to highest |", "|---|---:|---:|"]
            for name, found in rates.items():
                spread = f"{min(found):,.0f} to {max(found):,.0f}"
                lines.append(f"| {name} | {statistics.median(found):,.0f} | {spread} |")
            lines.append("")
            lines.append(
                f"{run.processes} processes, {SUBJECTS[asked.model].batch} samples each,"
                f" {asked.rounds} rounds of {asked.steps} steps."
            )
            lines += conditions("session_gpu.py", f"{before} before, {load_average()} after")
            publish(lines, asked.output)


main()
