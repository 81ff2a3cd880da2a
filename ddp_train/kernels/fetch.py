"""Images that are held on a GPU, fetched and normalised by one Triton kernel.

torch does it in three: the rows, a product, a sum. For 1,024 pictures of 224 x 224 the last two
alone took an H200 0.99 ms, in which the 0.75 GB that must be read and written fit five times
(docs/inside/benchmarks/speed.md).
"""

# Triton's types are those that its compiler sees, not what a call is given.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers for each program."""
MOST_PROGRAMS = 2**31 - 1
"""The limit of CUDA for the first dimension of a grid."""


@triton.jit
def _fetch(
    held,
    index,
    factor,
    offset,
    out,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale and shift the images of an index.

    SIZE: numbers of an image.
    INNER: how many in a row are of one channel.
    """
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    image = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    channel = place // INNER % CHANNELS
    source = held + tl.load(index + image) * SIZE + place
    pixels = tl.load(source, mask=inside, other=0).to(tl.float32)
    scaled = pixels * tl.load(factor + channel) + tl.load(offset + channel)
    tl.store(out + image * SIZE + place, scaled, mask=inside)


def fetch(held: Tensor, index: Tensor, factor: Tensor, offset: Tensor) -> Tensor | None:
    """held[index] * factor + offset, in the bits of torch; None if the kernel does not fit.

    held: uint8 [n, c, h, w], channels_last or contiguous, on a GPU.
    index: int64 [m], contiguous.
    factor, offset: float32 [c, 1, 1].
    """
    memory_format = _memory_format(held)
    image_size = held.shape[1:].numel()
    programs = len(index) * triton.cdiv(image_size, BLOCK)
    if memory_format is None or held.dtype != torch.uint8:
        return None
    channels = held.shape[1]
    if not factor.numel() == offset.numel() == channels:
        return None
    if index.dtype != torch.int64 or not index.is_contiguous():
        return None
    if not 0 < programs <= MOST_PROGRAMS:
        return None
    out = torch.empty(
        (len(index), *held.shape[1:]), device=held.device, memory_format=memory_format
    )
    inner = 1
    if memory_format == torch.contiguous_format:
        inner = held.shape[2:].numel()
    sizes = (image_size, channels, inner, BLOCK)
    with torch.cuda.device_of(held):
        # Two operations, rounded one by one as torch's are: a fused one has other bits.
        _fetch[(programs,)](held, index, factor, offset, out, *sizes, enable_fp_fusion=False)
    return out


def _memory_format(images: Tensor) -> torch.memory_format | None:
    """Contiguous or channels_last; None for images of other strides or dimensions."""
    if images.ndim != 4:
        return None
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if images.is_contiguous(memory_format=memory_format):
            return memory_format
    return None
