"""Batches that are copied beside the computation, played on the CPU; tests/end_to_end/test_gpu.py
has real streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.streams.batch_stream import BatchReader
from ddp_train.data.streams.in_process import InProcessStream
from ddp_train.data.streams.placement import BATCHES_AHEAD, CopyStream, Placement
from ddp_train.errors import DataError
from ddp_train.tensor_tree import named_tensors, tensors
from tests.support.batch_types import Forgetful, Unknown, batch_of
from tests.support.jobs import table

META = torch.device("meta")
CPU = torch.device("cpu")
SHARE = MicroBatch(0, 0, np.arange(2), 2, 1.0, True)

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


def placed(data: Any, device: torch.device = META, dtype: torch.dtype | None = None) -> Any:
    return Placement(device, dtype)(Batch(data, SHARE)).data


def test_batches_of_any_type_are_moved() -> None:
    batch = batch_of(2)
    moved = placed(batch)
    left = [path for path, tensor in named_tensors(moved) if tensor.device != META]
    assert left == ["['packed'][1]"], "its lengths, which torch wants on the host"
    assert [type(part) for part in moved.values()] == [type(part) for part in batch.values()]
    assert {tensor.device for tensor in tensors(batch)} == {CPU}, "the host's batch is as it was"
    assert moved["attributes"].x is moved["attributes"]["x"]
    assert moved["graphs"].store.owner() is moved["graphs"]
    assert moved["encoding"].words is batch["encoding"].words
    assert (moved["names"], moved["array"]) == (["a", "a"], batch["array"])


def test_what_stays_on_the_host_is_kept_for_no_stream(training: Stream) -> None:
    """record_stream is an error for it."""
    CopyStream(Placement(META))(Batch({"packed": batch_of(2)["packed"]}, SHARE))
    assert events.count("kept for training") == 1  # the rows, and not their lengths


def test_batches_of_any_type_get_the_number_type() -> None:
    moved = placed(batch_of(2), CPU, torch.float64)
    assert {tensor.dtype for tensor in tensors(moved)} == {torch.float64, torch.int64}


def test_an_object_that_nobody_can_move_is_refused_on_the_cpu() -> None:
    with pytest.raises(DataError, match=r"has a Unknown, whose tensors \(`Unknown.parts\['x'\]"):
        placed({"a": [Unknown(torch.ones(2))]}, CPU)


def test_what_an_object_leaves_on_the_host_is_named_once(caplog: Any) -> None:
    for device in (CPU, META):
        caplog.clear()
        placement = Placement(device)
        for _ in range(2):
            placement(Batch(Forgetful(torch.ones(2), torch.ones(2)), SHARE))
        assert caplog.text.count("leaves `Forgetful.y` on the CPU") == 1
    caplog.clear()
    placed(batch_of(2), CPU)
    assert not caplog.text


def test_batches_of_any_type_are_pinned() -> None:
    pinned: list[Tensor] = []
    with mock.patch.object(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor):
        batch = Batch(batch_of(2), SHARE).pin_memory()
    left = set(map(id, tensors(batch.data))) - set(map(id, pinned))
    assert left == {id(batch.data["packed"].batch_sizes)}, "torch keeps it as it is"
