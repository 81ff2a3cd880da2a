"""A small network for handwritten digits, ten epochs. docs/guides/own_loop.md shows what makes it
right on many processes."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import ddp_train

EPOCHS = 10


def digits(train):
    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 1500) if train else slice(1500, None)
    return data.TensorDataset(torch.tensor(images[rows] / 16).float(), torch.tensor(labels[rows]))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )
    model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    loader = run.loader(digits(train=True), global_batch_size=64)
    test_loader = run.test_loader(digits(train=False), batch_size=256)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(EPOCHS):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = run.mean(F.cross_entropy(model(images), labels, reduction="none"))
            loss.backward()
            optimizer.step()
        scheduler.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images).argmax(1) == labels).sum().item()
        print(f"epoch {epoch}: {run.sum(correct)} of 297 test images are right")


with ddp_train.session("runs/digits") as run:
    main()
