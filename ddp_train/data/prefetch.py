"""Prefetches batches of an image folder in threads of the rank, without loader processes or copies between processes.

Reading a file, decoding a JPEG and resizing release Python's lock (GIL). The Python code around them competes with
training for it: see docs/data.md.
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
"""The most images in one task: small, so that all threads work on one batch and few batches are in memory."""
Result = Callable[[], Tensor]
"""Waits for the crops of a micro-batch and returns them. Raises the exceptions of the threads."""


class ThreadedDecoder:
    """Iterates over (micro-batch, crops, labels), in order; the crops are decoded ahead in threads.

    Each iteration starts at the first micro-batch, with threads of its own.
    """

    def __init__(
        self, source: FolderSource, micro_batches: Iterable[MicroBatch], threads: int, batches_ahead: int, pinned: bool
    ) -> None:
        """batches_ahead: how many batches are prepared ahead. pinned: whether the crops are in page-locked memory."""
        self.source = source
        self.micro_batches = micro_batches
        self.threads = threads
        self.batches_ahead = batches_ahead
        self.pinned = pinned

    def __iter__(self) -> Iterator[tuple[MicroBatch, Tensor, Tensor]]:
        pending: deque[tuple[MicroBatch, Result]] = deque()
        with contextlib.ExitStack() as stack:
            start = self._starter(stack)
            for micro_batch in self.micro_batches:
                pending.append((micro_batch, start(micro_batch)))
                if len(pending) > self.batches_ahead:
                    yield self._next(pending)
            while pending:
                yield self._next(pending)

    def _next(self, pending: deque[tuple[MicroBatch, Result]]) -> tuple[MicroBatch, Tensor, Tensor]:
        micro_batch, result = pending.popleft()
        return micro_batch, result(), self.source.targets[torch.from_numpy(micro_batch.indices)]

    def _starter(self, stack: contextlib.ExitStack) -> Callable[[MicroBatch], Result]:
        """A function that starts the work on a micro-batch. stack: ends its threads."""
        pool = _pool(stack, self.threads, "decode")

        def start(micro_batch: MicroBatch) -> Result:
            crops = self.source.empty(len(micro_batch.indices), self.pinned)
            parts = [
                pool.submit(self.source.fill, crops[rows], micro_batch.indices[rows], micro_batch.epoch)
                for rows in _chunks(len(micro_batch.indices), self.threads)
            ]
            return lambda: _filled(crops, parts)

        return start


class GpuDecoder(ThreadedDecoder):
    """Like ThreadedDecoder, with crops that the device decodes: the threads read files, and one more thread decodes."""

    def __init__(
        self,
        source: FolderSource,
        micro_batches: Iterable[MicroBatch],
        threads: int,
        batches_ahead: int,
        device: torch.device,
    ) -> None:
        super().__init__(source, micro_batches, threads, batches_ahead, pinned=False)
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _starter(self, stack: contextlib.ExitStack) -> Callable[[MicroBatch], Result]:
        require_decoder(self.device)
        readers, feeder = _pool(stack, self.threads, "read"), _pool(stack, 1, "decode")

        def start(micro_batch: MicroBatch) -> Result:
            parts = [
                readers.submit(self.source.read, micro_batch.indices[rows])
                for rows in _chunks(len(micro_batch.indices), self.threads)
            ]
            crops = feeder.submit(self._crops, parts, micro_batch)
            return lambda: self._for_training(crops.result())

        return start

    def _crops(self, parts: list[Future[list[np.ndarray]]], micro_batch: MicroBatch) -> Tensor:
        """Decodes a micro-batch in the decoding thread and its stream, beside training."""
        files = [file for part in parts for file in part.result()]
        if self.stream is None:
            return self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            crops = self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)
        # torchvision decodes in a third stream, which would overwrite buffers that this one has not read yet.
        self.stream.synchronize()
        return crops

    def _for_training(self, crops: Tensor) -> Tensor:
        """Keeps the memory of the crops from being reused before training's stream has read them."""
        if self.stream is not None:
            crops.record_stream(torch.cuda.current_stream(self.device))
        return crops


def _filled(crops: Tensor, parts: list[Future[None]]) -> Tensor:
    """Waits until all parts are written. Returns the crops."""
    for part in parts:
        part.result()
    return crops


def _pool(stack: contextlib.ExitStack, threads: int, name: str) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, name)
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def _chunks(count: int, threads: int) -> list[slice]:
    each = max(1, min(CHUNK, -(-count // threads)))
    return [slice(first, first + each) for first in range(0, count, each)]
