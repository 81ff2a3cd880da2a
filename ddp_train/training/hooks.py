"""What happens beside training: metrics are recorded, and checkpoints saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.process_group import total
from ddp_train.tasks.mean_loss import Mean
from ddp_train.tasks.score import Score
from ddp_train.telemetry.console import Display, epoch_line
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.rates import Rates, in_words
from ddp_train.tensor_tree import map_tensors
from ddp_train.text import counted
from ddp_train.training import averaging
from ddp_train.training.averaging import scored
from ddp_train.training.checkpoint import Snapshot, Writer, copy_of
from ddp_train.training.loop import Job


class MetricsHook:
    """Loss and speed at each logging interval, a score at each evaluation: to metrics.jsonl and to the display."""

    def __init__(
        self,
        display: Display,
        metrics: MetricsFile,
        hardware: HardwareMonitor,
        epochs: int,
        log_every_steps: int,
        evaluate_every_epochs: int,
        split: str = "test",
        rates: Rates = Rates(),  # noqa: B008  it is frozen
    ) -> None:
        """split: what `job.evaluation` scores, validation or test."""
        self.rates = rates
        self.display = display
        self.metrics = metrics
        self.hardware = hardware
        self.epochs = epochs
        self.log_every_steps = log_every_steps
        self.evaluate_every_epochs = evaluate_every_epochs
        self.split = split
        self.epoch_seconds: list[float] = []
        self.score: Score | None = None
        """Of the step that was done last, if it was evaluated."""
        self.epoch_loss = Mean()
        """Of the part of an epoch that is recorded."""
        self.interval_loss = Mean()
        """Of the steps since the last line of metrics."""
        self.units = 0.0
        """That the loss was taken over, since the beginning of the run."""
        self.last_epoch_loss: float | None = None
        """The mean over the last epoch that was completed, or cut short by the end of the run."""
        self.seconds_before = 0.0
        self.epoch_seconds_before = 0.0
        """In earlier processes of this run: altogether, and in the unfinished epoch."""
        self.start_clocks(step=0)

    def start_clocks(self, step: int) -> None:
        """To be called when everything is built. step: optimizer steps that are done."""
        self.began = self.epoch_began = self.interval_began = time.perf_counter()
        self.interval_first_step = step
        self.hardware.collect()  # set-up does not count in the first interval

    @property
    def seconds(self) -> float:
        """Of training, without the time between the processes of a run that was resumed."""
        return self.seconds_before + time.perf_counter() - self.began

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to report on the whole of it."""
        epoch = self.epoch_seconds_before + time.perf_counter() - self.epoch_began
        return {
            "seconds": self.seconds,
            "epoch_seconds": list(self.epoch_seconds),
            "this_epoch_seconds": epoch,
            "epoch_loss": [self.epoch_loss.sum, self.epoch_loss.units],
            "units": self.units,
            "last_epoch_loss": self.last_epoch_loss,
            "figures": self.hardware.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.seconds_before = state["seconds"]
        self.epoch_seconds = list(state["epoch_seconds"])
        self.epoch_seconds_before = state["this_epoch_seconds"]
        self.epoch_loss = Mean(*state.get("epoch_loss", []))  # older checkpoints have none
        self.units = state.get("units", 0.0)  # likewise
        self.last_epoch_loss = state.get("last_epoch_loss")
        self.hardware.load_state(state.get("figures", {}))  # older checkpoints have none

    def due(self, job: Job) -> int:
        return min(_next_multiple(self.log_every_steps, job.step), job.plan.epoch_end(job.step))

    def act(self, job: Job) -> None:
        epoch_ends = job.plan.ends_epoch(job.step)
        self.score = None
        if epoch_ends or job.step % self.log_every_steps == 0 or job.step >= job.stop.last_step:
            self._record_interval(job)
        if epoch_ends:
            self._record_epoch(job)

    def _record_epoch(self, job: Job) -> None:
        seconds = self.epoch_seconds_before + time.perf_counter() - self.epoch_began
        self.epoch_seconds.append(seconds)
        steps_per_epoch = job.plan.steps_per_epoch
        epoch = -(-job.step // steps_per_epoch)
        before = (epoch - 1) * steps_per_epoch
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(before)
        cut_short = job.step < before + steps_per_epoch
        note = f"cut to {job.step - before} of {counted(steps_per_epoch, 'step')}" if cut_short else ""
        if epoch % self.evaluate_every_epochs == 0 or job.step == job.plan.steps:
            self.score = scored(job.evaluation, job.stepper.average)
            if self.score:
                self.write_score(job, self.split, self.score)
        score = self.score and (self.split, self.score.as_dict())
        line = epoch_line(epoch, self.epochs, note, self.epoch_loss.value, score, seconds, samples)
        self.display.line("  ".join(filter(None, [line, self.hardware.short_of_gpus()])))
        self.last_epoch_loss = self.epoch_loss.value
        self.epoch_loss = Mean()
        self.epoch_seconds_before = 0.0
        self.epoch_began = self.interval_began = time.perf_counter()

    def catch_up(self, job: Job) -> None:
        """Before a checkpoint: the losses since the last line belong to the epoch that it is in. A collective."""
        if job.step > self.interval_first_step:
            self._add(job.stepper.mean_loss())

    def _add(self, loss: Mean) -> None:
        self.interval_loss += loss
        self.epoch_loss += loss
        self.units += loss.units

    def write_score(self, job: Job, split: str, score: Score) -> None:
        """A line of an evaluation, unless a run that goes on has it already."""
        epoch = -(-job.step // job.plan.steps_per_epoch)
        if self.metrics.has(split, job.step):
            return
        self.metrics.write(kind=split, step=job.step, epoch=epoch, time=time.time(), **score.as_dict())

    def _record_interval(self, job: Job) -> None:
        self._add(job.stepper.mean_loss(self.hardware))  # waits for the device: the clock is read after it
        loss, self.interval_loss = self.interval_loss, Mean()
        norm = job.stepper.last_gradient_norm
        now = time.perf_counter()
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(self.interval_first_step)
        speeds = self.rates.of(samples, loss.units, now - self.interval_began)
        epoch = (job.step - 1) // job.plan.steps_per_epoch + 1
        self.metrics.write(
            kind="train",
            step=job.step,
            epoch=epoch,
            time=time.time(),
            loss=loss.value,
            lr=job.stepper.last_learning_rate,
            lrs=job.stepper.last_learning_rates,
            **({} if norm is None else {"grad_norm": norm}),
            **speeds,
            samples_seen=job.plan.samples_seen(job.step),
            figures=self.hardware.interval(now - self.interval_began),
        )
        self.display.numbers = f"loss {loss.value:.4f}  {in_words(speeds)}  {self.hardware.short()}"
        self.interval_began = now
        self.interval_first_step = job.step


class CheckpointHook:
    """A checkpoint every so many steps or minutes, or each epoch, and where training ends or stops."""

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
        """writer: on one process; the others take part without one. manifest: entries of every checkpoint's manifest.
        every_steps: None saves at the end of each epoch. best: save after every evaluation too. more_state: further
        entries of what training goes on with."""
        self.writer = writer
        self.record = record
        self.manifest = manifest
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.best = best
        self.more_state = more_state
        self.last_save = time.monotonic()

    def due(self, job: Job) -> int:
        return _next_multiple(self.every_steps, job.step) if self.every_steps else job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        at_this_step = job.step % self.every_steps == 0 if self.every_steps else job.plan.ends_epoch(job.step)
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
        up = self.writer is not None and time.monotonic() - self.last_save >= 60 * self.every_minutes
        return total(torch.tensor(float(up), device=job.stepper.device)).item() > 0

    def _save(self, job: Job) -> None:
        job.stepper.check()
        self.last_save = time.monotonic()
        self.record.catch_up(job)
        if self.writer:
            self.writer.wait()  # before the average is copied: else there are two snapshots at a time, and this copy
        average, writes = job.stepper.average, self.writer is not None
        taken = average and averaging.taken(average, job.strategy, job.module, copies=writes)
        with job.strategy.averaged(job.module) as buffers:
            if self.writer:
                self.writer.submit(lambda: self._snapshot(job, buffers, taken))

    def _snapshot(self, job: Job, buffers: Tensor, taken: averaging.Taken | None) -> Snapshot:
        average, state = taken or (None, None)
        training = job.stepper.state() | {"buffers": buffers, "record": self.record.state()} | self.more_state()
        training |= {averaging.STATE: state} if state else {}
        scores = {"test": None, self.record.split: self.record.score and self.record.score.as_dict()}
        return Snapshot(
            step=job.step,
            model=map_tensors(copy_of, job.module.model.state_dict()),
            training=map_tensors(copy_of, training),
            manifest={**self.manifest, **scores},
            average=average,
        )


def _next_multiple(period: int, step: int) -> int:
    return (step // period + 1) * period
