"""When a checkpoint is saved beside training, and what is collected for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoints.training_state import (
    METRICS,
    AveragedModel,
    HookStates,
    StatefulHook,
    TrainingState,
    collect_average,
    copies_of,
    states_of,
)
from ddp_train.checkpoints.writer import Snapshot, Writer
from ddp_train.distributed.buffers_of_ranks import (
    buffers_apart,
    is_statistic,
    whole_numbers_apart,
)
from ddp_train.distributed.process_group import total
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook, next_multiple
from ddp_train.tasks.mean_loss import Mean

log = logging.getLogger(__name__)
MOST_NAMES = 3
"""The most buffers that a warning lists."""
OWN_BUFFERS = (
    "%s: not the same on all processes, since each process fills it from its own samples. So the"
    " result depends on the number of processes, and a checkpoint has the mean over them, of whole"
    " numbers those of rank 0. Fill it from the samples of all processes: rows, _ ="
    " ddp_train.all_gather(indices); table[rows] = ddp_train.all_gather(values.detach())[0]"
)


@dataclass(frozen=True)
class SaveTimes:
    """After which steps a checkpoint is saved, beside the last one."""

    every_steps: int | None = None
    """None: at the end of each epoch."""
    every_minutes: float | None = None
    after_evaluations: bool = False

    def next_step(self, job: Job) -> int:
        """The next step after which one is saved whatever the clock says."""
        if self.every_steps:
            return next_multiple(self.every_steps, job.step)
        return job.plan.epoch_end(job.step)

    def include(self, job: Job) -> bool:
        """Whether one is saved after this step, whatever the clock says."""
        if self.every_steps:
            return job.step % self.every_steps == 0
        return job.plan.ends_epoch(job.step)


class CheckpointHook:
    """Saves a checkpoint at its times, and where training ends or stops."""

    def __init__(
        self,
        writer: Writer | None,
        metrics_hook: MetricsHook,
        manifest: dict[str, Any],
        times: SaveTimes | None = None,
        further_hooks: Mapping[str, StatefulHook] | None = None,
    ) -> None:
        """
        writer: on rank 0; the others take part without one.
        metrics_hook: has the score of a step; to be called before this hook.
        manifest: entries of every checkpoint's manifest.
        times: None for the end of each epoch.
        further_hooks: those whose state is saved too, by their names in training.pt.
        """
        self.writer = writer
        self.metrics_hook = metrics_hook
        self.manifest = manifest
        self.times = times or SaveTimes()
        self.hooks: dict[str, StatefulHook] = {METRICS: metrics_hook, **(further_hooks or {})}
        self.last_save = time.monotonic()
        self.has_warned_of_buffers = False

    def due(self, job: Job) -> int:
        return self.times.next_step(job)

    def act(self, job: Job) -> None:
        is_last = job.step >= min(job.plan.steps, job.stop.last_step)
        has_score = self.times.after_evaluations and bool(job.scores)
        if self.times.include(job) or has_score or is_last or self._time_is_up(job):
            self.save(job)
        if self.writer and is_last:
            self.writer.finish()

    def _time_is_up(self, job: Job) -> bool:
        """Whether `every_minutes` have passed since the last save, by the clock of the process that
        writes: the others ask it, at every logging interval."""
        minutes = self.times.every_minutes
        if minutes is None:
            return False
        seconds = time.monotonic() - self.last_save
        is_up = self.writer is not None and seconds >= 60 * minutes
        votes = total(torch.tensor(float(is_up), device=job.stepper.device))
        return votes.item() > 0

    def save(self, job: Job) -> None:
        """Save the state after `job.step`. A collective: every process must call it."""
        job.stepper.check()
        job.strategy.check_replicas(job.module)
        self.last_save = time.monotonic()
        self.metrics_hook.catch_up(job)
        if self.writer:
            # Before the average is copied: else there are two snapshots at a time, and this copy.
            self.writer.wait()
        average = None
        if job.stepper.average:
            copies = self.writer is not None
            average = collect_average(job.stepper.average, job.strategy, job.module, copies)
        scores: dict[str, Any] = dict.fromkeys(("test", *job.evaluations))
        for name, score in job.scores.items():
            scores[name] = score.as_dict()
        with job.strategy.averaged(job.module) as buffers:
            self._warn_of_own_buffers(job, buffers)
            weights = job.strategy.full_weights(job.module.model)
            if self.writer:
                states = self.hook_states()
                self.writer.submit(
                    partial(self.snapshot, job, weights, buffers, average, states, scores)
                )

    def _warn_of_own_buffers(self, job: Job, of_ranks: Tensor) -> None:
        """Name once the buffers that each process fills alone, but for statistics of norms.

        A collective.

        of_ranks: the floating-point buffers of each process, [ranks, n].
        """
        if self.has_warned_of_buffers:
            return
        differing = buffers_apart(job.module, of_ranks)
        names = [buffer.name for buffer in differing if not is_statistic(buffer)]
        names += whole_numbers_apart(job.module, job.stepper.device)
        if names:
            self.has_warned_of_buffers = True
            if self.writer:
                log.warning(OWN_BUFFERS, ", ".join(names[:MOST_NAMES]))

    def hook_states(self) -> HookStates:
        return states_of(self.hooks)

    def snapshot(
        self,
        job: Job,
        weights: dict[str, Tensor],
        buffers: Tensor,
        average: AveragedModel | None,
        hook_states: HookStates,
        manifest: dict[str, Any],
    ) -> Snapshot:
        """Copy the state after `job.step`.

        weights: see `Strategy.full_weights`.
        buffers: those of each rank, [ranks, n]; the weights have their mean.
        average: None without one.
        manifest: entries that this checkpoint alone has.
        """
        average_state = average.state if average else None
        state = TrainingState.collect(job, hook_states, buffers, average_state)
        return Snapshot(
            step=job.step,
            model=copies_of(weights),
            training=state.as_dict(),
            manifest={**self.manifest, **manifest},
            average=average.weights if average else None,
        )


def add_unreported_loss(hook_states: HookStates, loss: Mean) -> HookStates:
    """States of hooks as if they had seen the loss of steps that none of them has seen."""
    metrics = dict(hook_states[METRICS])
    for name in ("epoch_loss", "interval_loss"):
        combined = Mean(*metrics[name]) + loss
        metrics[name] = [combined.sum, combined.units]
    metrics["units"] += loss.units
    return {**hook_states, METRICS: metrics}
