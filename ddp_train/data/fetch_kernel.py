"""Images that are held on a GPU, fetched and normalised by one Triton kernel.

torch does it in three: the rows, a product, a sum. For 1,024 pictures of 224 x 224 the last two
alone took an H200 0.99 ms, in which the 0.75 GB that must be read and written fit five times
(docs/benchmarks/speed.md).
"""

# Triton's types are those that its compiler sees, not what a call is given.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddp_train.data.augment import factor_and_offset
from ddp_train.data.rows import normalised_rows

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
    """SIZE: numbers of an image. INNER: how many in a row are of one channel."""
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    image = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    channel = place // INNER % CHANNELS
    pixels = tl.load(held + tl.load(index + image) * SIZE + place, mask=inside, other=0).to(
        tl.float32
    )
    scaled = pixels * tl.load(factor + channel) + tl.load(offset + channel)
    tl.store(out + image * SIZE + place, scaled, mask=inside)


def fetched(held: Tensor, index: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """As `rows.normalised_rows`, to the last bit. held: uint8 [n, c, h, w], channels_last or
    contiguous, on a GPU; others are left to torch."""
    formats = (torch.contiguous_format, torch.channels_last) if held.ndim == 4 else ()
    memory_format = next((one for one in formats if held.is_contiguous(memory_format=one)), None)
    n = len(index)
    size = held.shape[1:].numel()
    programs = n * triton.cdiv(size, BLOCK)
    fits = (
        memory_format is not None
        and held.dtype == torch.uint8
        and len(mean) == len(std) == held.shape[1]
    )
    if not (
        fits
        and index.dtype == torch.int64
        and index.is_contiguous()
        and 0 < programs <= MOST_PROGRAMS
    ):
        return normalised_rows(held, index, mean, std)
    factor, offset = factor_and_offset(mean, std, torch.float32, held.device)
    out = torch.empty((n, *held.shape[1:]), device=held.device, memory_format=memory_format)
    channels = held.shape[1]
    inner = 1 if memory_format == torch.channels_last else held.shape[2:].numel()
    with torch.cuda.device_of(held):
        # Two operations, rounded one by one as torch's are: a fused one has other bits.
        _fetch[(programs,)](
            held, index, factor, offset, out, size, channels, inner, BLOCK, enable_fp_fusion=False
        )
    return out
