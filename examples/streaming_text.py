"""A small language model of bytes, from a stream of text that is shuffled in a buffer.

`python examples/streaming_text.py [RUN_DIR]`; docs/guides/own_loop.md, "Streams".
"""

import random
import sys
from pydoc_data import topics

import torch
from torch import nn
from torch.utils.data import IterableDataset

import ddp_train

EPOCHS, TOPICS, LENGTH, BUFFER = 2, 6, 32, 64


class Text(IterableDataset):
    """Windows of bytes of Python's documentation, as they come from a buffer of them."""

    def windows(self):
        for name in sorted(topics.topics)[:TOPICS]:
            text = topics.topics[name].encode()
            for start in range(0, len(text) - LENGTH, LENGTH):
                yield torch.tensor(list(text[start : start + LENGTH + 1]))

    def __iter__(self):
        buffer = []
        for window in self.windows():
            if len(buffer) < BUFFER:
                buffer.append(window)
                continue
            place = random.randrange(BUFFER)  # keyed by seed, epoch and batch
            yield buffer[place]
            buffer[place] = window
        yield from buffer


class Reader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))[0])


def losses_of(model, windows):
    """The mean loss of each window: [n]."""
    outputs = model(windows[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(outputs, windows[:, 1:], reduction="none").mean(1)


def main(run):
    torch.manual_seed(0)
    model = run.wrap(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = run.loader(Text(), global_batch_size=16)
    run.resume(model=model, optimizer=optimizer)

    for epoch in run.epochs(EPOCHS):
        total = count = 0
        for windows in loader:
            optimizer.zero_grad()
            losses = losses_of(model, windows)
            run.mean(losses).backward()
            optimizer.step()
            total += losses.sum().item()
            count += len(windows)
        print(f"epoch {epoch}: loss {run.sum(total) / run.sum(count):.4f} per byte")
    return model


if __name__ == "__main__":
    with ddp_train.session(*sys.argv[1:] or ["runs/streaming_text"]) as run:
        main(run)
