"""Batches that loader processes read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.dataset_content import LargeData, content_of
from ddp_train.data.dataset_state import AttributeWatch
from ddp_train.data.streams.batch_stream import BatchReader
from ddp_train.data.streams.loader_processes import LoaderProcesses
from ddp_train.data.streams.placement import BatchPlacement
from ddp_train.errors import DataError, LaunchError
from ddp_train.tensor_tree import map_tensors
from ddp_train.text import first_line


class WorkerStream:
    """Reads batches ahead in the processes of a DataLoader.

    The DataLoader's index is a micro-batch, so that its processes need no epoch and keep no state:
    they live through all epochs and prefetch across their ends.
    """

    def __init__(
        self,
        reader: BatchReader,
        micro_batches: Iterable[MicroBatch],
        placement: BatchPlacement,
        num_workers: int,
        worker_init_fn: Callable[[int], Any] | None = None,
        **data_loader_options: Any,
    ) -> None:
        """Starts no process yet.

        num_workers: loader processes, at least one.
        worker_init_fn: called with the number of each, where it begins.
        data_loader_options: further arguments of the DataLoader.
        """
        self.dataset = getattr(reader.source, "dataset", None)
        self.collate = getattr(reader.source, "collate", None)
        self.content = ""
        """A digest of the data set as living loader processes copied it; "" if unknown."""
        self.large_data = LargeData()
        self.placement = placement
        self.in_flight: deque[MicroBatch] = deque()
        self.processes = LoaderProcesses(num_workers, worker_init_fn)
        self.data_loader: DataLoader[Any] = DataLoader(
            _MicroBatchDataset(reader),
            batch_size=None,  # an item is a batch already
            sampler=_HandedOut(micro_batches, self.in_flight),
            num_workers=num_workers,
            # Else its iterator draws from the generator that a step's dropout was seeded in.
            generator=torch.Generator(),
            worker_init_fn=self.processes.enter,
            **data_loader_options,
        )

    def __iter__(self) -> Iterator[Batch]:
        """See BatchStream.

        Raises DataError too if the user's code changes the data set while it is read ahead.
        """
        watch = None
        if self.dataset is not None:
            self._renew_copies()
            watch = AttributeWatch(self.dataset)
        for batch in self.processes.iterate(self.data_loader):
            self.in_flight.popleft()
            if watch:
                watch.check(is_last=not self.in_flight)
            if isinstance(batch, LaunchError):
                try:
                    raise batch
                finally:
                    # The error would keep this frame, and both of them the loader processes, until
                    # some later collection.
                    del batch
            yield batch

    def _renew_copies(self) -> None:
        """End the processes of the last pass unless the data set is what they have copied."""
        if not self.data_loader.persistent_workers:
            return
        content = content_of((self.dataset, self.collate), self.large_data)
        if not content or content != self.content:
            self.close()
        self.content = content

    def place(self, batch: Batch) -> Batch:
        return self.placement(batch)

    def close(self) -> None:
        """Ends loader processes that wait for a next pass.

        If they are left to the garbage collector it closes their queue before they hear of their
        end, and torch waits for each in vain, ten seconds.
        """
        self.processes.release(self.data_loader)


class _MicroBatchDataset(Dataset):
    """A dataset whose index is a micro-batch, and whose item is its batch."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader
        self.was_sent = False
        """A batch of this process was seen to be one that can be sent."""

    def __getitem__(self, micro_batch: MicroBatch) -> Batch | LaunchError:
        try:
            batch = self.reader.read(micro_batch)
            if not self.was_sent:
                check_can_be_sent(batch.data)
                self.was_sent = True
            return batch
        except LaunchError as error:
            # As a value: the DataLoader would wrap it into text and drop its remedy.
            return error


def check_can_be_sent(data: Any) -> None:
    """Raise DataError for a batch that a loader process cannot send.

    The thread that sends it would print the reason, and whoever waits for it would wait for ever.
    """
    try:
        ForkingPickler.dumps(map_tensors(lambda _: None, data))
    except Exception as error:
        raise DataError(
            f"a batch cannot be sent from a loader process: {first_line(error)}",
            "define the classes of its objects at the top level of a module, or use num_workers=0",
        ) from error


class _HandedOut:
    """Micro-batches, each of which is noted when it is handed to a loader process."""

    def __init__(self, micro_batches: Iterable[MicroBatch], in_flight: deque[MicroBatch]) -> None:
        self.micro_batches = micro_batches
        self.in_flight = in_flight

    def __iter__(self) -> Iterator[MicroBatch]:
        self.in_flight.clear()
        for micro_batch in self.micro_batches:
            self.in_flight.append(micro_batch)
            yield micro_batch
