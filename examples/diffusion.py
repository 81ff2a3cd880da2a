"""A small diffusion model of handwritten digits: a loop of one's own, whose noise is the same on
any number of processes.

Ho, Jain and Abbeel, arXiv:2006.11239, with the cosine schedule of arXiv:2102.09672.
`python -m examples.diffusion`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import ddp_train

STEPS = 200
"""From an image to noise."""
GLOBAL_BATCH = 64


class UNet(nn.Module):
    """Says which noise is in a noisy image of 8 x 8, or 4 n x 4 n; it is told the step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 4 * width))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, size) for size in (width, 2 * width, width))

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        """images: [n, 1, h, w]. steps: int64 [n]."""
        first, second, third = self.norms
        times = self.time(waves(steps, images.dtype))
        scale, shift = times[:, :, None, None].chunk(2, 1)
        entered = functional.silu(first(self.enter(images)))
        low = functional.silu(second(self.down(entered)) * (1 + scale) + shift)
        low = low + functional.silu(self.middle(low))
        high = torch.cat([entered, self.up(low)], 1)
        return self.leave(functional.silu(third(self.join(high))))


def waves(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of a step, of eight wave lengths: [n, 16]."""
    lengths = torch.arange(8, device=steps.device, dtype=dtype).mul(0.7).exp()
    angles = steps[:, None].to(dtype) / lengths
    return torch.cat([angles.sin(), angles.cos()], 1)


def share_of_image(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """How much of the variance of a noisy image is the image's, [n, 1, 1, 1]."""
    angle = (steps.to(dtype) / STEPS + 0.008) / 1.008 * math.pi / 2
    return angle.cos().square().clamp(1e-4, 0.9999)[:, None, None, None]


def losses_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The squared error of the noise that the model finds, for each image: [n]."""
    steps = ddp_train.randint_like(labels, STEPS)
    noise = ddp_train.noise_like(images)
    share = share_of_image(steps, images.dtype)
    found = model(share.sqrt() * images + (1 - share).sqrt() * noise, steps)
    return (found - noise).square().mean((1, 2, 3))


@torch.no_grad()
def picture(model: nn.Module, seed: int, device: torch.device) -> Tensor:
    """An image that the model makes of noise, [8, 8], by the deterministic steps of DDIM
    (arXiv:2010.02502)."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 1, 8, 8, generator=generator).to(device)
    for number in reversed(range(STEPS)):
        step = torch.tensor([number], device=device)
        share = share_of_image(step, image.dtype)
        before = share_of_image(step - 1, image.dtype)
        noise = model(image, step)
        clean = ((image - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-1, 1)
        image = before.sqrt() * clean + (1 - before).sqrt() * noise
    return image[0, 0].cpu()


def digits() -> TensorDataset:
    """1,797 images [1, 8, 8] with numbers from -1 to 1, and their labels, which nobody learns."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images).to(torch.get_default_dtype()) / 8 - 1
    return TensorDataset(pixels.view(-1, 1, 8, 8), torch.from_numpy(labels))


def train(run: Any, data: Dataset[Any], test: Dataset[Any], epochs: int, width: int = 32) -> UNet:
    """Train on one part of the data, and score the other part after each epoch."""
    torch.manual_seed(0)
    model = run.wrap(UNet(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = run.loader(data, global_batch_size=GLOBAL_BATCH)
    test_loader = run.test_loader(test, batch_size=100)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            run.mean(losses_of(model, images, labels)).backward()
            optimizer.step()
        model.eval()
        error = samples = 0
        with torch.no_grad():
            for images, labels in test_loader:  # with the same noise in each epoch
                losses = losses_of(model, images, labels)
                error += losses.sum().item()
                samples += len(losses)
        print(f"epoch {epoch}: test error {run.sum(error) / run.sum(samples):.4f}")
    return model


if __name__ == "__main__":
    everything = digits()
    train_data = TensorDataset(*everything[:1500])
    test_data = TensorDataset(*everything[1500:])
    with ddp_train.session("runs/diffusion") as run:
        trained = train(run, train_data, test_data, epochs=20)
        if run.rank == 0:
            for row in picture(trained, seed=1, device=run.device):
                print("".join(" .:*#"[round(max(0.0, value.item() + 1) * 2)] for value in row))
