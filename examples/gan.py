"""A generator and a discriminator on handwritten digits: two models and two optimizers, two epochs.

python examples/gan.py FOLDER
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import ddp_train

EPOCHS = 2


class Pairs(data.Dataset):
    """Images with the noise that the generator begins with: of the sample, so of no process."""

    def __init__(self):
        images, _ = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 8 - 1).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number], torch.randn(16)


def main():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator = run.wrap(generator)
    discriminator = run.wrap(discriminator)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = run.loader(Pairs(), global_batch_size=128)
    run.resume(generator=generator, discriminator=discriminator, opt_g=opt_g, opt_d=opt_d)
    loss = torch.zeros(())
    for epoch in run.epochs(EPOCHS):
        for real, noise in loader:
            fake = generator(noise)
            opt_d.zero_grad()
            losses = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))
            run.mean(losses.squeeze(1)).backward()
            opt_d.step()

            opt_g.zero_grad()
            discriminator.requires_grad_(False)
            loss = run.mean(F.softplus(-discriminator(fake)).squeeze(1))
            loss.backward()
            discriminator.requires_grad_(True)
            opt_g.step()
        print(f"epoch {epoch}: loss {run.sum(loss.item()) / run.processes:.4f}")


with ddp_train.session(sys.argv[1], device="cpu") as run:
    main()
