"""The work of benchmarks/speed.py as people write it in plain PyTorch, Lightning and Accelerate. Imports no ddp_train.

    torchrun --nproc_per_node=N benchmarks/peers.py PEER WORK --device cuda --data data --batch 256 --steps 100

Rank 0 prints one line, `RESULT {...}`: images per second of the steps after a warm-up, or the seconds of each epoch
with its test and the accuracies. Every peer has what its documentation recommends: bf16 on GPUs, channels_last, cuDNN's
auto-tuner, its own way to DDP. None is compiled unless its name says so.

resnet50   torchvision's ResNet-50 on 224 x 224 images that lie on the device as floats, normalised: no data loading
mnist      LeNet-5 (or a smaller network) on MNIST, batch 64, one epoch and its test after the other
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK, LOCAL_RANK, SIZE = (int(os.environ.get(name, default)) for name, default in
                          (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
WARM_UP_STEPS = 30


def resnet50(device: torch.device) -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=1000).to(device, memory_format=torch.channels_last)


class Resident:
    """`steps` batches that lie on the device already: eight different ones, again and again."""

    def __init__(self, batch: int, steps: int, device: torch.device, side: int = 224) -> None:
        images = torch.randn(8, batch, 3, side, side, device=device)
        self.images = [image.contiguous(memory_format=torch.channels_last) for image in images]
        self.labels = torch.randint(0, 1000, (8, batch), device=device)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.steps):
            yield self.images[step % 8], self.labels[step % 8]


class Speed:
    """Images per second from the end of the warm-up to the last step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.steps = arguments, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps in (WARM_UP_STEPS, WARM_UP_STEPS + self.arguments.steps):
            if self.arguments.device == "cuda":
                torch.cuda.synchronize()
            if self.steps == WARM_UP_STEPS:
                self.began = time.perf_counter()
            else:
                seconds = time.perf_counter() - self.began
                say(images_per_second=self.arguments.steps * self.arguments.batch * SIZE / seconds)


def say(**result: Any) -> None:
    if RANK == 0:
        print("RESULT " + json.dumps(result), flush=True)


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    return torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.device == "cuda")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)


# --- ResNet-50 --------------------------------------------------------------------------------------------------------


def plain_resnet50(arguments: argparse.Namespace, device: torch.device, compiled: bool = False) -> None:
    model = resnet50(device)
    if compiled:
        model = torch.compile(model)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer, criterion, speed = sgd(model), nn.CrossEntropyLoss(), Speed(arguments)
    for images, labels in Resident(arguments.batch, WARM_UP_STEPS + arguments.steps, device, arguments.side):
        with autocast(arguments):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        speed.step()


def dp_resnet50(arguments: argparse.Namespace, device: torch.device) -> None:
    """DataParallel at its best: one process, autocast inside the module, the auto-tuner off (it hangs with it)."""
    torch.backends.cudnn.benchmark = False

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = resnet50(device)

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            with autocast(arguments):
                return nn.functional.cross_entropy(self.model(images), labels).view(1)

    gpus = torch.cuda.device_count()
    model = nn.DataParallel(Inside())
    optimizer, speed = sgd(model), Speed(arguments)
    speed.arguments.batch *= gpus
    for images, labels in Resident(arguments.batch, WARM_UP_STEPS + arguments.steps, device, arguments.side):
        model(images, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        speed.step()


def accelerate_resnet50(arguments: argparse.Namespace, device: torch.device) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if arguments.device == "cuda" else "no", cpu=device.type == "cpu")
    model = resnet50(device)
    model, optimizer = accelerator.prepare(model, sgd(model))
    criterion, speed = nn.CrossEntropyLoss(), Speed(arguments)
    for images, labels in Resident(arguments.batch, WARM_UP_STEPS + arguments.steps, device, arguments.side):
        with accelerator.autocast():
            loss = criterion(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        speed.step()


def fabric_resnet50(arguments: argparse.Namespace, device: torch.device) -> None:
    from lightning.fabric import Fabric

    gpu = arguments.device == "cuda"
    fabric = Fabric(accelerator=arguments.device if not gpu else "gpu", devices=SIZE, strategy="ddp",
                    precision="bf16-mixed" if gpu else "32-true")  # fmt: skip
    fabric.launch()
    model = resnet50(device)
    model, optimizer = fabric.setup(model, sgd(model))
    criterion, speed = nn.CrossEntropyLoss(), Speed(arguments)
    for images, labels in Resident(arguments.batch, WARM_UP_STEPS + arguments.steps, device, arguments.side):
        loss = criterion(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        speed.step()


def lightning_resnet50(arguments: argparse.Namespace, device: torch.device) -> None:
    import lightning

    speed = Speed(arguments)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = resnet50(device), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return self.criterion(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *given: Any) -> None:
            speed.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    gpu = arguments.device == "cuda"
    trainer = lightning.Trainer(
        accelerator="gpu" if gpu else "cpu", devices=SIZE, strategy="ddp", max_epochs=1, logger=False, benchmark=True,
        precision="bf16-mixed" if gpu else "32-true", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), Resident(arguments.batch, WARM_UP_STEPS + arguments.steps, device, arguments.side))


# --- MNIST ------------------------------------------------------------------------------------------------------------


def lenet() -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) as it is written today: ReLU, max pooling, powers of two."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def one_convolution() -> nn.Module:
    """The smallest network found that has 98 % after one epoch: 150,000 weights, half the kernels of LeNet-5."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 64), nn.ReLU(), nn.Linear(64, 10)
    )


NETWORKS = {"lenet": lenet, "one_convolution": one_convolution}


def mnist(arguments: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any]]:
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    splits = []
    for train in (True, False):
        split = datasets.MNIST(arguments.data, train=train, transform=transform)
        split.data, split.targets = split.data[: arguments.limit], split.targets[: arguments.limit]
        splits.append(split)
    return splits[0], splits[1]


def plain_mnist(arguments: argparse.Namespace, device: torch.device, **loader: Any) -> None:
    """With the DataLoader's defaults."""
    train, test = mnist(arguments)
    _train_mnist(arguments, device, train, test, **loader)


def tuned_mnist(arguments: argparse.Namespace, device: torch.device) -> None:
    """As the tuning guides say: loader processes, page-locked memory, copies while the GPU computes."""
    workers = min(8, len(os.sched_getaffinity(0)) // SIZE)
    plain_mnist(arguments, device, num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=True)


def memory_mnist(arguments: argparse.Namespace, device: torch.device) -> None:
    """All images normalised once and kept as one tensor on the device, sliced by DataLoader."""
    splits = []
    for split in mnist(arguments):
        images = (split.data[:, None].float() / 255 - 0.1307) / 0.3081  # pyright: ignore[reportAttributeAccessIssue]
        splits.append(TensorDataset(images.to(device), split.targets.to(device)))  # pyright: ignore
    _train_mnist(arguments, device, *splits)


def _train_mnist(
    arguments: argparse.Namespace, device: torch.device, train: Dataset[Any], test: Dataset[Any], **loader: Any
) -> None:
    batch = arguments.batch // SIZE
    sampler: DistributedSampler[Any] = DistributedSampler(train, shuffle=True)
    batches = DataLoader(train, batch_size=batch, sampler=sampler, **loader)
    tests = DataLoader(test, batch_size=1000, sampler=DistributedSampler(test, shuffle=False), **loader)
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(NETWORKS[arguments.network]().to(device), device_ids=[device] if on_gpu else None)
    optimizer, criterion = torch.optim.AdamW(model.parameters(), lr=3e-3), nn.CrossEntropyLoss()
    seconds: list[float] = []
    accuracies: list[float] = []
    for epoch in range(arguments.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
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


PEERS: dict[str, dict[str, Callable[..., None]]] = {
    "resnet50": {
        "plain DDP": plain_resnet50,
        "plain DDP, compiled": lambda *given: plain_resnet50(*given, compiled=True),
        "DataParallel": dp_resnet50,
        "Accelerate": accelerate_resnet50,
        "Lightning Fabric": fabric_resnet50,
        "Lightning Trainer": lightning_resnet50,
    },
    "mnist": {
        "plain DDP, DataLoader": plain_mnist,
        "plain DDP, DataLoader tuned": tuned_mnist,
        "plain DDP, images on the device": memory_mnist,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer")
    parser.add_argument("work", choices=list(PEERS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--data", default="data")
    parser.add_argument("--batch", type=int, default=64, help="resnet50: images a process and step; mnist: over all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--side", type=int, default=224)
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
