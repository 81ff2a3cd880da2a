"""Batches that are copied beside the computation, played on the CPU; tests/end_to_end/test_gpu.py
has real streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.streams.batch_stream import BatchReader
from ddp_train.data.streams.in_process import InProcessStream
from ddp_train.data.streams.placement import BATCHES_AHEAD, CopyStream, Placement
from tests.support.jobs import table

events: list[str] = []


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str = "copies") -> None:
        self.name = name
        self.recorded = 0

    def record_event(self) -> Any:
        number = self.recorded
        self.recorded += 1
        return mock.Mock(
            **{"synchronize.side_effect": lambda: events.append(f"host waits for event {number}")}
        )

    def wait_stream(self, other: Stream) -> None:
        events.append(f"{self.name} waits for {other.name}")


class NotedPlacement(Placement):
    """Writes down each copy."""

    def place_tensor(self, tensor: Tensor) -> Tensor:
        events.append("copy")
        return super().place_tensor(tensor)


@pytest.fixture
def training() -> Iterator[Stream]:
    events.clear()
    current = Stream("training")

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        events.append(f"in {stream.name}")
        yield
        events.append(f"out of {stream.name}")

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        events.append(f"kept for {stream.name}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda device: Stream()))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", inside))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda device: current))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        yield current


def test_batch_is_copied_while_earlier_ones_are_computed(training: Stream) -> None:
    source = table(40)
    plan = BatchPlan(samples=40, global_batch_size=8, accumulation_steps=1, steps=5, seed=0)
    reader = BatchReader(source, one_target_per_sample=False)
    placement = CopyStream(NotedPlacement(torch.device("cpu")))
    stream = InProcessStream(reader, plan.micro_batches(), placement, pin_memory=False)

    for number, fetched in enumerate(stream):
        batch = stream.place(fetched)
        events.append(f"compute {number}")
        assert torch.equal(batch.inputs, source.inputs[torch.from_numpy(batch.micro_batch.indices)])

    copied = [
        "in copies",
        "copy",
        "copy",
        "out of copies",
        "training waits for copies",
        *["kept for training"] * 2,
    ]
    expected: list[str] = []
    for number in range(5):
        # Event n stands behind the computation on batch n - 1. No copy waits for the one just
        # before it.
        if number >= BATCHES_AHEAD:
            expected.append(f"host waits for event {number - BATCHES_AHEAD}")
        expected += [*copied, f"compute {number}"]
    assert events == expected
