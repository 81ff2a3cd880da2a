"""Reports to the status board where a rank is, from outside: batches, stepper and hooks know
nothing of it.

The launcher reads these phases to tell which rank hangs, and where (resilience/hang_detector.py).
An assignment to shared memory is all that a report costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.loader import Loader
from ddp_train.engine.loop import Hook, Job
from ddp_train.errors import PeersLostError
from ddp_train.optim.stepper import Stepper
from ddp_train.resilience.heartbeat import PHASE_NUMBERS, RankStatus
from ddp_train.tasks.mean_loss import Mean

BACKWARD = PHASE_NUMBERS["backward"]
OPTIMIZER_STEP = PHASE_NUMBERS["optimizer step"]
Publish = Callable[[int, Mean], Callable[[], None]]
"""Takes the number of the step that is being computed, and this process's mean loss since the last
look, with it. Returns what must be called before the update."""


class ReportedBatches:
    """The batches of a loader: in phase `data` until one is there, in `forward` while it is
    used."""

    def __init__(self, loader: Loader, status: RankStatus, prefix: str = "") -> None:
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
        if self.status.order:
            raise PeersLostError  # at once, and not at the next exchange
        self.status.phase_number = self.data
        self.status.fetching = self.loader.stream.in_flight

    def _report_fetched(self) -> None:
        """Reports that the host has the batch: what is waited for from here on is the device."""
        self.status.batches += 1
        self.status.phase_number = self.forward


class ReportedStepper:
    """A Stepper that reports its two parts, and the steps that are done. All else, assignments too,
    is its own."""

    def __init__(self, stepper: Stepper, status: RankStatus) -> None:
        own = StepReports(stepper, status)
        parts = {"backward": own.backward, "step": own.step, "continue_from": own.continue_from}
        vars(self).update(unreported=stepper, reports=own, **parts)

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith("_") or name == "unreported"
        ):  # not there yet: while this is copied, for example
            raise AttributeError(name)
        return getattr(self.unreported, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.unreported, name, value)


class StepReports:
    """What a ReportedStepper does itself. A class of its own, since Python caches no attribute of
    one that has a `__getattr__`: a look at each took 0.6 us of a step."""

    def __init__(self, stepper: Stepper, status: RankStatus) -> None:
        self.stepper = stepper
        self.status = status
        self.publish: Publish | None = None
        """With each step once it is set, before its gradients are exchanged. On the CPU, where
        looking at a loss costs nothing."""
        self.published = Mean()
        self.arrive: Callable[[], None] = lambda: None

    def backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        self.status.phase_number = BACKWARD
        if self.publish and micro_batch.is_last:
            seen = loss.item(), self.stepper.units_seen(units, micro_batch), micro_batch
            self.published = self.stepper.losses.known_with(*seen)
            self.arrive = self.publish(self.stepper.steps_done + 1, self.published)
        self.stepper.backward(loss, units, micro_batch)

    def step(self) -> None:
        self.arrive()
        self.status.phase_number = OPTIMIZER_STEP
        self.stepper.step()
        if (
            self.publish and self.published.sum != self.stepper.losses.known_sum
        ):  # the step was skipped
            losses = self.stepper.losses
            self.publish(self.stepper.steps_done, Mean(losses.known_sum, losses.known_units))
        self.status.step = self.stepper.steps_done

    def continue_from(self, step: int) -> None:
        self.stepper.continue_from(step)
        self.status.step = step


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
