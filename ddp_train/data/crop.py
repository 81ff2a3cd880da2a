"""Crops and resizes images, uint8 to uint8: one at a time, or many at once.

One is resized by torch's kernel, many by matrix products.

Both are bilinear with antialiasing, horizontally first, and round to uint8 after each direction, as
torchvision's resized_crop on uint8 tensors does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.augmentation import random_crop

MAX_PIXELS = 2**26
"""The most values (three for each pixel) that are resized at once: 256 MiB in float32."""
WEIGHT_SCALE = 2**15


class CropBox(NamedTuple):
    """A box of an image, and how it is resized.

    It is resized to rows x columns; of the result a square is taken that begins at (first_row,
    first_column).
    """

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int
    first_row: int = 0
    first_column: int = 0


def crop_box_for(height: int, width: int, size: int, draws: Sequence[float] | None) -> CropBox:
    """The CropBox of a sample, for a result of size x size pixels.

    draws: four, uniform in [0, 1), for a random crop. None for the usual evaluation crop: the
        centre of the image resized to a short side of 8/7 of `size`.
    """
    if draws is not None:
        return CropBox(*random_crop(width, height, draws), size, size)
    short = round(size * 8 / 7)
    rows = short if height <= width else int(short * height / width)
    columns = short if width <= height else int(short * width / height)
    first_row = round((rows - size) / 2)
    first_column = round((columns - size) / 2)
    return CropBox(0, 0, height, width, rows, columns, first_row, first_column)


def resize_crop(image: Tensor, box: CropBox, size: int) -> Tensor:
    """Crop and resize one image on the CPU with torch's kernel, which gives torchvision's pixels.

    image: uint8 [3, height, width].

    Returns uint8 [3, size, size].
    """
    batch = _cut(image, box)[None]
    whole = functional.interpolate(batch, (box.rows, box.columns), mode="bilinear", antialias=True)[
        0
    ]
    rows = slice(box.first_row, box.first_row + size)
    columns = slice(box.first_column, box.first_column + size)
    return whole[:, rows, columns]


def resize_crops(images: Sequence[Tensor], boxes: Sequence[CropBox], size: int) -> Tensor:
    """Crop and resize many images of any sizes on one device.

    Resizing is linear and separable: a product with a matrix of weights from the left and one from
    the right. That takes about twenty kernels for all images, torch's own resizing several for
    each. To the last bit, the result for an image does not depend on the other images or on the
    device: weights are multiples of 2^-15 with 11 significant bits, so that float32 and TF32 both
    sum the products with uint8 pixels without rounding, in any order.

    images: each uint8 [3, height, width].

    Returns uint8 [n, 3, size, size].
    """
    crops = []
    for group in _groups_that_fit(boxes):
        images_of_group = [images[number] for number in group]
        boxes_of_group = [boxes[number] for number in group]
        crops.append(_resize_group(images_of_group, boxes_of_group, size))
    return torch.cat(crops)


def _groups_that_fit(boxes: Sequence[CropBox]) -> list[list[int]]:
    """Divide boxes into groups whose crops are resized together.

    The boxes of a group follow each other. Each padded to the largest, they have at most MAX_PIXELS
    values; a box that has more is a group of its own.

    Returns the positions in `boxes`, group by group.
    """
    groups: list[list[int]] = [[]]
    height = 0
    width = 0
    for number, box in enumerate(boxes):
        height = max(height, box.height)
        width = max(width, box.width)
        pixels = 3 * (len(groups[-1]) + 1) * height * width
        if groups[-1] and pixels > MAX_PIXELS:
            groups.append([])
            height = box.height
            width = box.width
        groups[-1].append(number)
    return groups


def _cut(image: Tensor, box: CropBox) -> Tensor:
    return image[:, box.top : box.top + box.height, box.left : box.left + box.width]


def _resize_group(images: list[Tensor], boxes: list[CropBox], size: int) -> Tensor:
    """Crop and resize images of one group, see `_groups_that_fit`.

    images: uint8 [3, height, width] each.

    Returns uint8 [n, 3, size, size].
    """
    count = len(images)
    device = images[0].device
    height = max(box.height for box in boxes)
    width = max(box.width for box in boxes)
    padded = torch.zeros(count, 3, height, width, dtype=torch.uint8, device=device)
    targets = [padded[row, :, : box.height, : box.width] for row, box in enumerate(boxes)]
    crops = [_cut(image, box) for image, box in zip(images, boxes, strict=True)]
    torch._foreach_copy_(targets, crops)  # pyright: ignore[reportPrivateImportUsage]  a loop in C++
    numbers = torch.tensor(boxes, dtype=torch.float32).to(device)
    _, _, heights, widths, rows, columns, first_row, first_column = numbers.unbind(1)
    horizontal = _weights(widths, columns, first_column, size, width)
    vertical = _weights(heights, rows, first_row, size, height)
    pixels = padded.view(count, 3 * height, width).float()
    narrow = (pixels @ horizontal.mT).round_()
    small = (vertical[:, None] @ narrow.view(count, 3, height, size)).round_()
    return small.byte()


def _weights(lengths: Tensor, resized_to: Tensor, first: Tensor, size: int, length: int) -> Tensor:
    """Antialiasing weights [n, size, length], each row of which sums to 1.

    They are triangles as wide as the source pixels that one target pixel covers.

    lengths: [n], source pixels of each image in one direction, at most `length`.
    resized_to: [n], target pixels in that direction.
    first: [n], the first target pixel of `size` that are computed.
    """
    device = lengths.device
    scale = (lengths / resized_to)[:, None, None]
    places = torch.arange(size, device=device)[None, :, None] + first[:, None, None]
    centres = (places + 0.5) * scale
    pixels = torch.arange(length, device=device)
    distances = (pixels + 0.5 - centres).abs() / scale.clamp(min=1)
    is_inside = pixels < lengths[:, None, None]
    triangles = (1 - distances).clamp_(min=0) * is_inside
    whole = (triangles * WEIGHT_SCALE).round_()  # integers are summed without rounding
    shares = whole / whole.sum(-1, keepdim=True)
    return (shares * WEIGHT_SCALE).round_().half().float() * 2.0**-15
