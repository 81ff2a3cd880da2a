"""Batches of an image folder that a GPU decodes.

Threads read the files ahead, and one more feeds the device. No loader process is involved: reading
a file releases Python's lock. docs/inside/benchmarks/jpeg.md has the measurements.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.image_folder.decoder import require_decoder
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.streams.placement import BatchPlacement

CHUNK = 16
"""The most files that one thread reads at once: all threads work on one batch, so that few batches
are in memory."""


class GpuDecodedStream:
    """Decodes the JPEG files of an image folder on the device. Its threads end with a pass."""

    in_flight = ()

    def __init__(
        self,
        source: FolderSource,
        micro_batches: Iterable[MicroBatch],
        placement: BatchPlacement,
        device: torch.device,
        threads: int,
        batches_ahead: int,
    ) -> None:
        """Starts no thread yet.

        threads: those that read files.
        batches_ahead: micro-batches that are prepared while the model computes.
        """
        self.source = source
        self.micro_batches = micro_batches
        self.placement = placement
        self.device = device
        self.threads = threads
        self.batches_ahead = batches_ahead
        self.cuda_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Batch]:
        """Decode the batches in order.

        Raises ConfigError if torchvision cannot decode on the device, DataError if a file cannot be
        decoded.
        """
        require_decoder(self.device)
        pending: deque[tuple[MicroBatch, Future[Tensor]]] = deque()
        with contextlib.ExitStack() as stack:
            readers = _thread_pool(stack, self.threads, "read")
            feeder = _thread_pool(stack, 1, "decode")
            for micro_batch in self.micro_batches:
                files = self._read_files(micro_batch, readers)
                crops = feeder.submit(self._decode, files, micro_batch)
                pending.append((micro_batch, crops))
                if len(pending) > self.batches_ahead:
                    yield self._finish(*pending.popleft())
            while pending:
                yield self._finish(*pending.popleft())

    def place(self, batch: Batch) -> Batch:
        return self.placement(batch)

    def close(self) -> None:
        """Nothing is open between two passes."""

    def _read_files(
        self, micro_batch: MicroBatch, readers: ThreadPoolExecutor
    ) -> list[Future[list[np.ndarray]]]:
        """Queues the reading of a micro-batch's files, some for each thread."""
        count = len(micro_batch.indices)
        an_even_part = -(-count // self.threads)
        size = max(1, min(CHUNK, an_even_part))
        return [
            readers.submit(self.source.read, micro_batch.indices[start : start + size])
            for start in range(0, count, size)
        ]

    def _decode(self, reads: list[Future[list[np.ndarray]]], micro_batch: MicroBatch) -> Tensor:
        """Decodes a micro-batch, in a thread and a CUDA stream of its own, beside training."""
        files = [file for read in reads for file in read.result()]
        if self.cuda_stream is None:
            return self._crops(files, micro_batch)
        with torch.cuda.device(self.device), torch.cuda.stream(self.cuda_stream):
            crops = self._crops(files, micro_batch)
        # torchvision decodes in a third stream, which would overwrite buffers that this one has not
        # read yet.
        self.cuda_stream.synchronize()
        return crops

    def _crops(self, files: list[np.ndarray], micro_batch: MicroBatch) -> Tensor:
        return self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)

    def _finish(self, micro_batch: MicroBatch, pending_crops: Future[Tensor]) -> Batch:
        """Waits for the crops of a micro-batch. Raises what the threads raised."""
        crops = pending_crops.result()
        if self.cuda_stream is not None:
            # Their memory must not be reused before training has read them.
            crops.record_stream(torch.cuda.current_stream(self.device))
        labels = self.source.targets[torch.from_numpy(micro_batch.indices)]
        return Batch((crops, labels), micro_batch)


def _thread_pool(stack: contextlib.ExitStack, threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that ends, without its queued work, with the stack."""
    pool = ThreadPoolExecutor(threads, name)
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    return pool
