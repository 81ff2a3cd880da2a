"""Checkpoints beside training: when one is saved, and what is in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoints import averaged_weights
from ddp_train.checkpoints.writer import Snapshot, Writer, copy_of
from ddp_train.distributed.process_group import total
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook, next_multiple
from ddp_train.tasks.mean_loss import Mean
from ddp_train.tensor_tree import map_tensors


class CheckpointHook:
    """A checkpoint every so many steps or minutes, or each epoch, and where training ends or
    stops."""

    def __init__(
        self,
        writer: Writer | None,
        record: MetricsHook,
        manifest: dict[str, Any],
        every_steps: int | None = None,
        every_minutes: float | None = None,
        best: bool = False,
        more_state: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """writer: on one process; the others take part without one. manifest: entries of every
        checkpoint's manifest. every_steps: None saves at the end of each epoch. best: save after
        every evaluation too. more_state: further entries of what training continues with."""
        self.writer = writer
        self.record = record
        self.manifest = manifest
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.best = best
        self.more_state = more_state
        self.last_save = time.monotonic()

    def due(self, job: Job) -> int:
        if self.every_steps:
            return next_multiple(self.every_steps, job.step)
        return job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        if self.every_steps:
            at_this_step = job.step % self.every_steps == 0
        else:
            at_this_step = job.plan.ends_epoch(job.step)
        evaluated = self.best and self.record.score is not None
        last = job.step >= min(job.plan.steps, job.stop.last_step)
        if at_this_step or evaluated or last or self._time_is_up(job):
            self._save(job)
        if self.writer and last:
            self.writer.finish()

    def _time_is_up(self, job: Job) -> bool:
        """By the clock of the process that writes: the others ask it, at every logging interval."""
        if self.every_minutes is None:
            return False
        up = (
            self.writer is not None and time.monotonic() - self.last_save >= 60 * self.every_minutes
        )
        return total(torch.tensor(float(up), device=job.stepper.device)).item() > 0

    def _save(self, job: Job) -> None:
        job.stepper.check()
        check_same_weights(job.module)
        self.last_save = time.monotonic()
        self.record.catch_up(job)
        if self.writer:
            # before the average is copied: else there are two snapshots at a time, and this copy
            self.writer.wait()
        average = job.stepper.average
        writes = self.writer is not None
        taken = average and averaged_weights.taken(average, job.strategy, job.module, copies=writes)
        with job.strategy.averaged(job.module) as buffers:
            if self.writer:
                scores = {
                    "test": None,
                    self.record.split: self.record.score and self.record.score.as_dict(),
                }
                self.writer.submit(lambda: self.snapshot(job, buffers, taken, self.state(), scores))

    def state(self) -> dict[str, Any]:
        """What the hooks of a resumed run go on with."""
        return {"record": self.record.state()} | self.more_state()

    def snapshot(
        self,
        job: Job,
        buffers: Tensor,
        taken: averaged_weights.Taken | None,
        state: dict[str, Any],
        manifest: dict[str, Any],
    ) -> Snapshot:
        """Of the model as it is. buffers: those of each rank, [ranks, n]. state: of the hooks.
        manifest: entries that only this checkpoint has."""
        average, of_average = taken or (None, None)
        training = job.stepper.state() | {"buffers": buffers} | state
        training |= {averaged_weights.STATE: of_average} if of_average else {}
        return Snapshot(
            step=job.step,
            model=map_tensors(copy_of, job.module.model.state_dict()),
            training=map_tensors(copy_of, training),
            manifest={**self.manifest, **manifest},
            average=average,
        )


def with_unreported(state: dict[str, Any], loss: Mean) -> dict[str, Any]:
    """A state of the hooks to which the loss of steps is added that none of them has seen."""
    record = dict(state["record"])
    for name in ("epoch_loss", "interval_loss"):
        total = Mean(*record[name]) + loss
        record[name] = [total.sum, total.units]
    return {**state, "record": {**record, "units": record["units"] + loss.units}}
