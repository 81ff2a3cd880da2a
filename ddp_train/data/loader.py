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

from ddp_train.config.schema import TuningConfig
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.copy_stream import CopyStream
from ddp_train.data.datasets import ArraySource, BatchSource, folder_of
from ddp_train.data.prefetch import GpuDecoder, ThreadedDecoder
from ddp_train.errors import LaunchError
from ddp_train.linux import end_loader_with_parent
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import ignore_signals
from ddp_train.tensor_tree import map_tensors


@dataclass(slots=True)
class Batch:
    """The samples of one micro-batch. inputs: a tensor [n, ...], or a list, tuple or dict of them; targets: [n]."""

    inputs: Any
    targets: Tensor
    micro_batch: MicroBatch

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(map_tensors(change, self.inputs), change(self.targets), self.micro_batch)

    def pin_memory(self) -> Batch:
        """Called by the DataLoader's pin_memory thread."""
        return self.map(Tensor.pin_memory)


class _Batches(Dataset):
    """A dataset whose index is a micro-batch: the DataLoader's worker processes need no epoch and keep no state."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def __getitem__(self, micro_batch: MicroBatch) -> Batch | LaunchError:
        try:
            return Batch(*self.source.get_batch(micro_batch.indices, micro_batch.epoch), micro_batch)
        except LaunchError as error:  # as a value: the DataLoader would wrap it into text and drop its remedy
            return error


def _enter_worker(worker: int) -> None:
    """Called first in each loader process."""
    end_loader_with_parent(worker)
    ignore_signals()


class _Noted:
    """Shares, noted as they are handed to loader processes."""

    def __init__(self, micro_batches: Iterable[MicroBatch], handed_out: deque[MicroBatch]) -> None:
        self.micro_batches, self.handed_out = micro_batches, handed_out

    def __iter__(self) -> Iterator[MicroBatch]:
        self.handed_out.clear()
        for micro_batch in self.micro_batches:
            self.handed_out.append(micro_batch)
            yield micro_batch


class _Resident:
    """Batches cut out of a data set that is held where it is needed: no process, no queue, no copy from the host.

    Many micro-batches are fetched as one, so that the dozen operations of a fetch are shared by many small batches.
    """

    def __init__(
        self, source: ArraySource, micro_batches: Iterable[MicroBatch], place: Callable[[Tensor], Tensor]
    ) -> None:
        self.source, self.micro_batches, self.place = source, micro_batches, place
        at_once = 2**26 if source.inputs.is_cuda else 2**19  # bytes; on CPU they stay in a core's cache
        self.samples_at_once = at_once // max(1, 4 * source.inputs[0].numel())

    def __iter__(self) -> Iterator[Batch]:
        for group in self._groups():
            indices = np.concatenate([micro_batch.indices for micro_batch in group])
            inputs, targets = map(self.place, self.source.get_batch(indices, group[0].epoch))
            sizes = [len(micro_batch.indices) for micro_batch in group]
            yield from map(Batch, inputs.split(sizes), targets.split(sizes), group)

    def _groups(self) -> Iterator[list[MicroBatch]]:
        group, samples = [], 0
        for micro_batch in self.micro_batches:
            samples += len(micro_batch.indices)
            if group and (samples > self.samples_at_once or micro_batch.epoch != group[0].epoch):
                yield group
                group, samples = [], len(micro_batch.indices)
            group.append(micro_batch)
        if group:
            yield group


class _Ahead:
    """Batches that threads of this process prepare: what a DataLoader is for loader processes."""

    def __init__(self, prepared: ThreadedDecoder) -> None:
        self.prepared = prepared

    def __iter__(self) -> Iterator[Batch]:
        for micro_batch, crops, labels in self.prepared:
            yield Batch(crops, labels, micro_batch)


class Loader:
    """Batches of the given micro-batches in order: on the device, in the run's precision and memory format.

    Iterated again it starts over. Training makes one pass over the shares of the whole run, so that its loader
    processes live through all epochs and fetch across their borders. Iterating raises the DataError of a source.
    """

    def __init__(
        self,
        source: BatchSource,
        micro_batches: Iterable[MicroBatch],
        tuning: TuningConfig,
        device: str,
        status: RankStatus,
        phases: str = "",
        resident: bool = False,
    ) -> None:
        """phases: what stands before the names of its phases, data and forward. resident: the data set, one that is
        held in memory, is held on the device."""
        self.device, self.tuning, self.status, self.resident = torch.device(device), tuning, status, resident
        self.dtype = torch.float64 if tuning.precision == "fp64" else None
        self.data, self.forward, self.end = phases + "data", phases + "forward", phases + "end"
        self.fetching: deque[MicroBatch] = deque()
        """What loader processes are working on."""
        self.folder = folder_of(source)
        decoded_there = self.folder is not None and self.folder.decode == "gpu"
        self.beside = bool(tuning.copy_stream) and self.device.type == "cuda" and not resident and not decoded_there
        """Whether batches are copied while the GPU computes."""
        self.batches: Iterable[Batch | LaunchError]
        if resident:
            assert isinstance(source, ArraySource), "config.check lets no other data set be resident"
            self.batches = _Resident(source.to(self.device, bool(tuning.channels_last)), micro_batches, self._place)
        else:
            self.batches = self._from_host(source, micro_batches, tuning)

    def _from_host(
        self, source: BatchSource, micro_batches: Iterable[MicroBatch], tuning: TuningConfig
    ) -> Iterable[Batch | LaunchError]:
        workers = int(tuning.num_workers)
        pinned = bool(tuning.pin_memory) and self.device.type == "cuda"
        if self.folder and self.folder.decode == "gpu":
            return _Ahead(GpuDecoder(self.folder, micro_batches, max(1, workers), tuning.prefetch_factor, self.device))
        if self.folder and self.folder.decode == "threads" and workers:
            return _Ahead(ThreadedDecoder(self.folder, micro_batches, workers, tuning.prefetch_factor, pinned))
        return DataLoader(
            _Batches(source),
            batch_size=None,  # an item is a batch already
            sampler=_Noted(micro_batches, self.fetching) if workers else micro_batches,
            num_workers=workers,
            prefetch_factor=tuning.prefetch_factor if workers else None,
            persistent_workers=tuning.persistent_workers and workers > 0,
            pin_memory=pinned,
            generator=torch.Generator(),  # else its iterator draws from the one that a step's dropout was seeded in
            worker_init_fn=_enter_worker,
        )

    def __iter__(self) -> Iterator[Batch]:
        status = self.status
        copies = CopyStream(self.device) if self.beside else None
        status.phase, status.fetching = self.data, self.fetching
        for batch in self.batches:
            if self.fetching:
                self.fetching.popleft()
            if isinstance(batch, LaunchError):
                try:
                    raise batch
                finally:
                    del batch  # it would keep this frame, and both the loader processes, until some later collection
            status.batches += 1
            status.phase = self.forward  # from here on it is the device that one waits for
            if copies:
                inputs, targets = copies.place([batch.inputs, batch.targets], self._place)
                placed = Batch(inputs, targets, batch.micro_batch)
            else:
                placed = batch if self.resident else batch.map(self._place)
            if self.folder:
                dtype = self.dtype or torch.float32
                placed.inputs = self.folder.finish(
                    placed.inputs, batch.micro_batch.indices, batch.micro_batch.epoch, dtype
                )
            yield placed
            status.phase, status.fetching = self.data, self.fetching
        status.phase = self.end

    def _place(self, tensor: Tensor) -> Tensor:
        placed = tensor.to(self.device, non_blocking=bool(self.tuning.non_blocking))
        if self.dtype and placed.is_floating_point():
            placed = placed.to(self.dtype)
        if self.tuning.channels_last and placed.ndim == 4:
            placed = placed.contiguous(memory_format=torch.channels_last)
        return placed
