"""Augmentation of whole batches by counter-based draws.

An augmented sample depends on its number, epoch and seed alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.device_copy import to_device
from ddp_train.data.rng import hash_key, uniform

ERASING_TRIES = 10
"""As in torchvision: draws of a shape until one is smaller than the image."""
LEAST_CROP_AREA = 0.08
WIDEST_CROP = 4 / 3
LEAST_ERASED_AREA = 0.02
MOST_ERASED_AREA = 0.33
FLATTEST_ERASED_BOX = 0.3
TALLEST_ERASED_BOX = 3.3


def shift(images: Tensor, draws: Tensor, by: int) -> Tensor:
    """Translate each image by up to `by` pixels in both directions, and fill with zeros.

    images: [n, channels, height, width].
    draws: [n, 2], uniform in [0, 1).

    Returns the shape of `images`.
    """
    count, _, height, width = images.shape
    device = images.device
    padded = functional.pad(images, (by, by, by, by))
    offsets = (draws * (2 * by + 1)).long()
    rows = offsets[:, 0, None] + torch.arange(height, device=device)
    columns = offsets[:, 1, None] + torch.arange(width, device=device)
    image_numbers = torch.arange(count, device=device)[:, None, None]
    channels_last = padded.permute(0, 2, 3, 1)
    moved = channels_last[image_numbers, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def flip(images: Tensor, draws: Tensor) -> Tensor:
    """Mirror each image left to right if its draw ([n], uniform in [0, 1)) is below one half."""
    is_mirrored = (draws < 0.5)[:, None, None, None]
    return torch.where(is_mirrored, images.flip(-1), images)


def move(images: Tensor, draws: Tensor, by: int, flips: bool) -> Tensor:
    """`shift` and, if `flips`, `flip`. draws: [n, 3], uniform in [0, 1)."""
    if flips:
        images = flip(images, draws[:, 2])
    return shift(images, draws[:, :2], by)


def random_crop(width: int, height: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop.

    It has 8 to 100 % of the area and an aspect ratio from 3/4 to 4/3.

    The distribution is that of "Going deeper with convolutions" (arXiv:1409.4842); the crop is
    clipped to the image.

    draws: four, uniform in [0, 1).
    """
    area = width * height * (LEAST_CROP_AREA + (1 - LEAST_CROP_AREA) * draws[0])
    ratio = math.exp((2 * draws[1] - 1) * math.log(WIDEST_CROP))
    crop_width = max(1, min(width, round(math.sqrt(area * ratio))))
    crop_height = max(1, min(height, round(math.sqrt(area / ratio))))
    top = int(draws[2] * (height - crop_height + 1))
    left = int(draws[3] * (width - crop_width + 1))
    return top, left, crop_height, crop_width


@dataclass(frozen=True)
class Erasing:
    """Random erasing of a batch, keyed by seed, epoch and sample."""

    probability: float
    seed: int

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        """Erase in place, and return the images.

        images: [n, channels, height, width], normalised.
        numbers: sample numbers, int64 [n], on the device where the draws are to be made.
        """
        draws = uniform(hash_key(self.seed, "erase", epoch), numbers, 3 + 2 * ERASING_TRIES)
        height, width = images.shape[-2:]
        boxes = erasing_boxes(draws, height, width, self.probability)
        return erase(images, to_device(boxes, images.device))


def erasing_boxes(draws: Tensor, height: int, width: int, probability: float) -> Tensor:
    """The boxes that random erasing takes from images: top, bottom, left, right, int64 [n, 4].

    Most are empty.

    In the distribution of arXiv:1708.04896, as torchvision has it: 2 to 33 % of the area, an aspect
    ratio of 0.3 to 3.3. Both are drawn up to ten times, until the box is smaller than the image; if
    it never is, nothing is erased.

    draws: float64 [n, 23], uniform in [0, 1).
    """
    area_range = MOST_ERASED_AREA - LEAST_ERASED_AREA
    areas = height * width * (LEAST_ERASED_AREA + area_range * draws[:, 3::2])
    log_ratio_range = math.log(TALLEST_ERASED_BOX / FLATTEST_ERASED_BOX)
    ratios = (math.log(FLATTEST_ERASED_BOX) + log_ratio_range * draws[:, 4::2]).exp()
    rows = (areas * ratios).sqrt().round()
    columns = (areas / ratios).sqrt().round()
    fits = (rows < height) & (columns < width)
    is_candidate = fits & (draws[:, :1] < probability)
    # 0 if there is no candidate, and then the box is empty.
    first = is_candidate.byte().argmax(1, keepdim=True)
    rows = (rows * is_candidate).gather(1, first)
    columns = (columns * is_candidate).gather(1, first)
    top = (draws[:, 1:2] * (height - rows + 1)).floor()
    left = (draws[:, 2:3] * (width - columns + 1)).floor()
    return torch.cat([top, top + rows, left, left + columns], 1).long()


def erase(images: Tensor, boxes: Tensor) -> Tensor:
    """Set a box of each image to zero, in place, and return the images.

    torch's own copy would not keep their memory format.

    images: [n, channels, height, width].
    boxes: [n, 4], as `erasing_boxes` gives them.
    """
    height, width = images.shape[-2:]
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    y = torch.arange(height, device=images.device)
    x = torch.arange(width, device=images.device)
    rows = (y >= top) & (y < bottom)
    columns = (x >= left) & (x < right)
    inside = rows[:, :, None] & columns[:, None, :]
    return images.masked_fill_(inside[:, None], 0)


def normalise(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """(x / 255 - mean) / std per channel, as one multiplication and one addition.

    The two operations are rounded separately: on CPUs the bits of a fused one depend on the
    position of a pixel in the batch.

    images: uint8 [n, channels, height, width]; the memory format is kept.
    """
    factor, offset = factor_and_offset(mean, std, dtype, images.device)
    if images.is_cuda:
        scaled = torch.mul(images, factor)
    else:
        # On a CPU a multiplication of two dtypes takes 15 times as long.
        scaled = images.to(dtype).mul_(factor)
    return scaled.add_(offset)


@functools.lru_cache(maxsize=8)
def factor_and_offset(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The factor of pixels from 0 to 255, and what is added then: [channels, 1, 1] each."""
    deviation = torch.tensor(std, dtype=dtype).view(-1, 1, 1)
    offset = -torch.tensor(mean, dtype=dtype).view(-1, 1, 1) / deviation
    factor = 1 / (255 * deviation)
    return factor.to(device), offset.to(device)
