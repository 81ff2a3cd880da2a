"""Our Triton kernels against torch's and its compiler's, each forward and backward by itself, on
one GPU.

    python benchmarks/kernels.py [--output PAGE.md]

Median of 20 by CUDA events, after 4. head: 65,536 tokens of 768 numbers through GPT-2's head of
50,304 classes to their loss, bf16 by autocast. loss: the same without the matrix products. pool:
the 3 x 3 max pool of ResNet-50 on 1,024 pictures in fp16, channels_last. stem: batch norm, ReLU and
that pool. fetch: 1,024 of 2,048 pictures of 224 x 224, uint8, fetched and normalised, forward only.
Peak: of the memory that torch allocated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from page import conditions, publish
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TOKENS = 65_536
WIDTH = 768
CLASSES = 50_304
PICTURES = 1024


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """The median, and the peak in GiB."""
    for _ in range(4):
        work()
    torch.cuda.reset_peak_memory_stats()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in marks]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def step(
    function: Callable[[Tensor], Tensor], leaves: list[Tensor], compiled: bool
) -> Callable[[], None]:
    """A forward and a backward pass of the first leaf; the others are what the function also
    uses."""
    torch._dynamo.reset()
    run = torch.compile(function, dynamic=False) if compiled else function
    gradient: list[Tensor] = []

    def work() -> None:
        for leaf in leaves:
            leaf.grad = None
        output = run(leaves[0])
        gradient[:] = gradient or [torch.ones_like(output)]
        output.backward(gradient[0])

    return work


Measure = Callable[..., None]


def of_losses(measure: Measure) -> None:
    from ddp_train.kernels.cross_entropy import cross_entropy_sum

    draw = torch.Generator("cuda").manual_seed(0)
    targets = torch.randint(0, CLASSES, (TOKENS,), device="cuda", generator=draw)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", generator=draw).requires_grad_()
    weight = (0.02 * torch.randn(CLASSES, WIDTH, device="cuda", generator=draw)).requires_grad_()
    losses = {
        "torch's compiler": lambda logits: functional.cross_entropy(
            logits, targets, reduction="sum"
        ),
        "ours": lambda logits: cross_entropy_sum(logits, targets),
    }
    for name, loss in losses.items():

        def head(hidden: Tensor, loss: Callable[[Tensor], Tensor] = loss) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return loss(functional.linear(hidden, weight))

        measure(f"head, {name}", head, [hidden, weight])
        hidden.grad = weight.grad = None
    logits = torch.randn(
        TOKENS, CLASSES, device="cuda", dtype=torch.bfloat16, generator=draw
    ).requires_grad_()
    for name, loss in losses.items():
        measure(f"loss, {name}", loss, [logits])


def of_pools(measure: Measure) -> None:
    from ddp_train.kernels.max_pool import max_pool

    images = torch.randn(PICTURES, 64, 112, 112, device="cuda", dtype=torch.float16)
    images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(64).cuda()
    pools = {
        "torch's": lambda images: functional.max_pool2d(images, 3, 2, 1),
        "ours": lambda images: max_pool(images, 3, 2, 1)[0],
    }
    measure("pool, torch's, not compiled", pools["torch's"], [images], compiled=False)
    for name, pool in pools.items():
        measure(f"pool, {name}", pool, [images])

        def stem(images: Tensor, pool: Callable[[Tensor], Tensor] = pool) -> Tensor:
            with torch.autocast("cuda", torch.float16):
                return pool(functional.relu(norm(images)))

        measure(f"stem, {name}", stem, [images, *norm.parameters()])


def of_fetches() -> dict[str, Callable[[], object]]:
    from ddp_train.data.rows import normalised_rows, normalised_rows_by
    from ddp_train.kernels.fetch import fetch

    fetched = normalised_rows_by(fetch)

    held = torch.randint(0, 256, (2 * PICTURES, 3, 224, 224), dtype=torch.uint8, device="cuda")
    held = held.contiguous(memory_format=torch.channels_last)
    index = torch.randperm(2 * PICTURES, device="cuda")[:PICTURES]
    half = (0.5,) * 3
    return {
        "fetch, torch's": lambda: normalised_rows(held, index, half, half),
        "fetch, ours": lambda: fetched(held, index, half, half),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows: list[str] = []

    def report(name: str, work: Callable[[], object]) -> None:
        time, peak = milliseconds(work)
        rows.append(f"| {name} | {time:.2f} | {peak:.1f} |")
        print(rows[-1], file=sys.stderr, flush=True)

    def measure(
        name: str, function: Callable[[Tensor], Tensor], leaves: list[Tensor], compiled: bool = True
    ) -> None:
        report(name, step(function, leaves, compiled))

    of_losses(measure)
    of_pools(measure)
    for name, work in of_fetches().items():
        report(name, work)
    publish(
        [
            "# Kernels by themselves, one GPU",
            "",
            "What is measured stands in the head of `benchmarks/kernels.py`.",
            "",
            "| | ms | peak, GiB |",
            "|---|---:|---:|",
            *rows,
            "",
            *conditions("kernels.py"),
        ],
        arguments.output,
    )


if __name__ == "__main__":
    main()
