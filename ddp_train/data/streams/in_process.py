"""Batches that the training process reads itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.streams.batch_stream import BatchReader
from ddp_train.data.streams.placement import BatchPlacement


class InProcessStream:
    """Reads each batch when it is asked for: no process, no queue."""

    in_flight = ()

    def __init__(
        self,
        reader: BatchReader,
        micro_batches: Iterable[MicroBatch],
        placement: BatchPlacement,
        pin_memory: bool,
    ) -> None:
        self.reader = reader
        self.micro_batches = micro_batches
        self.placement = placement
        self.pin_memory = pin_memory

    def __iter__(self) -> Iterator[Batch]:
        for micro_batch in self.micro_batches:
            batch = self.reader.read(micro_batch)
            yield batch.pin_memory() if self.pin_memory else batch

    def place(self, batch: Batch) -> Batch:
        return self.placement(batch)

    def close(self) -> None:
        """Nothing is open."""
