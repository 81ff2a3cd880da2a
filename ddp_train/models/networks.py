"""Small networks for images, tables and anything flat."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SMALLEST_SIDE = 4
"""Convolutions stop halving an image before a side is below this."""
GROUPS = (8, 4, 2, 1)
"""Numbers of groups of a group norm, the first that divides its channels."""


def build_cnn(
    shape: tuple[int, ...], outputs: int, channels: int, norm: str, dropout: float
) -> nn.Module:
    """Pairs of 3 x 3 convolutions, with twice the channels after each halving of the image.

    channels: of the first pair.
    norm: none, batch or group.
    """
    channels_in = shape[0]
    smallest_side = min(shape[1:])
    layers: list[nn.Module] = []
    while True:
        layers += _convolution(channels_in, channels, norm)
        layers += _convolution(channels, channels, norm)
        layers.append(nn.MaxPool2d(2))
        channels_in = channels
        smallest_side //= 2
        if smallest_side < SMALLEST_SIDE:
            break
        channels *= 2
    # 2 x 2 places are left whatever the image size; adaptive pooling has no deterministic backward
    # pass on CUDA.
    layers += [_Quadrants(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels_in * 4, outputs)]
    return nn.Sequential(*layers)


def build_mlp(
    shape: tuple[int, ...], outputs: int, hidden: int, layers: int, dropout: float
) -> nn.Module:
    """Linear layers with ReLU, and dropout if there is any, between them."""

    def activation() -> list[nn.Module]:
        if dropout:
            return [nn.ReLU(inplace=True), nn.Dropout(dropout)]
        return [nn.ReLU(inplace=True)]

    return _stack(shape, hidden, layers, outputs, activation)


def build_linear_regression(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_features(shape), outputs))


def build_gelu_mlp(
    shape: tuple[int, ...], outputs: int, hidden: int, layers: int, fused: bool
) -> nn.Module:
    """Linear layers with GELU between them. fused: torch's compiler fuses its operations."""
    return _stack(shape, hidden, layers, outputs, lambda: [_Gelu(fused)])


def gelu(values: Tensor) -> Tensor:
    """The Gaussian error linear unit (arXiv:1606.08415), as the PyTorch tuning guide writes it.

    Eager torch runs one kernel, and reads and writes all values, for each of its five operations.
    """
    return values * 0.5 * (1.0 + torch.erf(values / 1.41421))


class _Gelu(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.function: Callable[[Tensor], Tensor] = torch.compile(gelu) if fused else gelu

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


class _Quadrants(nn.Module):
    """[n, c, h, w] -> [n, c, 4], the mean of each quadrant.

    They overlap in the middle where a side is odd.
    """

    def forward(self, images: Tensor) -> Tensor:
        height = (images.shape[2] + 1) // 2
        width = (images.shape[3] + 1) // 2
        quadrants = []
        for rows in (images[:, :, :height], images[:, :, -height:]):
            quadrants += [rows[..., :width], rows[..., -width:]]
        return torch.stack([quadrant.mean((2, 3)) for quadrant in quadrants], dim=2)


def _convolution(channels_in: int, channels: int, norm: str) -> list[nn.Module]:
    # A bias before a norm layer would be subtracted again by its mean.
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=norm == "none")
    layers: list[nn.Module] = [convolution]
    if norm == "batch":
        layers.append(nn.BatchNorm2d(channels))
    elif norm == "group":
        groups = next(groups for groups in GROUPS if channels % groups == 0)
        layers.append(nn.GroupNorm(groups, channels))
    return [*layers, nn.ReLU(inplace=True)]


def _stack(
    shape: tuple[int, ...],
    hidden: int,
    layers: int,
    outputs: int,
    activation: Callable[[], list[nn.Module]],
) -> nn.Module:
    """Linear layers with an activation between them."""
    modules: list[nn.Module] = [nn.Flatten()]
    features = _features(shape)
    for _ in range(layers):
        modules += [nn.Linear(features, hidden), *activation()]
        features = hidden
    return nn.Sequential(*modules, nn.Linear(features, outputs))


def _features(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
