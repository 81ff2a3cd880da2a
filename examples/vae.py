"""A variational autoencoder of handwritten digits, whose noise is the same on any number of
processes.

Kingma and Welling, arXiv:1312.6114. `python launch.py experiment=vae`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import ddp_train


class VAE(nn.Module):
    """Encodes an image as a normal distribution over codes, and decodes a code drawn from it."""

    def __init__(self, pixels: int = 64, width: int = 128, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded images [n, pixels]; mean and log-variance of the codes, [n, code] each."""
        mean, log_variance = self.encoder(images).chunk(2, 1)
        noise = ddp_train.noise_like(mean)
        return self.decoder(mean + (log_variance / 2).exp() * noise), mean, log_variance


class Elbo:
    """The evidence lower bound, with its sign changed: what the decoded image lacks, plus the
    distance of the distribution over codes from the standard normal one."""

    unit = "image"
    units_are_samples = True
    better: ClassVar = {"error": "min"}

    def parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """For each image: half the squared error, and the distance in nats, [n] each."""
        images, _ = batch
        decoded, mean, log_variance = model(images)
        error = (decoded - images.flatten(1)).square().sum(1) / 2
        distance = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return error, distance

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        error, distance = self.parts(model, batch)
        return torch.sum(error + distance), len(error)

    def score(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        error, distance = self.parts(model, batch)
        return {
            "loss": (torch.sum(error + distance), len(error)),
            "error": (error.sum(), len(error)),
        }
