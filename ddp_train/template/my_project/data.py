"""Noisy pictures with one bright spot each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 16


class Spots(Dataset[tuple[Tensor, Tensor]]):
    """Samples: a picture, float32 [1, 16, 16], and the place of its spot, float32 [2]: row and
    column, in pixels.

    They are drawn with torch's random numbers, which ddp-train keys by seed, epoch and sample
    number: to train on, new ones in each epoch; to test on, always the same; and neither depends on
    the number of processes.
    """

    def __init__(self, train: bool, samples: int = 4000, noise: float = 0.3) -> None:
        self.samples = samples if train else samples // 4
        self.noise = noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        place = torch.rand(2) * (SIDE - 1)
        rows, columns = (torch.arange(SIDE) - middle for middle in place)
        spot = torch.exp(-(rows[:, None] ** 2 + columns[None, :] ** 2) / 4)
        return (spot + self.noise * torch.randn(SIDE, SIDE))[None], place
