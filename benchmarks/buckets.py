"""Compiled DDP, cut into a graph for each bucket of gradients, or with all gradients in one bucket.

    torchrun --nproc_per_node=2 benchmarks/buckets.py [--models resnet50 vit_b_16] [--output PAGE.md]

torch's compiler cuts a model inside DDP for each bucket, so that gradients are exchanged while the backward pass runs.
Both are alive in the same processes and run in turns, 20 steps each, bf16; ms a step, the median of the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from page import conditions, publish
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

CAPS = (25, 1000)
"""MiB of a bucket: DDP's own, and more than these models have."""
WARM_UP_STEPS = 15

Step = Callable[[Tensor, Tensor], Tensor]


def training_step(arch: str, cap: int, device: torch.device) -> Step:
    """Of a new model, and its loss."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = getattr(models, arch)().to(device, memory_format=torch.channels_last)
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(net, device_ids=ids, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
    loss_of = nn.CrossEntropyLoss()

    @torch.compile
    def forward(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            outputs = wrapped(images)
        return loss_of(outputs.float(), labels)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def milliseconds(step: Step, images: Tensor, labels: Tensor, steps: int) -> tuple[float, float]:
    """Of a step, and the last loss."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps - 1):
        step(images, labels)
    loss = step(images, labels).item()
    return (time.perf_counter() - began) / steps * 1e3, loss


def row(arch: str, arguments: argparse.Namespace, device: torch.device) -> str:
    side, classes = arguments.side, 1000
    images = torch.randn(arguments.batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (arguments.batch,), device=device)
    steps = {cap: training_step(arch, cap, device) for cap in CAPS}
    for step in steps.values():
        milliseconds(step, images, labels, WARM_UP_STEPS)
    times: dict[int, list[float]] = {cap: [] for cap in CAPS}
    losses = dict.fromkeys(CAPS, 0.0)
    for turn in range(arguments.turns):
        for cap in CAPS[:: -1 if turn % 2 else 1]:
            taken, losses[cap] = milliseconds(steps[cap], images, labels, arguments.steps)
            times[cap].append(taken)
    found = [f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in times.values()]
    return f"| {arch} | {arguments.batch} | {' | '.join(found)} | {' '.join(f'{one:.2f}' for one in losses.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_b_16"])
    parser.add_argument("--batch", type=int, default=256, help="images of a process")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    rows = [row(arch, arguments, device) for arch in arguments.models]
    if dist.get_rank() == 0:
        columns = " | ".join(f"buckets of {cap} MiB" for cap in CAPS)
        publish(
            [
                f"# One bucket of gradients or many, {dist.get_world_size()} x {device.type}",
                "",
                "ms a step, and in brackets the fastest turn and the slowest. What is measured stands in the head of",
                "`benchmarks/buckets.py`.",
                "",
                f"| | batch a process | {columns} | last losses |",
                "|---|---:|---:|---:|---:|",
                *rows,
                "",
                *conditions(
                    f"buckets.py --models {' '.join(arguments.models)}",
                    packages=("torchvision",),
                    start=f"torchrun --nproc_per_node={dist.get_world_size()}",
                ),
            ],
            arguments.output,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
