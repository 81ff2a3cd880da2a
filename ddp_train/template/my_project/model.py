"""A network that finds the spot in a picture."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Finder(nn.Module):
    """Pictures [n, 1, h, w] -> places [n, 2]: how likely each pixel is the middle of the spot, and
    the mean of that."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.likely = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 1, 5, padding=2),
            nn.Flatten(),
            nn.Softmax(1),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        likely = self.likely(pictures).view(-1, *pictures.shape[2:])
        height, width = (torch.arange(size).to(likely) for size in likely.shape[1:])
        return torch.stack([likely.sum(2) @ height, likely.sum(1) @ width], 1)
