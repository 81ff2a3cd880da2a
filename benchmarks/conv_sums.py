"""ResNet-50's convolutions by torch and, with the sums of their outputs, by cuDNN
(`tuning.conv_sums`), on one GPU.

    python benchmarks/conv_sums.py [--output PAGE.md]

Each shape forward and by itself on random numbers, in ms, medians of 5; needs
nvidia-cudnn-frontend. half a copy: of the output, which stands for the pass over it that the sums
save. saves: torch and half a copy, less cuDNN.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from page import conditions, publish
from torch import nn
from torch.nn import functional
from torchvision.models import resnet50

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_train.kernels.conv_sums import CHANNELS  # noqa: E402
from ddp_train.kernels.genstats import (  # noqa: E402
    Case,
    empty_outputs,
    fastest_kernel,
    median_milliseconds,
)

PRECISIONS = {"fp16, batch 1,024": (torch.float16, 1024), "bf16, batch 256": (torch.bfloat16, 256)}


def cases(dtype: torch.dtype, batch: int) -> Counter[Case]:
    """The number of layers of each shape. cuDNN does not take the first convolution, of three
    channels."""
    found: Counter[Case] = Counter()

    def note(conv: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        shape = torch.Size((batch, *inputs[0].shape[1:]))
        weight = conv.weight.shape
        found[
            Case(
                torch.device("cuda", 0),
                dtype,
                shape,
                weight,
                conv.stride,
                conv.padding,
                conv.dilation,
            )
        ] += 1

    net = resnet50()
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels % CHANNELS == 0:
            module.register_forward_hook(note)
    net(torch.zeros(1, 3, 224, 224))
    return found


def measured(case: Case) -> list[float]:
    """Milliseconds of torch, of half a copy, of cuDNN."""
    x, weight = (
        torch.randn(shape, device=case.device, dtype=case.dtype).contiguous(
            memory_format=torch.channels_last
        )
        for shape in (case.x_shape, case.weight_shape)
    )
    y, sums = empty_outputs(x, weight, *case.window)
    run = fastest_kernel(case)
    torchs = median_milliseconds(partial(functional.conv2d, x, weight, None, *case.window))
    copy = median_milliseconds(functional.conv2d(x, weight, None, *case.window).clone)
    return [
        torchs,
        copy / 2,
        median_milliseconds(partial(run, x, weight, y, sums)) if run else float("inf"),
    ]


def table(name: str, dtype: torch.dtype, batch: int) -> list[str]:
    rows = []
    totals = [0.0] * 3
    saved = 0.0
    paying = 0
    found = cases(dtype, batch)
    for case, count in found.items():
        milliseconds = measured(case)
        saves = milliseconds[0] + milliseconds[1] - milliseconds[2]
        totals = [total + count * one for total, one in zip(totals, milliseconds, strict=True)]
        saved = saved + count * max(0.0, saves)
        paying = paying + count * (saves > 0)
        (_, c, h, w), (k, _, r, _) = case.x_shape, case.weight_shape
        columns = " | ".join(f"{one:.3f}" for one in milliseconds)
        rows.append(
            f"| {c} x {h} x {w} to {k}, {r} x {r}, stride {case.stride[0]} | {count} | {columns} |"
            f" {saves:+.3f} |"
        )
    columns = " | ".join(f"{one:.2f}" for one in totals)
    total = (
        f"| all; where it pays, {paying} of {found.total()} | {found.total()} | {columns} |"
        f" {saved:+.2f} |"
    )
    head = f"| {name} | times | torch | half a copy | cuDNN with sums | saves |"
    return [head, "|---|---:|---:|---:|---:|---:|", *rows, total, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch.cuda.is_available() is false: cuDNN's kernels need a GPU")
    torch.backends.cudnn.benchmark = True
    tables = [line for name, asked in PRECISIONS.items() for line in table(name, *asked)]
    said = "What is measured stands in the head of `benchmarks/conv_sums.py`; in ms."
    title = "# Convolutions that add up their outputs"
    publish(
        [
            title,
            "",
            said,
            "",
            *tables,
            *conditions("conv_sums.py", packages=("nvidia-cudnn-frontend",)),
        ],
        arguments.output,
    )


if __name__ == "__main__":
    main()
