"""Handwritten digits in a loop of one's own, with stochastic weight averaging (SWA): torch's
AveragedModel and SWALR, and batch norm's statistics of the average over all processes.
docs/guides/own_loop_more.md, Averages and teachers."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils import data

import ddp_train

EPOCHS = 8
SWA_START = 4


def digits(train):
    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 300) if train else slice(300, 500)
    return data.TensorDataset(torch.tensor(images[rows] / 16).float(), torch.tensor(labels[rows]))


def accuracy(model, test_loader):
    model.eval()
    correct = count = 0
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images).argmax(1) == labels).sum().item()
            count += len(labels)
    return run.sum(correct) / run.sum(count)


def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = run.wrap(net)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = SWALR(optimizer, swa_lr=0.1, anneal_epochs=2)
    loader = run.loader(digits(train=True), global_batch_size=32)
    test_loader = run.test_loader(digits(train=False), batch_size=64)
    run.resume(model=model, optimizer=optimizer, average=average, scheduler=scheduler)

    for epoch in run.epochs(EPOCHS):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = run.mean(F.cross_entropy(model(images), labels, reduction="none"))
            loss.backward()
            optimizer.step()
        if epoch >= SWA_START:
            average.update_parameters(model)
            scheduler.step()
        print(f"epoch {epoch}: accuracy {accuracy(model, test_loader):.3f}")

    run.update_bn(loader, average)
    print(f"average of {EPOCHS - SWA_START} epochs: accuracy {accuracy(average, test_loader):.3f}")


with ddp_train.session("runs/swa") as run:
    main()
