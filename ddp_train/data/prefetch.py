"""Batches of an image folder that threads of the rank itself prepare ahead: no loader processes, nothing is copied.

Reading a file, decoding a JPEG and resizing release Python's lock. What is left in Python competes with training for
it: see docs/data.md.
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
"""The most images that one thread takes at once: all threads work on one batch, and few batches are in memory."""
Result = Callable[[], Tensor]
"""Waits for the crops of a micro-batch and returns them. Raises what their threads raised."""


class ThreadedDecoder:
    """(share, crops, labels) of each micro-batch, in order; iterated again it starts over. The threads end with it."""

    def __init__(
        self, source: FolderSource, micro_batches: Iterable[MicroBatch], threads: int, batches_ahead: int, pinned: bool
    ) -> None:
        """pinned: the crops lie in page-locked memory."""
        self.source, self.micro_batches, self.threads = source, micro_batches, threads
        self.batches_ahead, self.pinned = batches_ahead, pinned

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
        """What starts the work on a micro-batch. stack: where its threads are left to be ended."""
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
    """The same with crops that the device decoded: threads read the files, one more feeds the device."""

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
            return lambda: self._handed_over(crops.result())

        return start

    def _crops(self, parts: list[Future[list[np.ndarray]]], micro_batch: MicroBatch) -> Tensor:
        """In a thread and a stream of its own, beside training."""
        files = [file for part in parts for file in part.result()]
        if self.stream is None:
            return self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            crops = self.source.crops_on(self.device, files, micro_batch.indices, micro_batch.epoch)
        # torchvision decodes in a third stream, which does not wait for this one to have read what it overwrites.
        self.stream.synchronize()
        return crops

    def _handed_over(self, crops: Tensor) -> Tensor:
        """The memory stays the crops' until training's stream has used them."""
        if self.stream is not None:
            crops.record_stream(torch.cuda.current_stream(self.device))
        return crops


def _filled(crops: Tensor, parts: list[Future[None]]) -> Tensor:
    """The crops, once all their parts are written."""
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
