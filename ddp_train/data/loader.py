"""From micro-batches to batches on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.copy_stream import CopyStream
from ddp_train.data.datasets import ArraySource, BatchSource, HeldSource
from ddp_train.data.image_folder import FolderSource
from ddp_train.data.loader_processes import LoaderProcesses
from ddp_train.data.mix import Mix
from ddp_train.data.prefetch import GpuDecoder
from ddp_train.data.rows import normalised_rows_by
from ddp_train.errors import DataError, LaunchError
from ddp_train.kernels import interface
from ddp_train.tensor_tree import map_tensors
from ddp_train.text import counted


@dataclass(slots=True)
class Batch:
    """The samples of one micro-batch."""

    data: Any
    """(inputs, targets), tensors [n, ...]; of your own data sets whatever they gave: nested dicts,
    lists and tuples."""
    micro_batch: MicroBatch

    @property
    def inputs(self) -> Any:
        """Of a pair."""
        return self.data[0]

    @property
    def targets(self) -> Tensor:
        """Of a pair."""
        return self.data[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(map_tensors(change, self.data), self.micro_batch)

    def pin_memory(self) -> Batch:
        """Called by the DataLoader's pin_memory thread."""
        return self.map(Tensor.pin_memory)


class _Batches(Dataset):
    """A dataset whose index is a micro-batch: the DataLoader's worker processes need no epoch and
    keep no state."""

    def __init__(self, source: BatchSource, a_target_each: bool) -> None:
        self.source = source
        self.a_target_each = a_target_each

    def __getitem__(self, micro_batch: MicroBatch) -> Batch | LaunchError:
        try:
            data = self.source.get_batch(micro_batch.indices, micro_batch.epoch)
            if self.a_target_each:
                _check_number(data, len(micro_batch.indices))
            return Batch(data, micro_batch)
        except (
            LaunchError
        ) as error:  # as a value: the DataLoader would wrap it into text and drop its remedy
            return error


def _check_number(data: Any, samples: int) -> None:
    """Raises DataError if a `collate_fn` has dropped samples, or made more of them."""
    targets = data[1] if isinstance(data, tuple | list) and len(data) == 2 else None
    if isinstance(targets, Tensor) and targets.ndim and len(targets) != samples:
        raise DataError(
            f"a batch of {counted(samples, 'sample')} has {counted(len(targets), 'target')}",
            "let collate_fn keep each sample once, since the mean of the loss is over as many as"
            " the plan says; leave samples out in the data set itself, or write a task of your own"
            " that counts its units",
        )


class _Noted:
    """Shares, noted as they are handed to loader processes."""

    def __init__(self, micro_batches: Iterable[MicroBatch], handed_out: deque[MicroBatch]) -> None:
        self.micro_batches = micro_batches
        self.handed_out = handed_out

    def __iter__(self) -> Iterator[MicroBatch]:
        self.handed_out.clear()
        for micro_batch in self.micro_batches:
            self.handed_out.append(micro_batch)
            yield micro_batch


class _Resident:
    """Batches cut out of a data set that is held where it is needed: no process, no queue, no copy
    from the host.

    Many micro-batches are fetched as one, so that the dozen operations of a fetch are shared by
    many small batches.
    """

    def __init__(
        self,
        source: HeldSource,
        micro_batches: Iterable[MicroBatch],
        place: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        self.source = source
        self.micro_batches = micro_batches
        self.place = place
        at_once = (
            2**26 if device.type == "cuda" else 2**19
        )  # bytes; on CPU they stay in a core's cache
        self.samples_at_once = at_once // max(1, source.sample_bytes)

    def __iter__(self) -> Iterator[Batch]:
        for group in self._groups():
            indices = np.concatenate([micro_batch.indices for micro_batch in group])
            inputs, targets = map(self.place, self.source.get_batch(indices, group[0].epoch))
            sizes = [len(micro_batch.indices) for micro_batch in group]
            yield from map(
                Batch, zip(inputs.split(sizes), targets.split(sizes), strict=True), group
            )

    def _groups(self) -> Iterator[list[MicroBatch]]:
        group = []
        samples = 0
        for micro_batch in self.micro_batches:
            samples += len(micro_batch.indices)
            if group and (samples > self.samples_at_once or micro_batch.epoch != group[0].epoch):
                yield group
                group = []
                samples = len(micro_batch.indices)
            group.append(micro_batch)
        if group:
            yield group


class _GpuDecoded:
    """Batches that a GpuDecoder prepares; iterated again it starts over."""

    def __init__(self, decoder: GpuDecoder) -> None:
        self.decoder = decoder

    def __iter__(self) -> Iterator[Batch]:
        for micro_batch, crops, labels in self.decoder:
            yield Batch((crops, labels), micro_batch)


@dataclass(frozen=True)
class LoaderOptions:
    """How batches come to the device; `tuning.*` has keys of the same names."""

    dtype: torch.dtype | None = None
    """Of floating-point inputs and targets; None leaves them as they are."""
    channels_last: bool = False
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    non_blocking: bool = False
    copy_stream: bool = False
    triton_kernels: bool = False
    a_target_each: bool = False
    """Whether a batch must have a target for each of its samples."""


class Loader:
    """Batches of the given micro-batches in order: on the device, in the run's precision and memory
    format.

    Iterated again it starts over. Training makes one pass over the micro-batches of the whole run,
    so that its loader processes live through all epochs and prefetch across their ends. Iterating
    raises the DataError of a source.
    """

    def __init__(
        self,
        source: BatchSource,
        micro_batches: Iterable[MicroBatch],
        device: str,
        options: LoaderOptions,
        resident: bool = False,
        mix: Mix | None = None,
    ) -> None:
        """resident: the data set, which must be a HeldSource, is held on the device. mix: what
        mixes the samples of a global batch with each other, on the device."""
        micro_batches = mix.with_partners(micro_batches) if mix else micro_batches
        self.mix = mix
        self.device = torch.device(device)
        self.options = options
        self.resident = resident
        self.in_flight: deque[MicroBatch] = deque()
        """The micro-batches that loader processes are working on, the next one first."""
        self.processes = LoaderProcesses(options.num_workers)
        self.on_fetched: Callable[[], None] = lambda: None
        """Is called when the host has a batch, before it is copied to the device."""
        self.folder = source if isinstance(source, FolderSource) else None
        decoded_on_gpu = self.folder is not None and self.folder.decode == "gpu"
        self.copies_beside = (
            options.copy_stream
            and self.device.type == "cuda"
            and not resident
            and not decoded_on_gpu
        )
        """Whether batches are copied while the GPU computes."""
        self.batches: Iterable[Batch | LaunchError]
        if resident:
            assert isinstance(source, HeldSource), (
                "config.validate lets no other data set be resident"
            )
            held = source.to(self.device, options.channels_last)
            if (
                options.triton_kernels
                and self.device.type == "cuda"
                and isinstance(held, ArraySource)
            ):
                held.normalised = normalised_rows_by(interface.load_fetch())
            self.batches = _Resident(held, micro_batches, self._place, self.device)
        elif self.folder is not None and decoded_on_gpu:
            readers = max(1, options.num_workers)
            decoder = GpuDecoder(
                self.folder, micro_batches, readers, options.prefetch_factor, self.device
            )
            self.batches = _GpuDecoded(decoder)
        else:
            self.batches = self._data_loader(source, micro_batches)

    def _data_loader(
        self, source: BatchSource, micro_batches: Iterable[MicroBatch]
    ) -> DataLoader[Any]:
        workers = self.options.num_workers
        return DataLoader(
            _Batches(source, self.options.a_target_each),
            batch_size=None,  # an item is a batch already
            sampler=_Noted(micro_batches, self.in_flight) if workers else micro_batches,
            num_workers=workers,
            prefetch_factor=self.options.prefetch_factor if workers else None,
            persistent_workers=self.options.persistent_workers and workers > 0,
            pin_memory=self.options.pin_memory and self.device.type == "cuda",
            # else its iterator draws from the one that a step's dropout was seeded in
            generator=torch.Generator(),
            worker_init_fn=self.processes.enter,
        )

    def __iter__(self) -> Iterator[Batch]:
        copies = CopyStream(self.device) if self.copies_beside else None
        for batch in (
            self.processes.first(self.batches)
            if isinstance(self.batches, DataLoader)
            else self.batches
        ):
            if self.in_flight:
                self.in_flight.popleft()
            if isinstance(batch, LaunchError):
                try:
                    raise batch
                finally:
                    # it would keep this frame, and both the loader processes, until some later
                    # collection
                    del batch
            self.on_fetched()
            if copies:
                placed = Batch(copies.place(batch.data, self._place), batch.micro_batch)
            else:
                placed = batch if self.resident else batch.map(self._place)
            if self.folder:
                micro_batch = batch.micro_batch
                dtype = self.options.dtype or torch.float32
                inputs = self.folder.finish(
                    placed.inputs, micro_batch.indices, micro_batch.epoch, dtype
                )
                placed = Batch((inputs, placed.targets), micro_batch)
            yield Batch(*self.mix(placed.data, placed.micro_batch)) if self.mix else placed

    def close(self) -> None:
        """Ends loader processes that wait for a next evaluation.

        If they are left to the garbage collector it closes their queue before they are told to end,
        and torch waits for each in vain, ten seconds.
        """
        self.batches = ()

    def _place(self, tensor: Tensor) -> Tensor:
        placed = tensor.to(self.device, non_blocking=self.options.non_blocking)
        if self.options.dtype and placed.is_floating_point():
            placed = placed.to(self.options.dtype)
        if self.options.channels_last and placed.ndim == 4:
            placed = placed.contiguous(memory_format=torch.channels_last)
        return placed
