"""Handwritten digits in a loop of one's own, with a learning rate that falls when the test loss
does not: ReduceLROnPlateau, given the same number on all processes. Training stops when the rate is
small. docs/guides/own_loop.md."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import ddp_train

EPOCHS = 30
LEAST_RATE = 0.1


def digits(train):
    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 300) if train else slice(300, 500)
    return data.TensorDataset(torch.tensor(images[rows] / 16).float(), torch.tensor(labels[rows]))


def main():
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    loader = run.loader(digits(train=True), global_batch_size=32)
    test_loader = run.test_loader(digits(train=False), batch_size=64)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(EPOCHS):
        if optimizer.param_groups[0]["lr"] < LEAST_RATE:
            break  # alike on all processes, and in the checkpoint: a second start stops here too
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = run.mean(F.cross_entropy(model(images), labels, reduction="none"))
            loss.backward()
            optimizer.step()

        model.eval()
        loss_sum = count = 0
        with torch.no_grad():
            for images, labels in test_loader:
                loss_sum += F.cross_entropy(model(images), labels, reduction="sum").item()
                count += len(labels)
        test_loss = run.sum(loss_sum) / run.sum(count)
        scheduler.step(test_loss)
        rate = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch}: test loss {test_loss:.4f}, learning rate {rate:g}")


with ddp_train.session("runs/plateau") as run:
    main()
