"""The bytes that the kernels of a training step read and write, as torch's compiler counts them. No
GPU is needed.

    python benchmarks/compiler_bytes.py [resnet50] [--batch 4] [--side 224]

For a model of torchvision in bf16 and channels_last, with and without tuning.conv_sums.
Convolutions are counted by what they read and write. Nothing is computed, as the C++ that the
compiler makes for a CPU is not built; max pools, which would look up what was not computed, are
average pools of the same shape.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch
import torchvision
from torch import nn
from torch._inductor import async_compile, compile_fx, config, metrics
from torchvision.models import list_models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def counted(model: nn.Module, images: torch.Tensor, conv_sums: bool) -> tuple[float, float]:
    """Bytes of a step, forward and backward. images: [n, c, h, w]."""
    from ddp_train.kernels.conv_sums import ConvSums

    torch._dynamo.reset()
    model = model.to(memory_format=torch.channels_last)
    model.compile(
        dynamic=False,
        options={"pre_grad_custom_pass": ConvSums("cpu", (torch.bfloat16,), always=True)}
        if conv_sums
        else {},
    )
    metrics.reset()
    with (
        config.patch({"compile_threads": 1, "force_disable_caches": True, "cpp.vec_isa_ok": True}),
        mock.patch.object(
            async_compile.AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None
        ),
        mock.patch.object(compile_fx.inductor_metrics_log, "isEnabledFor", lambda _: True),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(images.contiguous(memory_format=torch.channels_last))
        forward = metrics.num_bytes_accessed
        outputs.sum().backward()
    return forward, metrics.num_bytes_accessed - forward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "arch", nargs="?", default="resnet50", choices=list_models(module=torchvision.models)
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--side", type=int, default=224)
    asked = parser.parse_args()
    print("| MB a sample | forward | backward |\n|---|---:|---:|")
    images = torch.randn(asked.batch, 3, asked.side, asked.side)
    for conv_sums in (False, True):
        model = torchvision.models.get_model(asked.arch)
        for name, pool in list(model.named_modules()):
            if isinstance(pool, nn.MaxPool2d):
                model.set_submodule(name, nn.AvgPool2d(pool.kernel_size, pool.stride, pool.padding))
        forward, backward = (part / asked.batch / 1e6 for part in counted(model, images, conv_sums))
        print(
            f"| {asked.arch}{', conv_sums' * conv_sums} | {forward:.1f} | {backward:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
