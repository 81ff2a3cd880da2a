"""Momentum contrast (MoCo) on handwritten digits: a momentum encoder and a queue of its keys.

`python examples/moco.py [RUN_DIR]`; docs/guides/own_loop.md, "Averages and teachers".
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import ddp_train

EPOCHS, BATCH, KEYS, MOMENTUM, TEMPERATURE = 4, 100, 600, 0.9, 0.2


def digits():
    images, _ = load_digits(return_X_y=True)
    return torch.tensor(images[:1500] / 16).float()


class Views(data.Dataset):
    """Two views of each image, moved by up to a pixel and with noise: drawn for the sample, so the
    same on any number of processes."""

    def __init__(self, images):
        self.images = images.view(-1, 8, 8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.view(number), self.view(number)

    def view(self, number):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        moved = self.images[number].roll((down, right), (0, 1))
        return (moved + 0.1 * torch.randn(8, 8)).flatten()


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
        )
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(KEYS, 32), dim=1))  # saved with it
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, views, others):
        """The loss of each sample, [n]."""
        queries = F.normalize(self.encoder(views), dim=1)
        keys = self.keys_of(others)
        of_own = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([of_own, queries @ self.queue.clone().T], 1) / TEMPERATURE
        self.enqueue(keys)
        return F.cross_entropy(logits, logits.new_zeros(len(logits)).long(), reduction="none")

    @torch.no_grad()
    def keys_of(self, views):
        pairs = zip(self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 1 - MOMENTUM)
        return F.normalize(self.momentum_encoder(views), dim=1)

    @torch.no_grad()
    def enqueue(self, keys):
        keys, _ = ddp_train.all_gather(keys)  # of the global batch, in its order
        places = (self.place + torch.arange(len(keys), device=keys.device)) % KEYS
        self.queue[places] = keys
        self.place += len(keys)


def main(run):
    torch.manual_seed(0)
    model = run.wrap(Contrast())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = run.loader(Views(digits()), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer)

    for epoch in run.epochs(EPOCHS):
        total = 0.0
        for views, others in loader:
            optimizer.zero_grad()
            losses = model(views, others)
            run.mean(losses).backward()
            optimizer.step()
            total += losses.sum().item()
        # The first keys are random, and easily told from those of digits.
        print(f"epoch {epoch}: loss {run.sum(total) / 1500:.5f}")


if __name__ == "__main__":
    with ddp_train.session(*sys.argv[1:] or ["runs/moco"]) as run:
        main(run)
