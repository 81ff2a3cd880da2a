"""Batches of an image folder that the GPU decodes: threads read the files ahead, one more feeds the
device.

No loader process is involved. Reading a file releases Python's lock. docs/benchmarks/jpeg.md has
the measurements.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.image_folder import FolderSource, require_decoder

CHUNK = 16
"""The most files that one thread reads at once: all threads work on one batch, so that few batches
are in memory."""
PendingCrops = Callable[[], Tensor]
"""Waits for the crops of a micro-batch and returns them. Raises what their threads raised."""


class GpuDecoder:
    """(micro-batch, crops on the device, labels) in order; iterated again it starts over. Its
    threads end with it."""

    def __init__(
        self,
        source: FolderSource,
        micro_batches: Iterable[MicroBatch],
        threads: int,
        batches_ahead: int,
        device: torch.device,
    ) -> None:
        """threads: that read files. batches_ahead: micro-batches that are prepared while the model
        computes."""
        self.source = source
        self.micro_batches = micro_batches
        self.threads = threads
        self.batches_ahead = batches_ahead
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[tuple[MicroBatch, Tensor, Tensor]]:
        """Raises ConfigError if torchvision cannot decode on the device, DataError if a file cannot
        be decoded."""
        require_decoder(self.device)
        pending: deque[tuple[MicroBatch, PendingCrops]] = deque()
        with contextlib.ExitStack() as stack:
            readers = _pool(stack, self.threads, "read")
            feeder = _pool(stack, 1, "decode")
            for micro_batch in self.micro_batches:
                pending.append((micro_batch, self._start(micro_batch, readers, feeder)))
                if len(pending) > self.batches_ahead:
                    yield self._next(pending)
            while pending:
                yield self._next(pending)

    def _start(
        self, micro_batch: MicroBatch, readers: ThreadPoolExecutor, feeder: ThreadPoolExecutor
    ) -> PendingCrops:
        """Queues the reading and decoding of a micro-batch."""
        indices = micro_batch.indices
        files = [
            readers.submit(self.source.read, indices[rows])
            for rows in _chunks(len(indices), self.threads)
        ]
        crops = feeder.submit(self._decode, files, micro_batch)
        return lambda: self._hand_over(crops.result())

    def _next(
        self, pending: deque[tuple[MicroBatch, PendingCrops]]
    ) -> tuple[MicroBatch, Tensor, Tensor]:
        micro_batch, crops = pending.popleft()
        return micro_batch, crops(), self.source.targets[torch.from_numpy(micro_batch.indices)]

    def _decode(self, reads: list[Future[list[np.ndarray]]], micro_batch: MicroBatch) -> Tensor:
        """In a thread and a stream of its own, beside training."""
        files = [file for read in reads for file in read.result()]
        if self.stream is None:
            return self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            crops = self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)
        # torchvision decodes in a third stream, which would overwrite buffers that this one has not
        # read yet.
        self.stream.synchronize()
        return crops

    def _hand_over(self, crops: Tensor) -> Tensor:
        """The memory stays the crops' until training's stream has used them."""
        if self.stream is not None:
            crops.record_stream(torch.cuda.current_stream(self.device))
        return crops


def _pool(stack: contextlib.ExitStack, threads: int, name: str) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, name)
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def _chunks(count: int, threads: int) -> list[slice]:
    each = max(1, min(CHUNK, -(-count // threads)))
    return [slice(first, first + each) for first in range(0, count, each)]
