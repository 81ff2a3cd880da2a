"""Samples out of what is held in memory, by their numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddp_train.data.augmentation import factor_and_offset, normalise

WORD = torch.int64
NormalisedRows = Callable[[Tensor, Tensor, tuple[float, ...], tuple[float, ...]], Tensor]
"""Normalised images of a set that is held, by their numbers; see `normalised_rows`."""


def normalised_rows(
    held: Tensor, index: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """float32 [len(index), c, h, w]: images of `held`, uint8, normalised, in their memory format.
    index: int64."""
    return normalise(rows(held, index), mean, std, torch.float32)


def normalised_rows_by(
    kernel: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None],
) -> NormalisedRows:
    """`normalised_rows` by a kernel, to the last bit, and by torch where the kernel gives None.

    kernel: see `kernels.interface.load_fetch`.
    """

    def normalised(
        held: Tensor, index: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> Tensor:
        factor, offset = factor_and_offset(mean, std, torch.float32, held.device)
        images = kernel(held, index, factor, offset)
        if images is None:
            return normalised_rows(held, index, mean, std)
        return images

    return normalised


def rows(held: Tensor, index: Tensor) -> Tensor:
    """held[index] in the same memory format, copied in words of eight bytes where samples consist
    of such, not byte by byte: 640 images of MNIST in 140 us, not 409, on one core."""
    if not held.is_contiguous():  # images that are channels_last, as `ArraySource.to` makes them
        as_held = held.permute(0, 2, 3, 1) if held.ndim == 4 else held
        if as_held.is_contiguous():
            return rows(as_held, index).permute(0, 3, 1, 2)
        return held[index]
    samples = held.view(len(held), -1)
    if samples.shape[1] * held.itemsize % WORD.itemsize:
        return samples[index].view(-1, *held.shape[1:])
    return samples.view(WORD)[index].view(held.dtype).view(-1, *held.shape[1:])
