"""The part of a training job that a user's hook may read and change."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Evaluation, Forward, Job
from ddp_train.optim.stepper import StepObserver, Stepper
from ddp_train.tasks.logged_numbers import HOOK_LOG, LogCall, Moment, Rule
from ddp_train.tasks.score import Score
from ddp_train.tasks.task import ModelWithTask
from ddp_train.telemetry.own_numbers import HOOK
from ddp_train.telemetry.trackers.media import Media
from ddp_train.telemetry.trackers.media_calls import MediaCalls

log = logging.getLogger(__name__)


class HookContext(MediaCalls):
    """The training job as a hook sees it. It is always up to date, and may be kept.

    `batches` and `wrapped` may be replaced when the hook is entered.
    """

    def __init__(self, job: Job, run_dir: Path, world: World) -> None:
        self._job = job
        self.run_dir = run_dir
        self.world = world
        """This process among all: `rank`, `size`."""

    @property
    def step(self) -> int:
        """Number of optimizer steps that are done."""
        return self._job.step

    @property
    def plan(self) -> BatchPlan:
        """The samples of each step; `steps` of the run, `epoch_end(step)`."""
        return self._job.plan

    @property
    def score(self) -> Score | None:
        """The metrics of `step` by the validation set, or by the test set if there is none; None
        if this step was not evaluated."""
        return self._job.score

    @property
    def scores(self) -> Mapping[str, Score]:
        """The metrics of `step` by the name of each set, validation/noisy for one; empty if this
        step was not evaluated."""
        return self._job.scores

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
        """An argument for `ddp_train.engine.loop.evaluate`: scores the validation or test set."""
        return self._job.evaluation

    def stop(self, reason: str) -> None:
        """End training after this step; all processes must call it. The run can be resumed."""
        log.info("a hook stops the run after step %d: %s", self.step, reason)
        self._job.stop.end_at(self.step)

    def log(
        self,
        name: str,
        values: Tensor | float,
        *,
        over: Tensor | float | None = None,
        how: str = "mean",
    ) -> None:
        """Log a number of your own after this step, for a line of its own in metrics.jsonl.

        The line is written at the next logging interval, or checkpoint, on whichever processes it
        was logged: nothing is exchanged here.

        values: as for `ddp_train.log`; with how="mean" also one number of this process, whose mean
            over the processes is written.

        Raises LogError as `ddp_train.log` does.
        """
        logged = self._job.stepper.logged
        call = LogCall.of(HOOK_LOG, name, values, over, how, alone=Rule.MEAN)
        logged.check(HOOK_LOG, name, call.rule)
        logged.add_at(Moment(HOOK, self.step), call.entry())

    def _media_of(self, method: str) -> tuple[Media, int]:
        return self._job.media, self.step

    def observe(self, observer: StepObserver) -> None:
        """Have an observer called around each backward pass and each update from now on.

        It is called before observers that were added earlier. Some of these belong to the run: they
        copy the state of hooks into memory, and report the step as done.

        observer: an object with the methods of `StepObserver`. End it by `stop_observing`.
        """
        self._job.stepper.observers.insert(0, observer)

    def stop_observing(self, observer: StepObserver) -> None:
        self._job.stepper.observers.remove(observer)

    def one_step_earlier(self) -> HookContext:
        """The same job as it was before its last step was counted."""
        return HookContext(replace(self._job, step=self.step - 1), self.run_dir, self.world)

    @property
    def batches(self) -> Iterable[Batch]:
        """The micro-batches of this process, in order."""
        return self._job.batches

    @batches.setter
    def batches(self, batches: Iterable[Batch]) -> None:
        self._job.batches = batches

    @property
    def wrapped(self) -> Forward:
        """The model as the loop calls it, with the data of each micro-batch."""
        return self._job.wrapped

    @wrapped.setter
    def wrapped(self, wrapped: Forward) -> None:
        self._job.wrapped = wrapped
