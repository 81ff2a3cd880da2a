"""The place of a rank in which it keeps a step, in memory of its GPU."""

from __future__ import annotations

import math
import os
import socket

import torch
from torch import Tensor

from ddp_train.distributed.environment import keeper_descriptor
from ddp_train.linux import wait_until
from ddp_train.recovery.device_copies import CopyStream, DeviceHead, StagedTensors, copy_each
from ddp_train.recovery.device_memory import DeviceMemory
from ddp_train.recovery.kept_layout import Layout, Views
from ddp_train.recovery.kept_step import KeptRecords, KeptStep, Numbers, State
from ddp_train.recovery.pace import DevicePace
from ddp_train.resilience.held_devices import Held, send
from ddp_train.resilience.kept_memory import KeptMemory, Place, Record

POLL_SECONDS = 0.0002


class DeviceKeeping:
    """The stream, the pace and the launcher's socket, which both places of a GPU use."""

    def __init__(self, device: str) -> None:
        self.name = device
        self.index = torch.device(device).index
        self.copies = CopyStream(device)
        self.pace = DevicePace(self.copies)
        descriptor = keeper_descriptor()
        assert descriptor is not None, "the launcher takes memory of GPUs over"
        self.launcher = socket.socket(fileno=descriptor)


class HeldMemory:
    """Memory of a GPU for one place, which the launcher holds."""

    def __init__(self, records: KeptRecords, device: DeviceKeeping) -> None:
        self.records = records
        self.device = device
        self.memory: DeviceMemory | None = None

    def views(self, layout: Layout) -> Views:
        """Allocate memory on the GPU for the tensors of a layout, unless there is enough.

        Raises LaunchError if the GPU has no room.
        """
        size = max(1, layout.sizes[self.records.rank])
        if self.memory is None or self.memory.size < size:
            if self.memory:
                self.memory.release()
            self.memory = DeviceMemory.create(self.device.index, size)
            descriptor = self.memory.descriptor()
            held = Held(descriptor, self.device.index, self.memory.size)
            send(self.device.launcher, self.records.rank, self.records.places.state, held)
            os.close(descriptor)
        return Views(self.memory.bytes, layout)


class WaitedDeviceStep(KeptStep):
    """A place for the state on a GPU, in memory of that GPU, whose copies the host waits for.

    The code that follows may change any tensor.
    """

    def __init__(self, records: KeptRecords, device: DeviceKeeping) -> None:
        super().__init__(records)
        self.held = HeldMemory(records, device)

    def _copy(self, mark: int, state: State, numbers: Numbers) -> None:
        copy_each(self.targets, [*self.sources, *state.own()])
        torch.cuda.current_stream().synchronize()
        self.records.state.complete(mark)

    def _views(self, layout: Layout) -> Views:
        return self.held.views(layout)


class KeptDeviceStep(KeptStep):
    """A place for the state on a GPU, in memory of that GPU.

    Its copies run beside the step that follows.
    """

    def __init__(self, records: KeptRecords, device: DeviceKeeping) -> None:
        super().__init__(records)
        self.device = device
        self.numbers = torch.zeros(Record.NUMBERS, dtype=torch.float64, device=device.name)
        self.head = DeviceHead(records.state, device.name)
        self.held = HeldMemory(records, device)
        self.addresses: list[int] = []
        """Those of the sources when the copies were captured."""
        self.host_places: list[int] = []
        """Those among the sources that are on the host."""
        self.staged = StagedTensors([], device.name)
        """The sources on the host, and the tensors that a forward pass changes."""

    def wait(self) -> None:
        self.head.whole.synchronize()

    def wait_for_all(self, memory: KeptMemory) -> None:
        """A rank may be a step ahead of what another one's GPU has copied.

        Waits as long as it takes, as for gradients: a rank that hangs is found by the launcher.
        """
        self.wait()
        mark = self.records.state.mark
        if mark is None:
            return
        others = [
            (memory.record(rank, Place.FACTS), memory.record(rank, self.places.state))
            for rank in range(self.records.ranks)
        ]

        def have_it() -> bool:
            return all(facts.mark is None or state.mark == mark for facts, state in others)

        wait_until(have_it, math.inf, POLL_SECONDS)

    def _have_moved(self) -> bool:
        return self.addresses != [source.data_ptr() for source in self.sources]

    def _copy(self, mark: int, state: State, numbers: Numbers) -> None:
        self.staged.copy(self._to_stage(state))
        assert isinstance(numbers, Tensor), "they are on the GPU"
        self.numbers.copy_(numbers)
        self.head.replay(self.device.copies, mark)

    def _lay_out(self, state: State) -> None:
        torch.cuda.synchronize()  # the copies that are queued are of the layout before
        super()._lay_out(state)
        sources = [source.detach() for source in self.sources]
        self.addresses = [source.data_ptr() for source in sources]
        self.host_places = [place for place, source in enumerate(sources) if not source.is_cuda]
        self.staged = StagedTensors(self._to_stage(state), self.device.name)
        copies = iter(self.staged.copies)
        for place in self.host_places:
            sources[place] = next(copies)
        self.head.capture(self.device.copies, self.targets, [*sources, *copies], self.numbers)

    def _to_stage(self, state: State) -> list[Tensor]:
        return [*(self.sources[place] for place in self.host_places), *state.own()]

    def _views(self, layout: Layout) -> Views:
        return self.held.views(layout)
