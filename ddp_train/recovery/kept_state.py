"""Keeps the state of a rank after each step, in memory that outlives it (kept_memory.py).

Every rank of a host has the weights, the optimizer's state and the average of the weights: each
keeps a share of these. What a rank alone has, its buffers and its losses since the last line of
metrics, it keeps by itself. A step that all ranks of a host have kept is whole, whatever happens to
them afterwards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoints.checkpoint_hook import CheckpointHook
from ddp_train.distributed.environment import keeper_descriptor
from ddp_train.engine.loop import Job
from ddp_train.errors import LaunchError
from ddp_train.linux import wait_until
from ddp_train.optim.stepper import StepObserver, Stepper
from ddp_train.recovery.device_copies import CopyStream, DeviceHead, copy_each
from ddp_train.recovery.device_memory import DeviceMemory
from ddp_train.recovery.kept_layout import Layout, Views, packed
from ddp_train.recovery.live_state import LiveState, state_of
from ddp_train.recovery.pace import DevicePace, NoPace, Pace
from ddp_train.resilience.held_devices import Held, send
from ddp_train.resilience.kept_memory import (
    TURNS,
    KeptMemory,
    Place,
    Record,
    StepPlaces,
    state_mark,
)
from ddp_train.tasks.mean_loss import ForwardPass, as_tensor

log = logging.getLogger(__name__)
POLL_SECONDS = 0.0002
NOT_KEPT = (
    "the state is kept in checkpoints alone, and a failure costs the steps since the last: %s"
)


@dataclass(frozen=True)
class EveryHook:
    """Acts whenever another hook is due."""

    call: Callable[[Job], None]

    def due(self, job: Job) -> int:
        return sys.maxsize

    def act(self, job: Job) -> None:
        self.call(job)


@dataclass(frozen=True)
class HooksNow:
    """What hooks have left at a step, as it is kept."""

    step: int
    text: bytes
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, step: int, states: Any, stepper: Stepper) -> HooksNow:
        """states: of hooks, after they acted after a step."""
        logged = (stepper.logged.state(), stepper.logged.kept())
        took_losses = not stepper.losses.passes
        return cls(step, packed((states, logged)), (float(took_losses), time.monotonic()))

    def write(self, record: Record) -> None:
        record.open()
        record.text = self.text
        record.set_numbers(*self.numbers)
        record.complete(self.step)


class StateKeeper(StepObserver):
    """Keeps the state of a job after steps, and those of its hooks after they acted."""

    def __init__(
        self,
        memory: KeptMemory,
        rank: int,
        ranks: int,
        hooks_change_it: bool,
        gathered: Callable[[], Tensor] | None = None,
    ) -> None:
        """
        rank: the number of this process on its host.
        ranks: the processes of the host.
        hooks_change_it: hooks may change the weights, or other tensors of the state.
        gathered: see `live_state.state_of`.
        """
        self.hooks_change_it = hooks_change_it
        self.gathered = gathered
        self.memory = memory
        self.rank = rank
        self.ranks = ranks
        self.facts = memory.record(rank, Place.FACTS)
        self.steps: list[KeptStep] = []
        """The one that is written next, and the one that was written last."""
        self.pace = Pace()
        self.acted_at = 0
        """The last step after which hooks have acted."""
        self.hooks: HooksNow | None = None
        """What they have left; None until a step is kept that needs it."""
        self.job: Job | None = None
        self.live: LiveState | None = None
        self.tensors_may_differ = False
        """Hooks have acted since the last step: they may have put other tensors into the model."""
        self.hook_states: Callable[[], Any] = dict

    @contextlib.contextmanager
    def keeping(
        self, job: Job, checkpoint_hook: CheckpointHook, hooks_owed: bool, owner: dict[str, str]
    ) -> Iterator[None]:
        """A context in which the state after each step is kept, on a GPU at the pace.

        owner: of the run directory, see `run_lock.owner`: nobody else may save what is kept.
        hooks_owed: the hooks of `job.step` have not acted yet.
        """
        try:
            self.steps = self._places_of(job.stepper)
        except LaunchError as error:  # a driver, or a virtual machine, without what it takes
            log.warning(NOT_KEPT, error)
            yield
            return
        self.job = job
        self.hook_states = checkpoint_hook.hook_states
        for kept in self.steps:
            kept.drop()  # what an attempt before has kept is in a checkpoint by now
        self.facts.open()
        facts = [checkpoint_hook.manifest, job.strategy.buffers_differ, owner]
        self.facts.text = json.dumps(facts).encode()
        self.facts.set_numbers(-1, self.ranks)
        self.facts.complete(0)
        self.acted_at = job.step - hooks_owed
        job.stepper.observers.insert(0, self)
        job.hooks = [EveryHook(self._before_hooks), *job.hooks, EveryHook(self._after_hooks)]
        try:
            yield
        finally:
            # It refers to the wrapped model, which must be freed before the process group.
            job.stepper.observers.remove(self)
            self.job = None
            self.live = None

    def _places_of(self, stepper: Stepper) -> list[KeptStep]:
        """The two places in which steps are kept in turns."""
        make: Callable[[KeptRecords], KeptStep] = KeptStep
        if stepper.device != "cpu":
            device = DeviceKeeping(stepper.device)
            stepper.travelling.append(device.pace)  # even if this rank can keep nothing
            stepper.copies = device.copies
            self.pace = device.pace
            make = partial(KeptDeviceStep, device=device)
        return [
            make(KeptRecords.of(self.memory, places, self.rank, self.ranks)) for places in TURNS
        ]

    def after_update(self, steps_done: int) -> None:
        if self.pace.comes_to_keep():
            self._keep(steps_done)

    def _keep(self, step: int) -> None:
        job = self.job
        assert job
        if self.hooks is None:
            self.hooks = self._hooks_now(job)
        if self.live is None or not self.live.is_of(job, self.tensors_may_differ):
            self.live = state_of(job, self.gathered)
        self.tensors_may_differ = False
        if step == job.hooks_step:
            self.facts.set_numbers(step, self.ranks)
        kept, last = self.steps
        try:
            last.wait_for_all(self.memory)  # until it is whole, the other one must stay
            kept.write(step, self.live, job.stepper, self.hooks)
        except LaunchError as error:
            self._give_up(error)
            return
        self.steps = [last, kept]

    def _give_up(self, error: Exception) -> None:
        """Keep nothing any more."""
        log.warning(NOT_KEPT, error)
        self.pace = NoPace()
        self.facts.open()  # the other ranks do not wait for this one
        for kept in self.steps:
            kept.step = None

    def _before_hooks(self, job: Job) -> None:
        """Note that hooks act after this step, which they do too where training is stopped.

        They wait until the last state is copied: they may change weights.
        """
        self.facts.set_numbers(job.step, self.ranks)
        if job.stepper.copies:
            job.stepper.copies.before_update()

    def _after_hooks(self, job: Job) -> None:
        self.tensors_may_differ = True
        self.acted_at = job.step
        before = self.hooks
        self.hooks = None
        _, kept = self.steps
        if kept.step != job.step:
            return
        self.hooks = self._hooks_now(job)
        if self.hooks_change_it:
            assert before and self.live
            # A process that is killed meanwhile has not kept this step: the one before is whole.
            kept.drop()
            live = state_of(job, self.gathered)
            self.live = self.live if self.live.is_like(live) else live
            try:
                kept.write(job.step, self.live, job.stepper, before, after=self.hooks)
            except LaunchError as error:
                self._give_up(error)
        else:
            self.hooks.write(kept.records.after)

    def _hooks_now(self, job: Job) -> HooksNow:
        """The states of hooks, which change only when they act."""
        return HooksNow.of(self.acted_at, self.hook_states(), job.stepper)


@dataclass(frozen=True)
class KeptRecords:
    """Where one of the two places of a rank is, and how the ranks share what they keep."""

    places: StepPlaces
    rank: int
    ranks: int
    state: Record
    logged: Record
    before: Record
    after: Record

    @classmethod
    def of(cls, memory: KeptMemory, places: StepPlaces, rank: int, ranks: int) -> KeptRecords:
        return cls(
            places=places,
            rank=rank,
            ranks=ranks,
            state=memory.record(rank, places.state),
            logged=memory.record(rank, places.logged),
            before=memory.record(rank, places.before),
            after=memory.record(rank, places.after),
        )


class KeptStep:
    """One of the two places of a rank in which it keeps a step."""

    def __init__(self, records: KeptRecords) -> None:
        self.records = records
        self.step: int | None = None
        """The step that was written last."""
        self.written: LiveState | None = None
        """The state whose tree is written here."""
        self.sources: list[Tensor] = []
        """Those of the common tensors that this rank keeps."""
        self.targets: list[Tensor] = []
        """Their places, and those of the tensors that this rank alone has."""

    def wait(self) -> None:
        """Wait until what was written is whole."""

    def wait_for_all(self, memory: KeptMemory) -> None:
        """Wait until it is whole in the memory of all ranks of the host.

        On the CPU it is: the gradients of this step came from ranks that had kept the last one.
        """

    def drop(self) -> None:
        """Keep nothing, until the next step is written."""
        self.wait()
        records = self.records
        for record in (records.state, records.logged, records.before, records.after):
            record.open()
        self.step = None

    def write(
        self,
        step: int,
        live: LiveState,
        stepper: Stepper,
        hooks: HooksNow,
        after: HooksNow | None = None,
    ) -> None:
        """Keep the state after a step.

        hooks: before they act after it.
        after: once they have acted, if the state is as they left it.
        """
        records = self.records
        records.state.open()
        records.after.open()
        if after:
            after.write(records.after)
        if records.before.mark != hooks.step:
            hooks.write(records.before)
        if self.written is not live or self._have_moved():
            self._lay_out(live)
        if stepper.logged.is_used:
            records.logged.open()
            records.logged.text = packed((stepper.logged.state(), stepper.logged.kept()))
            records.logged.complete(step)
        self.step = step
        self._copy(state_mark(step, hooks_changed_it=after is not None), live, stepper)

    def _copy(self, mark: int, live: LiveState, stepper: Stepper) -> None:
        """Copy the tensors and what changes with each step, and set the mark."""
        sources = [*self.sources, *live.own()]
        if sources:  # of few tensors a rank may have none to keep
            with torch.no_grad():
                torch._foreach_copy_(self.targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        losses = stepper.losses
        norm = 0.0 if stepper.norm is None else stepper.norm.item()
        record = self.records.state
        record.set_numbers(losses.known_sum, losses.known_units, time.monotonic(), norm)
        record.complete(mark)

    def _have_moved(self) -> bool:
        """Whether sources lie elsewhere than when their copies were laid out.

        On the CPU that is no matter: each copy looks where they are.
        """
        return False

    def _lay_out(self, live: LiveState) -> None:
        """Write the tree, and find the places of the tensors that this rank keeps."""
        records = self.records
        layout = Layout.of(live.own(), live.common, records.ranks)
        records.state.text = packed((live.tree, layout))
        views = self._views(layout)
        owners = enumerate(layout.owners)
        here = [number for number, owner in owners if owner == records.rank]
        self.sources = [live.common[number] for number in here]
        self.targets = [views.common(number) for number in here]
        self.targets += [views.own(number) for number in range(len(layout.own))]
        self.written = live

    def _views(self, layout: Layout) -> Views:
        return Views.on_host(self.records.state, layout, self.records.rank)


class DeviceKeeping:
    """What the places of a GPU share."""

    def __init__(self, device: str) -> None:
        self.name = device
        self.index = torch.device(device).index
        self.copies = CopyStream(device)
        self.pace = DevicePace(self.copies)
        self.losses = DeviceLosses(device)
        descriptor = keeper_descriptor()
        assert descriptor is not None, "the launcher takes memory of GPUs over"
        self.launcher = socket.socket(fileno=descriptor)


class DeviceLosses:
    """Sum and units of the losses since the last line of metrics, on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.numbers = torch.zeros(Record.NUMBERS, dtype=torch.float64, device=device)
        """Sum, units, zero, and the norm of the last gradients."""
        self.sum, self.units, _, self.norm = self.numbers.unbind()
        self.counted: list[ForwardPass] = []

    def count(self, stepper: Stepper) -> None:
        """Add the forward passes that are not counted yet.

        A loss that is not finite counts as nothing.
        """
        passes = stepper.losses.passes
        if not _begins_with(passes, self.counted):  # a line has them, or a step was skipped
            self.numbers.zero_()
            self.counted = []
        new = [one for one in passes[len(self.counted) :] if one[2].num_real]
        self.counted = list(passes)
        if new:
            losses = as_tensor([loss for loss, _, _ in new], self.device)
            self.sum.add_(losses.nan_to_num(posinf=0, neginf=0).sum())
            self.units.add_(as_tensor([units for _, units, _ in new], self.device).sum())
        if stepper.norm is not None:
            self.norm.copy_(stepper.norm)


def _begins_with(passes: list[ForwardPass], counted: list[ForwardPass]) -> bool:
    return not counted or (len(passes) >= len(counted) and passes[len(counted) - 1] is counted[-1])


class KeptDeviceStep(KeptStep):
    """A place for the state on a GPU, in memory of that GPU.

    Its copies run beside the step that follows.
    """

    def __init__(self, records: KeptRecords, device: DeviceKeeping) -> None:
        super().__init__(records)
        self.device = device
        self.numbers = torch.zeros_like(device.losses.numbers)
        self.head = DeviceHead(records.state, device.name)
        self.memory: DeviceMemory | None = None
        self.addresses: list[int] = []
        """Those of the sources when the copies were captured."""
        self.staged: list[Tensor] = []
        """Copies of the tensors that a forward pass changes: made before it begins."""

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
            (memory.record(rank, Place.FACTS), memory.record(rank, self.records.places.state))
            for rank in range(self.records.ranks)
        ]

        def have_it() -> bool:
            return all(facts.mark is None or state.mark == mark for facts, state in others)

        wait_until(have_it, math.inf, POLL_SECONDS)

    def _have_moved(self) -> bool:
        return self.addresses != [source.data_ptr() for source in self.sources]

    def _copy(self, mark: int, live: LiveState, stepper: Stepper) -> None:
        copy_each(self.staged, live.own())
        self.device.losses.count(stepper)
        self.numbers.copy_(self.device.losses.numbers)
        self.head.replay(self.device.copies, mark)

    def _lay_out(self, live: LiveState) -> None:
        torch.cuda.synchronize()  # the copies that are queued are of the layout before
        super()._lay_out(live)
        self.staged = [torch.empty_like(tensor) for tensor in live.own()]
        sources = [source.detach() for source in self.sources]
        self.addresses = [source.data_ptr() for source in sources]
        self.head.capture(self.device.copies, self.targets, [*sources, *self.staged], self.numbers)

    def _views(self, layout: Layout) -> Views:
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
