"""The protocol of all ways of fetching batches, and the reader of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import BatchSource, place_of_stream
from ddp_train.data.sample_tensors import is_pair
from ddp_train.errors import DataError
from ddp_train.text import counted


class BatchStream(Protocol):
    """Batches of given micro-batches, in their order. Iterated again it starts over.

    Iterating gives a batch as soon as the host has it, `place` brings it to the device: whoever
    iterates sees which of the two takes long.
    """

    @property
    def in_flight(self) -> Sequence[MicroBatch]:
        """Micro-batches that loader processes are working on, the next one first."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Raises the DataError of the data set."""
        ...

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, in the run's number type and memory format."""
        ...

    def close(self) -> None:
        """Ends loader processes that wait for a next pass."""
        ...


class BatchReader:
    """Reads the batch of a micro-batch from a data set, in whatever process it is called."""

    def __init__(self, source: BatchSource, one_target_per_sample: bool) -> None:
        """Keeps the data set.

        source: the data set.
        one_target_per_sample: batches must have a target for each of their samples.
        """
        self.source = source
        self.one_target_per_sample = one_target_per_sample

    def read(self, micro_batch: MicroBatch) -> Batch:
        """Reads one batch. Raises DataError if its number of targets is not that of its samples."""
        data = self.source.get_batch(micro_batch.indices, micro_batch.epoch)
        if self.one_target_per_sample:
            _check_number_of_targets(data, len(micro_batch.indices))
        stream_place = None
        if micro_batch.epoch is not None:  # what is scored is never gone on with
            stream_place = place_of_stream(self.source)
        return Batch(data, micro_batch, stream_place)


def _check_number_of_targets(data: Any, samples: int) -> None:
    """Raises DataError if a `collate_fn` dropped samples, or made more of them."""
    if not is_pair(data):
        return
    targets = data[1]
    if isinstance(targets, Tensor) and targets.ndim and len(targets) != samples:
        raise DataError(
            f"a batch of {counted(samples, 'sample')} has {counted(len(targets), 'target')}",
            "let collate_fn return one target for each sample, since the loss is averaged over"
            " the samples. To leave samples out, do so in the data set; for several targets in a"
            " sample, write a task of your own that counts its units",
        )
