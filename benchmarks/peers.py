"""The work of benchmarks/speed.py and models.py as people write it in plain PyTorch, Lightning and
Accelerate.

    torchrun --nproc_per_node=N benchmarks/peers.py PEER WORK --device cuda --data data --batch 256
    --steps 100

Rank 0 prints one line, `RESULT {...}`: samples per second of the steps after a warm-up, altogether
and as the median of ten steps at a time, and the last loss; or the seconds of each epoch with its
test and the accuracies. Every peer has what its documentation recommends: bf16 on GPUs,
channels_last, cuDNN's auto-tuner, fused optimizers, its own way to DDP. None is compiled unless its
name says so; then the network is compiled as one with its loss, before it is wrapped. Imports no
ddp_train but the network of `tokens`.

images     a network of torchvision (--arch) on images that lie on the device as floats, normalised:
           no data loading
tokens     a GPT (--layers --heads --width) on windows of --length random tokens that lie on the
           device; clipped to 1.0
mnist      LeNet-5 (or a smaller network) on MNIST, batch 64, one epoch and its test after the other
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK, LOCAL_RANK, SIZE = (
    int(os.environ.get(name, default))
    for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
)
VOCABULARY = 50_304
BLOCK_STEPS = 10


class Resident:
    """`steps` batches that lie on the device already: eight different ones, again and again."""

    def __init__(self, inputs: list[Tensor], targets: list[Tensor], steps: int) -> None:
        self.inputs = inputs
        self.targets = targets
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.steps):
            yield self.inputs[step % 8], self.targets[step % 8]


class WithLoss(nn.Module):
    """The network and its loss, compiled as one: the logits of a language model are the largest
    tensors of a step."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(inputs).flatten(0, -2), targets.flatten())


class Speed:
    """Samples per second from the end of the warm-up to the last step: of all, and of the median
    block of steps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.steps = 0
        self.batch = arguments.batch
        self.marks: list[Any] = []
        """At the end of the warm-up, and after each block."""
        self.losses: list[Tensor] = []
        self.times: list[float] = []
        """Of the host, which is ahead of the GPU."""

        self.logged = 0

    def step(self, loss: Tensor) -> None:
        self.steps += 1
        done = self.steps - self.arguments.warm_up
        on_gpu = self.arguments.device == "cuda"
        if done >= 0 and (done % BLOCK_STEPS == 0 or done == self.arguments.steps):
            self.losses.append(loss.detach().to("cpu", non_blocking=True))
            self.marks.append(
                torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter()
            )
            if on_gpu:  # the host is ahead of the GPU, and does not wait for it
                self.marks[-1].record()
            self.times.append(time.time())
            if self.arguments.tens and RANK == 0:
                self._log()
        if done == self.arguments.steps:
            if on_gpu:
                torch.cuda.synchronize()
            blocks = [seconds_between(*pair) for pair in pairwise(self.marks)]
            whole = blocks[: done // BLOCK_STEPS] or [math.inf]
            samples = self.batch * SIZE
            say(
                samples_per_second=done * samples / sum(blocks),
                median=BLOCK_STEPS * samples / statistics.median(whole),
                loss=loss.item(),
            )

    def _log(self) -> None:
        """The blocks that the GPU has done. Does not wait for it."""
        with self.arguments.tens.open("a") as file:
            while self.logged < len(self.marks) - 1 and is_done(self.marks[self.logged + 1]):
                seconds = seconds_between(*self.marks[self.logged : self.logged + 2])
                self.logged += 1
                line = {
                    "step": self.logged * BLOCK_STEPS,
                    "time": self.times[self.logged],
                    "samples_per_second": BLOCK_STEPS * self.batch * SIZE / seconds,
                    "loss": self.losses[self.logged].item(),
                }
                file.write(json.dumps(line) + "\n")


def is_done(mark: Any) -> bool:
    return isinstance(mark, float) or mark.query()


def seconds_between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return second - first
    return first.elapsed_time(second) / 1000


def say(**result: Any) -> None:
    if RANK == 0:
        print("RESULT " + json.dumps(result), flush=True)


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    return torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.device == "cuda")


# --- images and tokens ----------------------------------------------------------------------------


@dataclass
class Job:
    """`model` maps inputs and targets to the loss."""

    model: nn.Module
    batches: Resident
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None


def images(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    from torchvision.models import get_model

    network = get_model(arguments.arch, num_classes=1000).to(
        device, memory_format=torch.channels_last
    )
    size = (arguments.batch, 3, arguments.side, arguments.side)
    inputs = [
        torch.randn(size, device=device).contiguous(memory_format=torch.channels_last)
        for _ in range(8)
    ]
    return network, inputs, list(torch.randint(0, 1000, (8, arguments.batch), device=device))


def tokens(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from ddp_train.models.gpt.network import Gpt

    network = Gpt(
        VOCABULARY, arguments.length, arguments.layers, arguments.heads, arguments.width
    ).to(device)
    windows = torch.randint(
        0, VOCABULARY, (8, arguments.batch, arguments.length + 1), device=device
    )
    return network, list(windows[..., :-1].contiguous()), list(windows[..., 1:].contiguous())


def job_of(
    arguments: argparse.Namespace, device: torch.device, compiled: bool, fused: bool = True
) -> Job:
    network, inputs, targets = {"images": images, "tokens": tokens}[arguments.work](
        arguments, device
    )
    given: dict[str, Any] = {"lr": arguments.lr, "fused": fused}
    if arguments.optimizer == "adamw":
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.1, **given)
    else:
        optimizer = torch.optim.SGD(network.parameters(), momentum=0.9, weight_decay=5e-5, **given)
    model: Any = WithLoss(network)
    clip = 1.0 if arguments.work == "tokens" else None
    batches = Resident(inputs, targets, arguments.warm_up + arguments.steps)
    return Job(torch.compile(model) if compiled else model, batches, optimizer, clip)


def plain(arguments: argparse.Namespace, device: torch.device, compiled: bool = False) -> None:
    job = job_of(arguments, device, compiled)
    speed = Speed(arguments)
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(
        job.model, [device] if on_gpu else None, gradient_as_bucket_view=True
    )
    for inputs, targets in job.batches:
        with autocast(arguments):
            loss = model(inputs, targets)
        loss.backward()
        if job.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        job.optimizer.step()
        job.optimizer.zero_grad()
        speed.step(loss)


def data_parallel(arguments: argparse.Namespace, device: torch.device) -> None:
    """DataParallel at its best: one process, autocast inside the module, the auto-tuner off (it
    hangs with it)."""
    torch.backends.cudnn.benchmark = False
    arguments.batch *= torch.cuda.device_count()
    job = job_of(arguments, device, compiled=False)
    speed = Speed(arguments)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            with autocast(arguments):
                return self.model(inputs, targets).view(1)

    model = nn.DataParallel(Inside())
    for inputs, targets in job.batches:
        loss = model(inputs, targets).mean()
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        speed.step(loss)


def accelerate(arguments: argparse.Namespace, device: torch.device, compiled: bool = False) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16" if arguments.device == "cuda" else "no", cpu=device.type == "cpu"
    )
    job = job_of(arguments, device, compiled)
    speed = Speed(arguments)
    model, optimizer = accelerator.prepare(job.model, job.optimizer)
    for inputs, targets in job.batches:
        with accelerator.autocast():
            loss = model(inputs, targets)
        accelerator.backward(loss)
        if job.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        speed.step(loss)


def fabric(arguments: argparse.Namespace, device: torch.device, compiled: bool = False) -> None:
    from lightning.fabric import Fabric

    gpu = arguments.device == "cuda"
    lightning = Fabric(
        accelerator=arguments.device if not gpu else "gpu",
        devices=SIZE,
        strategy="ddp",
        precision="bf16-mixed" if gpu else "32-true",
    )
    lightning.launch()
    job = job_of(arguments, device, compiled)
    speed = Speed(arguments)
    model, optimizer = lightning.setup(job.model, job.optimizer)
    for inputs, targets in job.batches:
        loss = model(inputs, targets)
        lightning.backward(loss)
        if job.max_grad_norm:
            lightning.clip_gradients(model, optimizer, max_norm=job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        speed.step(loss)


def trainer(arguments: argparse.Namespace, device: torch.device, compiled: bool = False) -> None:
    import lightning

    fused = arguments.work != "tokens"  # Lightning clips no gradients of a fused optimizer
    job = job_of(arguments, device, compiled, fused)
    speed = Speed(arguments)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return self.model(*batch)

        def on_train_batch_end(self, outputs: Any, *given: Any) -> None:
            speed.step(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    gpu = arguments.device == "cuda"
    lightning.Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=SIZE,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        benchmark=True,
        precision="bf16-mixed" if gpu else "32-true",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=job.max_grad_norm,
    ).fit(Module(), job.batches)


# --- MNIST ----------------------------------------------------------------------------------------


def lenet() -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) as it is written today: ReLU, max pooling, powers of two."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def one_convolution() -> nn.Module:
    """The smallest network found that has 98 % after one epoch: 150,000 weights, half the kernels
    of LeNet-5."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2304, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


NETWORKS = {"lenet": lenet, "one_convolution": one_convolution}


def mnist(arguments: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any]]:
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    splits = []
    for train in (True, False):
        split = datasets.MNIST(arguments.data, train=train, transform=transform)
        split.data = split.data[: arguments.limit]
        split.targets = split.targets[: arguments.limit]
        splits.append(split)
    return splits[0], splits[1]


def plain_mnist(arguments: argparse.Namespace, device: torch.device, **loader: Any) -> None:
    """MNIST with the DataLoader's defaults."""
    train, test = mnist(arguments)
    _train_mnist(arguments, device, train, test, **loader)


def tuned_mnist(arguments: argparse.Namespace, device: torch.device) -> None:
    """MNIST as the tuning guides say: loader processes, page-locked memory, copies while the GPU
    computes."""
    workers = min(8, len(os.sched_getaffinity(0)) // SIZE)
    plain_mnist(
        arguments,
        device,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )


def memory_mnist(arguments: argparse.Namespace, device: torch.device) -> None:
    """All images normalised once and kept as one tensor on the device, sliced by DataLoader."""
    splits = []
    for split in mnist(arguments):
        images = (split.data[:, None].float() / 255 - 0.1307) / 0.3081  # pyright: ignore[reportAttributeAccessIssue]
        splits.append(TensorDataset(images.to(device), split.targets.to(device)))  # pyright: ignore
    _train_mnist(arguments, device, *splits)


def _train_mnist(
    arguments: argparse.Namespace,
    device: torch.device,
    train: Dataset[Any],
    test: Dataset[Any],
    **loader: Any,
) -> None:
    batch = arguments.batch // SIZE
    sampler: DistributedSampler[Any] = DistributedSampler(train, shuffle=True)
    batches = DataLoader(train, batch_size=batch, sampler=sampler, **loader)
    tests = DataLoader(
        test, batch_size=1000, sampler=DistributedSampler(test, shuffle=False), **loader
    )
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(
        NETWORKS[arguments.network]().to(device), device_ids=[device] if on_gpu else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    seconds: list[float] = []
    accuracies: list[float] = []
    for epoch in range(arguments.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with autocast(arguments):
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad(), autocast(arguments):
            for images, labels in tests:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(correct)
        accuracies.append(correct.item() / len(test))  # pyright: ignore[reportArgumentType]
        seconds.append(time.perf_counter() - began)
    say(epoch_seconds=seconds, accuracy=accuracies[-1], first_accuracy=accuracies[0])


RESIDENT: dict[str, Callable[..., None]] = {
    "plain DDP": plain,
    "plain DDP, compiled": partial(plain, compiled=True),
    "DataParallel": data_parallel,
    "Accelerate": accelerate,
    "Accelerate, compiled": partial(accelerate, compiled=True),
    "Lightning Fabric": fabric,
    "Lightning Trainer": trainer,
    "Lightning Trainer, compiled": partial(trainer, compiled=True),
}
PEERS: dict[str, dict[str, Callable[..., None]]] = {
    "images": RESIDENT,
    "tokens": RESIDENT,
    "mnist": {
        "plain DDP, DataLoader": plain_mnist,
        "plain DDP, DataLoader tuned": tuned_mnist,
        "plain DDP, images on the device": memory_mnist,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer")
    parser.add_argument("work", choices=list(PEERS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--data", default="data")
    parser.add_argument(
        "--batch", type=int, default=64, help="samples a process and step; mnist: over all"
    )
    parser.add_argument("--warm-up", type=int, default=30, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tens", type=Path, help="a file for a line of each ten steps")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--arch", default="resnet50", help="images: of torchvision")
    parser.add_argument("--side", type=int, default=224, help="images: their width and height")
    for name, value in (("length", 1024), ("layers", 12), ("heads", 12), ("width", 768)):
        parser.add_argument(f"--{name}", type=int, default=value, help="tokens")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--network", choices=list(NETWORKS), default="lenet", help="mnist")
    parser.add_argument("--limit", type=int, help="use only so many samples of each split")
    arguments = parser.parse_args()
    device = torch.device(arguments.device, LOCAL_RANK if arguments.device == "cuda" else None)
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    if arguments.peer.startswith("plain"):
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    PEERS[arguments.work][arguments.peer](arguments, device)
    os._exit(0)  # some peers leave a process group open; tearing it down is not what is measured


if __name__ == "__main__":
    main()
