"""The one door to this room: what `tuning.triton_kernels`, `tuning.conv_sums` and recorded
optimizer steps use.

Each function imports what it needs when it is called, so that neither Triton nor cuDNN is loaded
for a run that does not use it. No module outside of this room imports another one of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.environment import set_triton_cache


def replace_max_pools(model: nn.Module) -> None:
    """Let max-pooling layers with overlapping windows run our Triton kernels, in place."""
    if any(isinstance(layer, nn.MaxPool2d) for layer in model.modules()):
        set_triton_cache()
        from ddp_train.kernels import max_pool

        max_pool.replace_max_pools(model)


def load_cross_entropy_sum() -> Callable[[Tensor, Tensor], Tensor]:
    """Sum of the cross-entropy of logits [n, classes] and targets [n], by Triton on GPUs."""
    set_triton_cache()
    from ddp_train.kernels.cross_entropy import cross_entropy_sum

    return cross_entropy_sum


def load_fetch() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Import the Triton kernel that fetches and normalises uint8 images held on a GPU.

    Returns `kernels.fetch.fetch`, a function of images, indices, factors and offsets. It returns
    None for images that the kernel cannot take.
    """
    set_triton_cache()
    from ddp_train.kernels.fetch import fetch

    return fetch


def conv_sums_options(compile_mode: str) -> dict[str, Any]:
    """Options of torch.compile for a mode, with sums of batch norms in cuDNN's convolutions."""
    from torch._inductor import config

    from ddp_train.kernels.conv_sums import ConvSums

    options = torch._inductor.list_mode_options(compile_mode)
    options["pre_grad_custom_pass"] = ConvSums()
    # torch 2.11 does not have this option, and no other order. Early: before the compiler's cache
    # is asked, which does not know our timing.
    if hasattr(config, "pre_grad_pass_timing"):
        options["pre_grad_pass_timing"] = "early"
    return options


def split_optimizer_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """torch's fused SGD, Adam or AdamW with updates that fill a GPU; see `split_fused`."""
    from ddp_train.kernels import split_fused

    return split_fused.CLASSES[optimizer_class]
