"""The batches of a stream."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ddp_train.data.sample_stream import StreamedBatch, StreamReader


def noisy(samples: list[int]) -> Tensor:
    """A collate_fn that draws, as one that masks tokens does."""
    return torch.tensor(samples) + torch.rand(len(samples))


def read(stream: range, first: int, count: int) -> list[StreamedBatch]:
    reader = StreamReader(stream, noisy, 4, rank=1, world_size=2, compared=4, first=first)
    reader.skipped = first
    return list(itertools.islice(reader, count))


def test_collate_draws_the_same_where_a_stream_is_resumed() -> None:
    whole = read(range(20), first=0, count=3)
    resumed = read(range(8, 20), first=2, count=1)
    assert torch.equal(resumed[0].data, whole[2].data)
