"""Compiled DDP: cut into a graph for each bucket of gradients, with larger buckets, or as one
graph.

    torchrun --nproc_per_node=2 benchmarks/buckets.py [--models resnet50 vit_b_16 gpt2] [--batch 32]
    [--output PAGE.md]

torch's compiler cuts a model inside DDP for each bucket, so that gradients are exchanged while the
backward pass runs. With `torch._dynamo.config.optimize_ddp = False` it does not, and buckets are
exchanged behind the backward pass. All are alive in the same processes and run in turns, 20 steps
each, bf16; ms a step, the median of the turns. gpt2 is GPT-2 124M with 1,024 tokens a sample.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from page import conditions, publish
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ddp_train.models.gpt.network import Gpt

MODES = {
    "25 MiB": (lambda _: 25, True),
    "125 MiB": (lambda _: 125, True),
    "quarters": (lambda gradients: gradients / 4, True),
    "one bucket": (lambda gradients: gradients, True),
    "one graph": (lambda _: 25, False),
    "one graph and bucket": (lambda gradients: gradients, False),
}
"""MiB of a bucket, of those of all gradients; whether the compiler cuts. 25 MiB are DDP's own."""
WARM_UP_STEPS = 15
TOKENS = 1024
VOCABULARY = 50304
CLASSES = 1000

Step = Callable[[Tensor, Tensor], Tensor]


def training_step(arch: str, mode: str, device: torch.device, graphs: list[int]) -> Step:
    """A step of a new model, which returns its loss.

    graphs: gets the number of nodes of each graph that the compiler makes.
    """
    torch.manual_seed(0)
    bucket_of, cuts = MODES[mode]
    torch._dynamo.config.optimize_ddp = cuts  # read in the first step, when the compiler sees DDP
    if arch == "gpt2":
        net = Gpt(VOCABULARY, TOKENS, 12, 12, 768).to(device)
    else:
        net = getattr(models, arch)().to(device)
    net = net.to(memory_format=torch.channels_last)
    ids = [device.index] if device.type == "cuda" else None
    cap = bucket_of(sum(parameter.nbytes for parameter in net.parameters()) / 2**20)
    wrapped = DistributedDataParallel(
        net, device_ids=ids, bucket_cap_mb=cap, gradient_as_bucket_view=True
    )  # pyright: ignore[reportArgumentType]  int only by its hint
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
    loss_of = nn.CrossEntropyLoss()

    def count_and_compile(
        graph: torch.fx.GraphModule, inputs: Sequence[Tensor]
    ) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return compile_fx(graph, inputs)  # pyright: ignore[reportReturnType]

    # A back end of its own: with the same one the compiler would take the graphs that it made for
    # another mode.
    @torch.compile(backend=count_and_compile)
    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            outputs = wrapped(inputs)
        return loss_of(outputs.flatten(0, -2).float(), targets.flatten())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def milliseconds(step: Step, batch: tuple[Tensor, Tensor], steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and the last loss."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps - 1):
        step(*batch)
    loss = step(*batch).item()
    return (time.perf_counter() - began) / steps * 1e3, loss


def random_batch(arch: str, samples: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if arch == "gpt2":
        tokens = torch.randint(VOCABULARY, (samples, TOKENS + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(samples, 3, side, side, device=device).to(
        memory_format=torch.channels_last
    )
    return images, torch.randint(CLASSES, (samples,), device=device)


def row(arch: str, arguments: argparse.Namespace, device: torch.device) -> str:
    samples = arguments.batch or (32 if arch == "gpt2" else 256)
    batch = random_batch(arch, samples, arguments.side, device)
    # of the model before: what it compiled would count as versions of this one
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    graphs: dict[str, list[int]] = {mode: [] for mode in arguments.modes}
    for mode in arguments.modes:
        steps[mode] = training_step(arch, mode, device, graphs[mode])
        milliseconds(steps[mode], batch, WARM_UP_STEPS)
    times: dict[str, list[float]] = {mode: [] for mode in arguments.modes}
    losses = dict.fromkeys(arguments.modes, 0.0)
    for turn in range(arguments.turns):
        for mode in arguments.modes[:: -1 if turn % 2 else 1]:
            taken, losses[mode] = milliseconds(steps[mode], batch, arguments.steps)
            times[mode].append(taken)
    found = [
        f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f}), {len(graphs[mode])}"
        for mode, one in times.items()
    ]
    return (
        f"| {arch} | {samples} | {' | '.join(found)} |"
        f" {' '.join(f'{one:.2f}' for one in losses.values())} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_b_16", "gpt2"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--batch", type=int, help="samples of a process; 256, gpt2: 32")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if unknown := {*arguments.models} - {"gpt2", *models.list_models(models)}:
        parser.error(
            f"--models {' '.join(sorted(unknown))}: use gpt2, or a classifier of torchvision as"
            " resnet50"
        )
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    else:
        device = torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    rows = [row(arch, arguments, device) for arch in arguments.models]
    if dist.get_rank() == 0:
        publish(
            [
                f"# Graphs and buckets of compiled DDP, {dist.get_world_size()} x {device.type}",
                "",
                (
                    "ms a step, in brackets the fastest turn and the slowest, and the number of"
                    " graphs. What is measured"
                ),
                "stands in the head of `benchmarks/buckets.py`.",
                "",
                f"| | batch a process | {' | '.join(arguments.modes)} | last losses |",
                f"|---|---:|{'---:|' * (len(arguments.modes) + 1)}",
                *rows,
                "",
                *conditions(
                    f"buckets.py {shlex.join(sys.argv[1:])}",
                    packages=("torchvision",),
                    start=f"torchrun --nproc_per_node={dist.get_world_size()}",
                ),
            ],
            arguments.output,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
