"""Max pooling of channels_last images, with a backward pass that gathers.

Each pixel looks which of the few windows over it have it as their maximum. torch's own backward
pass, and that of its compiler, took 8.2 and 5.8 ms for a batch of 1,024 pictures of ResNet-50 in
fp16 on an H200, whose 2.5 GB are read and written in 0.6 (docs/inside/benchmarks/speed.md).
"""

# Triton's types are those that its compiler sees, not what a call is given.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.kernels.custom_ops import once_differentiable, only_backward

FORWARD_BLOCK = 1024
BACKWARD_BLOCK = 2048
"""Numbers for each program: on an H200, forward took 0.75 and 0.98 ms with 1,024 and 2,048,
backward 1.76 and 1.49."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Sums are in float32."""
LARGEST_KERNEL = 7
"""The largest window. Loops over it are unrolled; the place of a maximum in its window is an int8,
which ends at 11 x 11."""
MOST_IMAGES = 2**16 - 1
"""The limit of CUDA for the second dimension of a grid."""


@triton.jit
def _forward(
    x,
    y,
    winner,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pool a block of windows.

    winner: the place of the maximum in each window, row by row; the first of equals, and NaN wins.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < OH * OW * C
    image = tl.program_id(1).to(tl.int64)
    channel = place % C
    column = place // C % OW
    row = place // C // OW
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.full((BLOCK,), -1, tl.int32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            h = row * S - P + i
            w = column * S - P + j
            there = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(
                x + image * (H * W * C) + (h * W + w) * C + channel, mask=there, other=float("-inf")
            )
            value = value.to(tl.float32)
            taken = there & ((value > best) | (value != value) | (where < 0))
            best = tl.where(taken, value, best)
            where = tl.where(taken, i * K + j, where)
    tl.store(y + image * (OH * OW * C) + place, best, mask=inside)
    tl.store(winner + image * (OH * OW * C) + place, where.to(tl.int8), mask=inside)


@triton.jit
def _backward(
    dy,
    winner,
    dx,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum, in float32, over the windows that a pixel has won."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < H * W * C
    image = tl.program_id(1).to(tl.int64)
    channel = place % C
    column = place // C % W
    row = place // C // W
    total = tl.zeros((BLOCK,), tl.float32)
    for a in tl.static_range((K + S - 1) // S):
        for b in tl.static_range((K + S - 1) // S):
            oh = (row + P) // S - a
            ow = (column + P) // S - b
            i = row + P - oh * S
            j = column + P - ow * S
            there = inside & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW) & (i < K) & (j < K)
            window = image * (OH * OW * C) + (oh * OW + ow) * C + channel
            won = there & (tl.load(winner + window, mask=there, other=-1).to(tl.int32) == i * K + j)
            total += tl.load(dy + window, mask=won, other=0.0).to(tl.float32)
    tl.store(dx + image * (H * W * C) + place, total, mask=inside)


class MaxPool2d(nn.MaxPool2d):
    """As torch's, by our kernels where the images are channels_last and on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        if (
            input.is_cuda
            and input.dtype in DTYPES
            and input.ndim == 4
            and len(input) <= MOST_IMAGES
            and min(input.shape[2:]) >= LARGEST_KERNEL
            and only_backward()
            and input.is_contiguous(memory_format=torch.channels_last)
        ):
            return max_pool(input, self.kernel_size, self.stride, self.padding)[0]
        return functional.max_pool2d(input, self.kernel_size, self.stride, self.padding)


def replace_max_pools(model: nn.Module) -> None:
    """Let our kernels pool in layers that they fit. A layer keeps its name and its hooks."""
    for layer in model.modules():
        if type(layer) is nn.MaxPool2d and _fits(layer):
            layer.__class__ = MaxPool2d


def _fits(layer: nn.MaxPool2d) -> bool:
    """Whether windows overlap, are square, neither dilated nor rounded up.

    Windows that do not overlap the compiler pools as fast, and fuses with what is around them.
    """
    if layer.return_indices or layer.ceil_mode or layer.dilation != 1:
        return False
    kernel: Any = layer.kernel_size
    stride: Any = layer.stride
    padding: Any = layer.padding
    if not all(isinstance(size, int) for size in (kernel, stride, padding)):
        return False
    return stride < kernel <= LARGEST_KERNEL and 2 * padding <= kernel


# Not torch.library.triton_op: the compiler then fills what is only allocated, 0.5 ms for a stem of
# ResNet-50.
@torch.library.custom_op("ddp_train::max_pool", mutates_args=())
def max_pool(images: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """[n, c, h, w] -> the maxima, [n, c, oh, ow], and the place of each in its window, int8; both
    channels_last."""
    y, winner = _empty_windows(images, kernel, stride, padding)
    (n, c, oh, ow), (h, w) = y.shape, images.shape[2:]
    images = images.contiguous(memory_format=torch.channels_last)
    grid = triton.cdiv(oh * ow * c, FORWARD_BLOCK), n
    with torch.cuda.device_of(images):
        _forward[grid](images, y, winner, h, w, c, oh, ow, kernel, stride, padding, FORWARD_BLOCK)
    return y, winner


@max_pool.register_fake
def _empty_windows(images: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    oh, ow = ((size + 2 * padding - kernel) // stride + 1 for size in images.shape[2:])
    shape = (*images.shape[:2], oh, ow)
    y, winner = (
        torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
        for dtype in (images.dtype, torch.int8)
    )
    return y, winner


@torch.library.custom_op("ddp_train::max_pool_backward", mutates_args=())
def _max_pool_backward(
    dy: Tensor, winner: Tensor, h: int, w: int, kernel: int, stride: int, padding: int
) -> Tensor:
    dx = _empty_images(dy, winner, h, w, kernel, stride, padding)
    n, c, oh, ow = dy.shape
    dy = dy.contiguous(memory_format=torch.channels_last)
    grid = triton.cdiv(h * w * c, BACKWARD_BLOCK), n
    with torch.cuda.device_of(dy):
        _backward[grid](dy, winner, dx, h, w, c, oh, ow, kernel, stride, padding, BACKWARD_BLOCK)
    return dx


@_max_pool_backward.register_fake
def _empty_images(
    dy: Tensor, winner: Tensor, h: int, w: int, kernel: int, stride: int, padding: int
) -> Tensor:
    shape = (*dy.shape[:2], h, w)
    return torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    images, *ctx.window = inputs
    ctx.size = images.shape[2:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    (winner,) = ctx.saved_tensors
    return _max_pool_backward(dy, winner, *ctx.size, *ctx.window), None, None, None


max_pool.register_autograd(_gradient, setup_context=_keep)
_max_pool_backward.register_autograd(once_differentiable)
