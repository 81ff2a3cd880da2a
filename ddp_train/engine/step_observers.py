"""Reports of where a rank is to the status board; batches, stepper and hooks do not know of it.

The launcher reads these phases to tell which rank hangs, and where (resilience/hang_detector.py).
An assignment to shared memory is all that a report costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.streams.batch_stream import BatchStream
from ddp_train.engine.loop import Hook, Job
from ddp_train.optim.stepper import StepObserver
from ddp_train.resilience.heartbeat import PHASE_NUMBERS, RankStatus

BACKWARD = PHASE_NUMBERS["backward"]
OPTIMIZER_STEP = PHASE_NUMBERS["optimizer step"]


class BatchLoader(Protocol):
    """A stream of batches, and the way of each to the device."""

    @property
    def stream(self) -> BatchStream: ...

    def place(self, batch: Batch, /) -> Batch: ...


class ReportedBatches:
    """The batches of a loader: in phase `data` until one is there, in `forward` while it is
    used."""

    def __init__(self, loader: BatchLoader, status: RankStatus, prefix: str = "") -> None:
        """prefix: of the names of its phases; an evaluation has its own, and one for its end."""
        self.loader = loader
        self.status = status
        self.data = PHASE_NUMBERS[prefix + "data"]
        self.forward = PHASE_NUMBERS[prefix + "forward"]
        self.end = prefix + "end"

    def __iter__(self) -> Iterator[Batch]:
        self._report_waiting()
        for fetched in self.loader.stream:
            self._report_fetched()
            yield self.loader.place(fetched)
            self._report_waiting()
        self.status.phase = self.end

    def _report_waiting(self) -> None:
        self.status.phase_number = self.data
        self.status.fetching = self.loader.stream.in_flight

    def _report_fetched(self) -> None:
        """Report that the host has the batch: from here on only the device is waited for."""
        self.status.batches += 1
        self.status.phase_number = self.forward


class PhaseReports(StepObserver):
    """Reports the two parts of a step, and the number of steps that are done."""

    def __init__(self, status: RankStatus) -> None:
        self.status = status

    def before_backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        self.status.phase_number = BACKWARD

    def before_update(self) -> None:
        self.status.phase_number = OPTIMIZER_STEP

    def after_update(self, steps_done: int) -> None:
        self.status.step = steps_done


class ReportedHook:
    """A hook that is in one phase whenever it acts."""

    def __init__(self, hook: Hook, status: RankStatus, phase: str) -> None:
        self.hook = hook
        self.status = status
        self.phase = phase
        self.due = hook.due

    def act(self, job: Job) -> None:
        self.status.phase = self.phase
        self.hook.act(job)
