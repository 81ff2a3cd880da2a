"""The batches of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddp_train.data.sample_stream import StreamedBatch, StreamReader, problem_of_state


def noisy(samples: list[int]) -> Tensor:
    """A collate_fn that draws, as one that masks tokens does."""
    return torch.tensor(samples) + torch.rand(len(samples))


def read(stream: range, first: int, count: int) -> list[StreamedBatch]:
    reader = StreamReader(stream, noisy, 4, rank=1, world_size=2, compared=4, first=first)
    reader.skipped = first
    return list(itertools.islice(reader, count))


class WithState:
    """A hundred numbers, through a buffer that its state leaves out, as public streams have it."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        while self.place < 100:
            buffer.append(self.place)
            self.place += 1
            if len(buffer) == self.buffer:
                yield torch.tensor(buffer.pop(0))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class WithTensor(WithState):
    def state_dict(self) -> dict[str, Any]:
        return {"place": torch.tensor(self.place)}


class BufferShuffledExamplesIterable(WithState): ...


def test_a_state_without_the_samples_of_a_buffer_is_not_used() -> None:
    assert not problem_of_state(WithState(buffer=1))
    assert "after load_state_dict it gave other samples" in problem_of_state(WithState(buffer=3))
    assert "more than texts, numbers, lists and dicts" in problem_of_state(WithTensor(buffer=1))
    outer = WithState(buffer=1)
    outer.inner = BufferShuffledExamplesIterable(buffer=1)  # type: ignore[attr-defined]
    # Hugging Face's, whose state is right in the first file.
    assert "leaves out the samples in the buffer" in problem_of_state(outer)
    stream = WithState(buffer=1)
    problem_of_state(stream)
    assert stream.place == 0, "it is tried with copies"
    stream.open = (number for number in range(3))  # type: ignore[attr-defined]  has no copy
    assert "cannot pickle 'generator' object" in problem_of_state(stream)
    assert problem_of_state(range(3)) == "no state_dict and load_state_dict"


def test_collate_draws_the_same_where_a_stream_is_resumed() -> None:
    whole = read(range(20), first=0, count=3)
    resumed = read(range(8, 20), first=2, count=1)
    assert torch.equal(resumed[0].data, whole[2].data)
