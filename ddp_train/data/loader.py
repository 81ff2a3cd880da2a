"""Turns micro-batches into mixed batches on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import ArraySource, BatchSource, HeldSource, is_read_in_order
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.mix import Mix
from ddp_train.data.no_samples import batch_without_samples
from ddp_train.data.rows import normalised_rows_by
from ddp_train.data.streams.batch_stream import BatchReader, BatchStream
from ddp_train.data.streams.gpu_decoded import GpuDecodedStream
from ddp_train.data.streams.in_process import InProcessStream
from ddp_train.data.streams.placement import (
    BatchPlacement,
    CopyStream,
    FinishedPlacement,
    FinishingSource,
    Placement,
)
from ddp_train.data.streams.resident import ResidentStream
from ddp_train.data.streams.worker import WorkerStream
from ddp_train.kernels import interface


@dataclass(frozen=True)
class LoaderOptions:
    """The way of batches to the device; `tuning.*` has keys of the same names."""

    dtype: torch.dtype | None = None
    """Number type of floating-point inputs and targets; None leaves them as they are."""
    resident: bool = False
    """The data set, which must be a HeldSource, is held on the device."""
    one_target_per_sample: bool = False
    """A batch must have a target for each of its samples."""
    channels_last: bool = False
    num_workers: int = 0
    worker_init_fn: Callable[[int], Any] | None = None
    """Called with the number of each loader process, where it begins."""
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    non_blocking: bool = False
    copy_stream: bool = False
    triton_kernels: bool = False


class Loader:
    """Batches of the given micro-batches in order, on the device and mixed.

    They are in the run's number type and memory format.

    Iterated again it starts over. Training makes one pass over the micro-batches of the whole run.
    Iterating raises the DataError of a data set.
    """

    def __init__(
        self,
        source: BatchSource,
        micro_batches: Iterable[MicroBatch],
        device: str,
        options: LoaderOptions,
        mix: Mix | None = None,
        has_empty_batches: bool = False,
    ) -> None:
        """Prepares to fetch.

        source: the data set.
        micro_batches: which of its samples, iterable more than once for more than one pass.
        mix: mixes the samples of a global batch with each other, on the device.
        has_empty_batches: a micro-batch that does not count is a batch of the length 0; else it has
            the sample that stands in for it.
        """
        self.source = source
        self.has_empty_batches = has_empty_batches
        self.cuts_rows = options.resident or mix is not None
        """Batches are (inputs, targets) with a sample in each row."""
        wanted = mix.with_partners(micro_batches) if mix else micro_batches
        self.mix = mix
        self.stream = stream_of(source, wanted, torch.device(device), options)

    def __iter__(self) -> Iterator[Batch]:
        for fetched in self.stream:
            yield self.place(fetched)

    def place(self, fetched: Batch) -> Batch:
        """A batch of the stream on the device, mixed."""
        if fetched.micro_batch.num_real or not self.has_empty_batches:
            return self._place(fetched)
        if self.cuts_rows:
            return self._place(fetched).map(lambda tensor: tensor[:0])
        return self._without_samples(fetched.micro_batch)

    def _without_samples(self, micro_batch: MicroBatch) -> Batch:
        numbers = micro_batch.indices
        number = int(numbers[0])
        if is_read_in_order(self.source) and isinstance(self.stream, WorkerStream):
            number = 0  # any will do, and here all before it would be read
        data = batch_without_samples(self.source, number, micro_batch.epoch)
        empty = dataclasses.replace(micro_batch, indices=numbers[:0])
        return Batch(self.stream.place(Batch(data, empty)).data, micro_batch)

    def _place(self, fetched: Batch) -> Batch:
        placed = self.stream.place(fetched)
        if self.mix is None:
            return placed
        return Batch(*self.mix(placed.data, placed.micro_batch))

    def close(self) -> None:
        """Ends loader processes that wait for a next pass."""
        self.stream.close()


def stream_of(
    source: BatchSource,
    micro_batches: Iterable[MicroBatch],
    device: torch.device,
    options: LoaderOptions,
) -> BatchStream:
    """The source of batches: device memory, its JPEG decoder, loader processes or this one."""
    placement = Placement(device, options.dtype, options.channels_last, options.non_blocking)
    if options.resident:
        held = _hold(source, device, options)
        original = getattr(source, "dataset", None)
        return ResidentStream(held, micro_batches, placement, original)
    if isinstance(source, FolderSource) and source.decode == "gpu":
        finished = _finished(placement, source, options)
        threads = max(1, options.num_workers)
        return GpuDecodedStream(
            source, micro_batches, finished, device, threads, options.prefetch_factor
        )
    on_gpu = device.type == "cuda"
    copies = CopyStream(placement) if options.copy_stream and on_gpu else placement
    finished = _finished(copies, source, options)
    reader = BatchReader(source, options.one_target_per_sample)
    pin_memory = options.pin_memory and on_gpu
    if not options.num_workers:
        return InProcessStream(reader, micro_batches, finished, pin_memory)
    return WorkerStream(
        reader,
        micro_batches,
        finished,
        options.num_workers,
        options.worker_init_fn,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers,
        pin_memory=pin_memory,
    )


def _finished(
    placement: BatchPlacement, source: BatchSource, options: LoaderOptions
) -> BatchPlacement:
    """The placement, after which a source that does so finishes its inputs on the device."""
    if isinstance(source, FinishingSource):
        return FinishedPlacement(placement, source, options.dtype or torch.float32)
    return placement


def _hold(source: BatchSource, device: torch.device, options: LoaderOptions) -> HeldSource:
    """The data set on the device, where a Triton kernel fetches its images if it may."""
    assert isinstance(source, HeldSource), "config.validate lets no other data set be resident"
    held = source.to(device, options.channels_last)
    if options.triton_kernels and device.type == "cuda" and isinstance(held, ArraySource):
        held.fetch_normalised = normalised_rows_by(interface.load_fetch())
    return held
