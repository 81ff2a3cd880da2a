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

from ddp_train.config.schema import TuningConfig
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.copy_stream import BATCHES_AHEAD
from tests.support.jobs import loader_of, table

happened: list[str] = []


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str = "copies") -> None:
        self.name = name
        self.events = 0

    def record_event(self) -> Any:
        number = self.events
        self.events = self.events + 1
        return mock.Mock(
            **{"synchronize.side_effect": lambda: happened.append(f"host waits for event {number}")}
        )

    def wait_stream(self, other: Stream) -> None:
        happened.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def training() -> Iterator[Stream]:
    happened.clear()
    here = Stream("training")

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        happened.append(f"in {stream.name}")
        yield
        happened.append(f"out of {stream.name}")

    def kept(tensor: Tensor, stream: Stream) -> None:
        happened.append(f"kept for {stream.name}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda device: Stream()))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", inside))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda device: here))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", kept))
        yield here


def test_a_batch_is_copied_before_the_computation_on_those_before_it_is_waited_for(
    training: Stream,
) -> None:
    source = table(40)
    plan = BatchPlan(samples=40, global_batch_size=8, accumulation_steps=1, steps=5, seed=0)
    tuning = TuningConfig(num_workers=0, pin_memory=False, non_blocking=False, copy_stream=True)
    tuning.channels_last = False
    loader = loader_of(source, plan.micro_batches(), tuning, "cpu")
    assert not loader.copies_beside, "there is no stream on the CPU"
    loader.copies_beside = True
    real = loader._place

    def place(tensor: Tensor) -> Tensor:
        happened.append("copy")
        return real(tensor)

    loader._place = place  # type: ignore[method-assign]
    for number, batch in enumerate(loader):
        happened.append(f"compute {number}")
        assert torch.equal(batch.inputs, source.inputs[torch.from_numpy(batch.micro_batch.indices)])
    sent = [
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
        expected += (
            [f"host waits for event {number - BATCHES_AHEAD}"] if number >= BATCHES_AHEAD else []
        )
        expected += [*sent, f"compute {number}"]
    assert happened == expected
