"""What a user's hook is given: the part of a training job that it may read and change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.engine.loop import Evaluation, Job
from ddp_train.optim.stepper import StepObserver, Stepper
from ddp_train.resilience.preemption import StopController
from ddp_train.tasks.task import ModelWithTask

Forward = Callable[[Any], tuple[Tensor, Tensor | None]]
"""The loss of a batch as a scalar, and its number of units; None if these are the samples."""


class HookContext:
    """The training job as a hook sees it. It is always up to date, and may be kept.

    `batches` and `wrapped` may be replaced when the hook is entered.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def step(self) -> int:
        """Number of optimizer steps that are done."""
        return self._job.step

    @property
    def plan(self) -> BatchPlan:
        """Which samples are in which step; `steps` of the run, `epoch_end(step)`."""
        return self._job.plan

    @property
    def module(self) -> ModelWithTask:
        """The model with its task, under the plain names of its parameters."""
        return self._job.module

    @property
    def model(self) -> nn.Module:
        """The model itself. Its weights may be changed, on all processes alike."""
        return self._job.module.model

    @property
    def optimizer(self) -> Optimizer:
        return self._job.stepper.optimizer

    @property
    def stepper(self) -> Stepper:
        """The optimizer step: `last_learning_rate`, `last_gradient_norm`."""
        return self._job.stepper

    @property
    def evaluation(self) -> Evaluation:
        """What `ddp_train.engine.loop.evaluate` takes to score the validation or test set."""
        return self._job.evaluation

    @property
    def stop(self) -> StopController:
        """`stop.end_at(step)` stops the run after that step, if all processes call it."""
        return self._job.stop

    def observe(self, observer: StepObserver) -> None:
        """Have an observer called around each backward pass and each update from now on."""
        self._job.stepper.observers.append(observer)

    def stop_observing(self, observer: StepObserver) -> None:
        self._job.stepper.observers.remove(observer)

    @property
    def batches(self) -> Iterable[Batch]:
        """The micro-batches of this process, in order."""
        return self._job.batches

    @batches.setter
    def batches(self, batches: Iterable[Batch]) -> None:
        self._job.batches = batches

    @property
    def wrapped(self) -> Forward:
        """What the loop calls with the data of each micro-batch."""
        return self._job.wrapped

    @wrapped.setter
    def wrapped(self, wrapped: Forward) -> None:
        self._job.wrapped = wrapped
