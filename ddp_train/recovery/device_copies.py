"""Copies of tensors on a GPU, beside training.

The tensors change in the optimizer step alone. So their copies run while the next step computes its
forward and backward passes, on a stream of their own, and only its update waits for them. The mark
of a place is written by the GPU too, behind the copies: the host runs ahead of it.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

from ddp_train.errors import LaunchError
from ddp_train.recovery.kept_layout import Layout, Views
from ddp_train.resilience.kept_memory import Record


class MappedHost:
    """Numbers in registered memory of the host, which kernels write at their addresses there."""

    def __init__(self, address: int, typestr: str, count: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }


class LockedMemory:
    """Memory that stays in its place, so that a GPU can write to it."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Lock it. Raises LaunchError if it cannot be."""
        self.memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = int(_runtime().cudaHostRegister(self.address, len(memory), 0))
        if code:
            raise LaunchError(f"cudaHostRegister: error {code} for {len(memory):,} bytes")


def _runtime() -> Any:
    return torch.cuda.cudart()


@torch.no_grad()
def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of their shapes, with few kernels for each dtype."""
    for dtype in {tensor.dtype for tensor in sources}:
        places = [place for place, tensor in enumerate(sources) if tensor.dtype == dtype]
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            [targets[place] for place in places], [sources[place] for place in places]
        )


class StagedTensors:
    """Copies on a GPU of tensors that may change before the copy stream comes to read them.

    Those of the host, as the steps that RMSprop counts, take one transfer.
    """

    def __init__(self, tensors: list[Tensor], device: str) -> None:
        self.is_on_host = [not tensor.is_cuda for tensor in tensors]
        of_host, _ = self._divided(tensors)
        layout = Layout.of(of_host, common=(), ranks=1)
        self.sent = torch.empty(layout.sizes[0], dtype=torch.uint8, pin_memory=True)
        self.received = torch.empty(layout.sizes[0], dtype=torch.uint8, device=device)
        places = range(len(of_host))
        self.to_send = [Views(self.sent, layout).own(place) for place in places]
        arrived = iter([Views(self.received, layout).own(place) for place in places])
        self.copies = [
            next(arrived) if on_host else torch.empty_like(tensor)
            for tensor, on_host in zip(tensors, self.is_on_host, strict=True)
        ]
        """In the order of the tensors."""

    def copy(self, tensors: list[Tensor]) -> None:
        """Copy the tensors as they are now. The copy stream must have read the last copies."""
        of_host, of_device = self._divided(tensors)
        _, targets = self._divided(self.copies)
        copy_each(targets, of_device)
        if of_host:
            copy_each(self.to_send, of_host)
            self.received.copy_(self.sent, non_blocking=True)

    def _divided(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Divide tensors into those in the memory of the host, and those on the GPU."""
        pairs = list(zip(tensors, self.is_on_host, strict=True))
        of_host = [tensor for tensor, on_host in pairs if on_host]
        of_device = [tensor for tensor, on_host in pairs if not on_host]
        return of_host, of_device


class CopyStream:
    """The stream on which copies run, and the events that put them between two updates."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device)
        self.updated = torch.cuda.Event()
        self.has_begun = False
        self.begun = torch.cuda.Event(enable_timing=True)
        self.ended = torch.cuda.Event(enable_timing=True)
        # External: a captured step waits for the copies of the step before it, not for the capture.
        self.copied = torch.cuda.Event(external=True)

    def before_update(self) -> None:
        """Let the update that comes next wait until the last state is copied."""
        torch.cuda.current_stream().wait_event(self.copied)

    def seconds(self) -> float:
        """How long the last copies took; 0 while they run, and before the first."""
        if not self.has_begun or not self.ended.query():
            return 0.0
        return self.begun.elapsed_time(self.ended) / 1000

    def after_update(self) -> None:
        """Let copies wait for the update that was queued last."""
        self.updated.record()
        self.stream.wait_event(self.updated)


class DeviceHead:
    """The mark and the numbers of a place, which a GPU writes."""

    def __init__(self, record: Record, device: str) -> None:
        self.memory = LockedMemory(record.memory)
        begin = self.memory.address
        self.mark: Tensor = torch.as_tensor(MappedHost(begin, "<i8", 1), device=device)
        numbers = MappedHost(begin + record.NUMBERS_BEGIN, "<f8", record.NUMBERS)
        self.numbers: Tensor = torch.as_tensor(numbers, device=device)
        if self.mark.data_ptr() != begin:
            raise LaunchError("kernels cannot write to this host's memory")
        self.next_mark = torch.zeros((), dtype=torch.int64, device=device)
        self.whole = torch.cuda.Event()
        """Recorded behind the last copies: once it is reached they are whole."""
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(
        self,
        copies: CopyStream,
        targets: list[Tensor],
        sources: list[Tensor],
        numbers: Tensor,
    ) -> None:
        """Capture the copies, so that the host launches all of them at once.

        numbers: [NUMBERS], float64, on the device.
        """
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=copies.stream, capture_error_mode="thread_local"):
            self.mark.fill_(0)
            copy_each(targets, sources)
            self.numbers.copy_(numbers)
            self.mark.copy_(self.next_mark)

    def replay(self, copies: CopyStream, mark: int) -> None:
        """Copy, behind the update that was queued last."""
        assert self.graph
        copies.after_update()
        with torch.cuda.stream(copies.stream):
            self.next_mark.fill_(mark + 1)  # 0: not whole, see `Record.mark`
            copies.begun.record()
            copies.has_begun = True
            self.graph.replay()
            copies.ended.record()
            self.whole.record()
            copies.copied.record()
