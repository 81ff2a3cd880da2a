"""Embeddings of handwritten digits by a triplet loss: batches of P classes with K images each.

`python examples/metric_learning.py [RUN_DIR]`; docs/guides/own_loop.md, "Samplers".
"""

import random
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils import data

import ddp_train

EPOCHS, BATCHES, CLASSES, IMAGES, MARGIN = 5, 40, 8, 4, 0.5


def digits(train):
    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 1500) if train else slice(1500, None)
    return data.TensorDataset(torch.tensor(images[rows] / 16).float(), torch.tensor(labels[rows]))


class ClassBatches(data.Sampler):
    """A batch has some images of each of some classes."""

    def __init__(self, labels):
        self.rows = [(labels == label).nonzero()[:, 0].tolist() for label in range(10)]
        self.random = random.Random(0)  # its state too is that of a run that was not interrupted

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for _ in range(BATCHES):
            chosen = self.random.sample(self.rows, CLASSES)
            yield [row for rows in chosen for row in self.random.sample(rows, IMAGES)]


def embed(model, images):
    return nn.functional.normalize(model(images))


def triplet_losses(anchors, own, embeddings, labels):
    """For each anchor max(0, farthest of its class - nearest of the others + margin).

    anchors: [n, d]; own: their places among all embeddings [m, d] of the global batch.
    """
    distances = (anchors[:, None] - embeddings[None]).square().sum(2)
    is_same = labels[own][:, None] == labels[None]
    farthest = distances.masked_fill(~is_same, 0).amax(1)
    nearest = distances.masked_fill(is_same, torch.inf).amin(1)
    return (farthest - nearest + MARGIN).relu()


def main(run):
    torch.manual_seed(0)
    train = digits(train=True)
    model = run.wrap(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = run.loader(train, batch_sampler=ClassBatches(train.tensors[1]))
    known_loader = run.test_loader(train, batch_size=250)
    test_loader = run.test_loader(digits(train=False), batch_size=99)
    run.resume(model=model, optimizer=optimizer)

    for epoch in run.epochs(EPOCHS):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            anchors = embed(model, images)
            embeddings, own = ddp_train.all_gather(anchors)  # of the global batch, with gradients
            all_labels, _ = ddp_train.all_gather(labels)
            loss = run.mean(triplet_losses(anchors, own, embeddings, all_labels))
            loss.backward()
            optimizer.step()
            total += loss.item() / run.processes
        right = 0
        with torch.no_grad():
            known = run.gather([embed(model, images) for images, _ in known_loader])
            for images, labels in test_loader:
                nearest = (embed(model, images) @ known.T).argmax(1)
                right += (train.tensors[1][nearest.cpu()] == labels.cpu()).sum().item()
        mean = run.sum(total) / BATCHES
        print(f"epoch {epoch}: loss {mean:.6f}, {run.sum(right)} of 297 neighbours are right")


if __name__ == "__main__":
    with ddp_train.session(*sys.argv[1:] or ["runs/metric_learning"]) as run:
        main(run)
