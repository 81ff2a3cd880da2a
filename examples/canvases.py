"""Handwritten digits scattered over a canvas: which pixels are ink of which digit, and which digits
are there.

The digits are those that scikit-learn ships; every fifth writes the test canvases, the others the
training ones.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

SIDE = 32
QUARTERS = ((0, 0), (0, 16), (16, 0), (16, 16))
INK = 4 / 16  # of the darkest; what is lighter than this belongs to the background


class Canvases:
    """Handwritten digits on canvases, with one of two targets.

    labels: "mask" for a class of each pixel, 0 for the background and 1 + n for the digit n, int64
        [32, 32]. "digits" for 1 for each digit that is on the canvas, float32 [10].

    Canvases are drawn with torch's random numbers, which the launcher keys by seed, epoch and
    sample number: those to train on are new in every epoch, those of the test are always the same.
    """

    classes = ("background", *map(str, range(10)))

    def __init__(
        self, train: bool, labels: str = "mask", samples: int = 3000, test_samples: int = 500
    ) -> None:
        images, digits = load_digits(return_X_y=True)
        mine = [number for number in range(len(digits)) if (number % 5 > 0) == train]
        self.images = torch.from_numpy(images[mine] / 16).float().view(-1, 8, 8)
        self.digits = torch.from_numpy(digits[mine]).long()
        self.target = labels
        self.samples = samples if train else test_samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        canvas = 0.2 * torch.rand(1, SIDE, SIDE)
        mask = torch.zeros(SIDE, SIDE, dtype=torch.long)
        there = torch.zeros(10)
        for top, left in QUARTERS:
            if torch.rand(()) < 0.3:
                continue
            which = int(torch.randint(len(self.digits), ()))
            shift_down, shift_right = torch.randint(9, (2,)).tolist()
            place = (
                slice(top + shift_down, top + shift_down + 8),
                slice(left + shift_right, left + shift_right + 8),
            )
            image = self.images[which]
            digit = int(self.digits[which])
            canvas[0][place] = torch.maximum(canvas[0][place], image)
            mask[place] = torch.where(image > INK, digit + 1, 0)
            there[digit] = 1.0
        return canvas, mask if self.target == "mask" else there


def convolutions(channels: int, width: int) -> nn.Sequential:
    layers = (
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )
    return nn.Sequential(
        *layers, nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015), two levels deep: [n, 1, h, w] -> logits [n, classes, h,
    w]."""

    def __init__(self, classes: int = 11, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(1, width), convolutions(width, 2 * width)])
        self.bottom = convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [convolutions(6 * width, 2 * width), convolutions(3 * width, width)]
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down[0](images)
        second = self.down[1](functional.max_pool2d(first, 2))
        found = self.bottom(functional.max_pool2d(second, 2))
        for level, beside in zip(self.up, (second, first), strict=True):
            found = level(torch.cat([functional.interpolate(found, scale_factor=2.0), beside], 1))
        return self.head(found)


class Tagger(nn.Sequential):
    """[n, 1, h, w] -> logits [n, 10]: the strongest sign of each digit, anywhere on the canvas."""

    def __init__(self, width: int = 16) -> None:
        halve = nn.MaxPool2d(2)
        most = nn.AdaptiveMaxPool2d(1)
        layers = (
            convolutions(1, width),
            halve,
            convolutions(width, 2 * width),
            convolutions(2 * width, 2 * width),
        )
        super().__init__(*layers, nn.Conv2d(2 * width, 10, 1), most, nn.Flatten())
