"""Which part of an image a sample shows, and how it is brought to size: uint8 in, uint8 out, one at a time or together.

Both ways are bilinear with antialiasing, horizontally first, rounded to uint8 after each direction, as torchvision's
resized_crop on uint8 tensors is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.augment import crop_box

TOGETHER = 2**26
"""Pixels that are resized at once: 256 MiB in float32."""


class CropBox(NamedTuple):
    """A box of an image is resized to rows x columns, of which a square from (first_row, first_column) on is shown."""

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int
    first_row: int = 0
    first_column: int = 0


def window(height: int, width: int, size: int, draws: Sequence[float] | None) -> CropBox:
    """What a sample shows of an image, size x size in the end: a random crop if there are draws (four, uniform in
    [0, 1)), else the usual evaluation crop, the middle of an image whose short side is 8/7 of the crop."""
    if draws is not None:
        return CropBox(*crop_box(width, height, draws), size, size)
    short = round(size * 8 / 7)
    rows = short if height <= width else int(short * height / width)
    columns = short if width <= height else int(short * width / height)
    return CropBox(0, 0, height, width, rows, columns, round((rows - size) / 2), round((columns - size) / 2))


def resized(image: Tensor, at: CropBox, size: int) -> Tensor:
    """One image, uint8 [3, height, width], by torch's own kernel: the pixels of torchvision. On the CPU."""
    whole = functional.interpolate(_box(image, at)[None], (at.rows, at.columns), mode="bilinear", antialias=True)
    return whole[0, :, at.first_row : at.first_row + size, at.first_column : at.first_column + size]


def _box(image: Tensor, at: CropBox) -> Tensor:
    return image[:, at.top : at.top + at.height, at.left : at.left + at.width]


def resized_together(images: Sequence[Tensor], windows: Sequence[CropBox], size: int) -> Tensor:
    """Many images of any sizes, each uint8 [3, height, width], on one device: uint8 [n, 3, size, size].

    Resizing is linear and separable: a product with a matrix of weights from the left and one from the right, which
    takes some twenty kernels for all images, where torch's own takes several for each. What an image becomes does not
    depend, to the last bit, on the others or on the device: weights are multiples of 2^-15 with 11 significant bits, so
    that float32 and TF32 alike add up the products with uint8 pixels without rounding, in whatever order.
    """
    groups, largest = [[]], (0, 0)
    for number, at in enumerate(windows):
        padded = max(largest[0], at.height), max(largest[1], at.width)
        if groups[-1] and 3 * (len(groups[-1]) + 1) * padded[0] * padded[1] > TOGETHER:
            groups.append([])
            padded = at.height, at.width
        groups[-1].append(number)
        largest = padded
    parts = [_resized_group([images[n] for n in group], [windows[n] for n in group], size) for group in groups]
    return torch.cat(parts)


def _resized_group(images: list[Tensor], windows: list[CropBox], size: int) -> Tensor:
    count, device = len(images), images[0].device
    height, width = max(at.height for at in windows), max(at.width for at in windows)
    boxes = torch.zeros(count, 3, height, width, dtype=torch.uint8, device=device)
    places = [boxes[row, :, : at.height, : at.width] for row, at in enumerate(windows)]
    shown = [_box(image, at) for image, at in zip(images, windows, strict=True)]
    torch._foreach_copy_(places, shown)  # pyright: ignore[reportPrivateImportUsage]  a loop in C++
    numbers = torch.tensor(windows, dtype=torch.float32).to(device)
    _, _, heights, widths, rows, columns, first_row, first_column = numbers.unbind(1)
    horizontal = _weights(widths, columns, first_column, size, width)
    vertical = _weights(heights, rows, first_row, size, height)
    narrow = (boxes.view(count, 3 * height, width).float() @ horizontal.mT).round_()
    return (vertical[:, None] @ narrow.view(count, 3, height, size)).round_().byte()


def _weights(lengths: Tensor, resized_to: Tensor, first: Tensor, size: int, length: int) -> Tensor:
    """Triangles as wide as the pixels that fall into one: [n, size, length], rows of which add up to 1.

    lengths, resized_to, first: [n], the pixels of each image in one direction, and of its resized one, from which
    `size` are taken from `first` on.
    """
    scale = (lengths / resized_to)[:, None, None]
    centres = (torch.arange(size, device=lengths.device)[None, :, None] + first[:, None, None] + 0.5) * scale
    pixels = torch.arange(length, device=lengths.device)
    triangles = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp_(min=0) * (
        pixels < lengths[:, None, None]
    )
    whole = (triangles * 2**15).round_()  # whole numbers add up without rounding
    return (whole / whole.sum(-1, keepdim=True) * 2**15).round_().half().float() * 2.0**-15
