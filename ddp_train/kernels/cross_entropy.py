"""The cross-entropy of large vocabularies: the logits are read once forward, and read and written
once backward.

The logits of 65,536 tokens over GPT-2's 50,304 classes are 6.6 GB in bf16. Both passes over them
took torch's compiler 8.2 ms on an H200 (docs/inside/benchmarks/gpt2.md), whose memory needs 4.6.
"""

# Triton's types are those that its compiler sees, not what a call is given.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ddp_train.kernels.custom_ops import once_differentiable, only_backward

IGNORED = -100
"""A target of this value has no loss; torch's own number."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FEWEST_CLASSES = 4096
"""With fewer, a row fits into one block of the compiler's kernels, which then read it once, too."""
BLOCK = 4096
WARPS = 4
"""For the logits above on an H200, by themselves: forward 1.52 ms, with eight warps 1.81; backward
3.2 to 3.3."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """As torch's with reduction="sum", in float32.

    logits: [n, classes].
    targets: int64 [n], -100 for none.
    """
    if (
        logits.is_cuda
        and logits.dtype in DTYPES
        and logits.shape[1] >= FEWEST_CLASSES
        and only_backward()
    ):
        return cross_entropy(logits, targets)[0].sum()
    return functional.cross_entropy(logits, targets, reduction="sum")


@triton.jit
def _forward(logits, targets, losses, norms, classes, ignored, BLOCK: tl.constexpr):
    """Compute the loss of one row. Powers of two, which the GPU has: exp(x) = 2 ** (x / ln 2).

    norms: the largest logit, and the logarithm of the sum of exponentials over it, [n, 2]. In one
    number a large logit would take the digits of the sum.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * classes
    column = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, classes, BLOCK):
        there = start + column < classes
        x = tl.load(logits + start + column, mask=there, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        # A class that is ruled out has a logit of -inf.
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2((largest - base) * LOG2_E) + tl.sum(tl.exp2((x - base) * LOG2_E), 0)
        largest = new
    norm = tl.log2(total)
    target = tl.load(targets + row)
    at_target = tl.load(logits + target, mask=target != ignored, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(target == ignored, 0.0, norm * LN_2 + (largest - at_target)))
    tl.store(norms + 2 * row, largest)
    tl.store(norms + 2 * row + 1, norm)


@triton.jit
def _backward(logits, targets, norms, dlosses, dlogits, classes, ignored, BLOCK: tl.constexpr):
    """Compute the gradient of one row: (softmax - 1 at the target) * dloss."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * classes
    dlogits += row * classes
    column = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    largest = tl.load(norms + 2 * row)
    norm = tl.load(norms + 2 * row + 1)
    factor = tl.load(dlosses + row)
    for start in range(0, classes, BLOCK):
        there = start + column < classes
        x = tl.load(logits + start + column, mask=there, other=0.0).to(tl.float32)
        softmax = tl.exp2((x - largest) * LOG2_E - norm)
        gradient = tl.where(start + column == target, softmax - 1.0, softmax) * factor
        tl.store(dlogits + start + column, tl.where(target == ignored, 0.0, gradient), mask=there)


@torch.library.custom_op("ddp_train::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, float32 [n], and what the backward pass needs, [n, 2]."""
    if targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)}: one target a row is"
            " needed"
        )
    targets = targets.long()
    losses, norms = _empty_rows(logits, targets)
    classes = logits.shape[1]
    known = ((targets >= 0) & (targets < classes)) | (targets == IGNORED)
    torch.ops.aten._assert_async.msg(
        known.all(), f"a target is neither in 0 to {classes - 1} nor {IGNORED}"
    )
    logits = logits.contiguous()
    targets = targets.contiguous()
    with torch.cuda.device_of(logits):
        _forward[(len(logits),)](
            logits, targets, losses, norms, classes, IGNORED, BLOCK, num_warps=WARPS
        )
    return losses, norms


@cross_entropy.register_fake
def _empty_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    return losses, torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)


@torch.library.custom_op("ddp_train::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    logits: Tensor, targets: Tensor, norms: Tensor, dlosses: Tensor
) -> Tensor:
    logits = logits.contiguous()
    targets = targets.contiguous()
    dlosses = dlosses.contiguous()
    dlogits = torch.empty_like(logits)
    size = logits.shape[1], IGNORED, BLOCK
    with torch.cuda.device_of(logits):
        _backward[(len(logits),)](
            logits, targets.long(), norms, dlosses, dlogits, *size, num_warps=WARPS
        )
    return dlogits


@_cross_entropy_backward.register_fake
def _empty_like(logits: Tensor, targets: Tensor, norms: Tensor, dlosses: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _gradient(ctx: Any, dlosses: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return _cross_entropy_backward(*ctx.saved_tensors, dlosses), None


cross_entropy.register_autograd(_gradient, setup_context=_keep)
_cross_entropy_backward.register_autograd(once_differentiable)
