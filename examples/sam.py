"""Sharpness-aware minimisation in a loop of your own: two passes in each step, and one update."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ddp_train

SAMPLES = 200
EPOCHS = 10


def spirals(count: int = SAMPLES) -> TensorDataset:
    """Points on two spirals [n, 2], and which of them."""
    angles = 0.5 + 3 * torch.arange(count).double() / count
    which = torch.arange(count) % 2
    turned = angles + torch.pi * which
    return TensorDataset(angles[:, None] * torch.stack([turned.cos(), turned.sin()], 1) / 3, which)


class SharpnessAware:
    """Foret et al., "Sharpness-Aware Minimization", 2021.

    It holds no state between two steps, so that the optimizer is all that a checkpoint needs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, radius: float = 0.05) -> None:
        self.optimizer = optimizer
        self.radius = radius
        self.moves: dict[nn.Parameter, Tensor] = {}

    def _parameters(self) -> list[nn.Parameter]:
        groups = self.optimizer.param_groups
        return [part for group in groups for part in group["params"] if part.grad is not None]

    @torch.no_grad()
    def ascend(self) -> None:
        """Go where the loss is largest nearby: the gradients there are those of the update."""
        parameters = self._parameters()
        norm = nn.utils.get_total_norm([part.grad for part in parameters if part.grad is not None])
        for part in parameters:
            assert part.grad is not None
            self.moves[part] = part.grad * (self.radius / (norm + 1e-12))
            part.add_(self.moves[part])
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        """Go back, and update."""
        for part, move in self.moves.items():
            part.sub_(move)
        self.moves.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2)).double()


def train(run: Any, epochs: int = EPOCHS, samples: int = SAMPLES) -> nn.Module:
    model = run.wrap(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharpness_aware = SharpnessAware(optimizer)
    loader = run.loader(spirals(samples), global_batch_size=16)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(epochs):
        total = 0.0
        for points, labels in loader:
            for move in (sharpness_aware.ascend, sharpness_aware.descend):
                losses = functional.cross_entropy(model(points), labels, reduction="none")
                run.mean(losses).backward()
                move()
            total += losses.sum().item()
        print(f"epoch {epoch}: loss {run.sum(total) / samples:.4f}")
    return model


if __name__ == "__main__":
    run_dir = "runs/sam"
    if len(sys.argv) > 1:
        run_dir = sys.argv[1]
    with ddp_train.session(run_dir) as run:
        train(run)
