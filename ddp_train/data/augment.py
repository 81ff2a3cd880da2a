"""Augmentation of whole batches, driven by keyed draws: what sample 17 becomes in epoch 3 depends on nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def shift(images: Tensor, draws: Tensor, by: int) -> Tensor:
    """Moves each image by up to `by` pixels in both directions and fills with zeros.

    images: [n, channels, height, width]; draws: [n, 2], uniform in [0, 1).
    """
    _, _, height, width = images.shape
    padded = functional.pad(images, (by, by, by, by))
    offsets = (draws * (2 * by + 1)).long()
    rows = offsets[:, 0, None] + torch.arange(height, device=images.device)
    columns = offsets[:, 1, None] + torch.arange(width, device=images.device)
    which = torch.arange(len(images), device=images.device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def flip(images: Tensor, draws: Tensor) -> Tensor:
    """Mirrors each image left to right if its draw ([n], uniform in [0, 1)) is below one half."""
    return torch.where((draws < 0.5)[:, None, None, None], images.flip(-1), images)


def move(images: Tensor, draws: Tensor, by: int, flips: bool) -> Tensor:
    """`shift` and, for images whose mirror image means the same, `flip`. draws: [n, 3], uniform in [0, 1)."""
    return shift(flip(images, draws[:, 2]) if flips else images, draws[:, :2], by)


def crop_box(width: int, height: int, draws: Tensor) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop: 8 to 100 % of the area, aspect ratio 3/4 to 4/3.

    draws: [4], uniform in [0, 1). The distribution is that of "Going deeper with convolutions" (arXiv:1409.4842), the
    crop clipped to the image.
    """
    area = width * height * (0.08 + 0.92 * draws[0].item())
    ratio = math.exp((2 * draws[1].item() - 1) * math.log(4 / 3))
    crop_width = max(1, min(width, round(math.sqrt(area * ratio))))
    crop_height = max(1, min(height, round(math.sqrt(area / ratio))))
    top = int(draws[2].item() * (height - crop_height + 1))
    left = int(draws[3].item() * (width - crop_width + 1))
    return top, left, crop_height, crop_width
