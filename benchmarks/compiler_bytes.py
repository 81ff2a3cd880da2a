"""The bytes that the kernels of a training step read and write, as torch's compiler counts them. No GPU is needed.

    python benchmarks/compiler_bytes.py [resnet50] [--batch 4] [--side 224]

For a model of torchvision in bf16 and channels_last, with and without tuning.conv_sums. Convolutions
are counted by what they read and write. Nothing is computed, as the C++ that the compiler makes for a CPU is not built;
max pools, which would look up what was not computed, are average pools of the same shape.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchvision
from torch import nn
from torch._inductor import async_compile, compile_fx, config, metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def counted(arch: str, batch: int, side: int, **options: Any) -> tuple[float, float]:
    """Bytes of a sample, forward and backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = torchvision.models.get_model(arch).to(memory_format=torch.channels_last)
    for name, pool in list(model.named_modules()):
        if isinstance(pool, nn.MaxPool2d):
            model.set_submodule(name, nn.AvgPool2d(pool.kernel_size, pool.stride, pool.padding))
    model.compile(dynamic=False, options=options)
    images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    metrics.reset()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(images)
    loss = nn.functional.cross_entropy(outputs.float(), torch.arange(batch))
    forward = metrics.num_bytes_accessed
    loss.backward()
    return forward / batch, (metrics.num_bytes_accessed - forward) / batch


def main() -> None:
    from ddp_train.performance.conv_sums import ConvSums

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="?", default="resnet50")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--side", type=int, default=224)
    asked = parser.parse_args()
    print("| MB a sample | forward | backward |\n|---|---:|---:|")
    with (
        config.patch({"compile_threads": 1, "force_disable_caches": True, "cpp.vec_isa_ok": True}),
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None),
        mock.patch.object(compile_fx.inductor_metrics_log, "isEnabledFor", lambda _: True),
    ):
        for name, options in {
            f"{asked.arch}": {},
            f"{asked.arch}, conv_sums": {"pre_grad_custom_pass": ConvSums("cpu", (torch.bfloat16,))},
        }.items():
            forward, backward = counted(asked.arch, asked.batch, asked.side, **options)
            print(f"| {name} | {forward / 1e6:.1f} | {backward / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
