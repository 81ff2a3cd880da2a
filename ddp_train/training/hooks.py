"""What happens beside training: numbers are recorded, checkpoints written."""

from __future__ import annotations

import time
from typing import Any

import torch

from ddp_train.config.schema import CheckpointConfig
from ddp_train.distributed.process_group import total
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.task import Score
from ddp_train.telemetry.console import Display, epoch_line
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.tensor_tree import map_tensors
from ddp_train.text import counted
from ddp_train.training.checkpoint import Snapshot, Writer, copy_of
from ddp_train.training.loop import Job, evaluate


class Record:
    """Loss and speed at each logging interval, a score at each evaluation: to metrics.jsonl and to the display."""

    def __init__(
        self,
        display: Display,
        metrics: MetricsFile,
        device: str,
        epochs: int,
        log_every_steps: int,
        evaluate_every_epochs: int,
        status: RankStatus,
        figures: HardwareMonitor | None = None,
    ) -> None:
        """figures: those of this process's GPUs too, where it has some."""
        self.display, self.metrics, self.device, self.epochs = display, metrics, device, epochs
        self.status, self.figures = status, figures or HardwareMonitor(status)
        self.log_every_steps, self.evaluate_every_epochs = log_every_steps, evaluate_every_epochs
        self.epoch_seconds: list[float] = []
        self.score: Score | None = None
        """Of the step that was done last, if it was evaluated."""
        self.loss: float | None = None
        self.seconds_before = self.epoch_seconds_before = 0.0
        """In earlier processes of this run: altogether, and in the epoch that is going on."""
        self.start_clocks(step=0)

    def start_clocks(self, step: int) -> None:
        """After all the building. step: optimizer steps that are done."""
        self.began = self.epoch_began = self.interval_began = time.perf_counter()
        self.interval_first_step = step
        self.figures.collect()  # what building took is not of the first interval

    @property
    def seconds(self) -> float:
        """Since training began, without what happened between the processes of a run that was resumed."""
        return self.seconds_before + time.perf_counter() - self.began

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to tell of the whole of it."""
        epoch = self.epoch_seconds_before + time.perf_counter() - self.epoch_began
        return {
            "seconds": self.seconds,
            "epoch_seconds": list(self.epoch_seconds),
            "this_epoch_seconds": epoch,
            "figures": self.figures.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.seconds_before, self.epoch_seconds = state["seconds"], list(state["epoch_seconds"])
        self.epoch_seconds_before = state["this_epoch_seconds"]
        self.figures.load_state(state.get("figures", {}))  # older checkpoints have none

    def due(self, job: Job) -> int:
        return min(_next_multiple(self.log_every_steps, job.step), job.plan.epoch_end(job.step))

    def act(self, job: Job) -> None:
        self.status.phase = "record"
        ends = job.plan.ends_epoch(job.step)
        self.score = None
        if ends or job.step % self.log_every_steps == 0 or job.step >= job.stop.last_step:
            self._record_interval(job)
        if ends:
            self._record_epoch(job)

    def _record_epoch(self, job: Job) -> None:
        seconds = self.epoch_seconds_before + time.perf_counter() - self.epoch_began
        self.epoch_seconds.append(seconds)
        epoch = -(-job.step // job.plan.steps_per_epoch)
        before, whole = (epoch - 1) * job.plan.steps_per_epoch, job.plan.steps_per_epoch
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(before)
        cut = "" if job.step == before + whole else f"cut to {job.step - before} of {counted(whole, 'step')}"
        if epoch % self.evaluate_every_epochs == 0 or job.step == job.plan.steps:
            self.score = evaluate(job.evaluation)
            if self.score:
                self.metrics.write(kind="test", step=job.step, epoch=epoch, **self.score.as_dict())
        line = epoch_line(epoch, self.epochs, cut, self.loss, self.score, seconds, samples)
        self.display.line("  ".join(filter(None, [line, self.figures.short_of_gpus()])))
        self.epoch_seconds_before = 0.0
        self.epoch_began = self.interval_began = time.perf_counter()

    def _record_interval(self, job: Job) -> None:
        self.loss = job.stepper.mean_loss(self.figures)  # waits for the device: the clock is read after it
        now = time.perf_counter()
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(self.interval_first_step)
        speed = samples / (now - self.interval_began)
        epoch = (job.step - 1) // job.plan.steps_per_epoch + 1
        self.metrics.write(
            kind="train",
            step=job.step,
            epoch=epoch,
            loss=self.loss,
            lr=job.stepper.last_learning_rate,
            samples_per_second=speed,
            samples_seen=job.plan.samples_seen(job.step),
            figures=self.figures.interval(now - self.interval_began),
        )
        self.display.numbers = f"loss {self.loss:.4f}  {speed:,.0f} samples/s  {self.figures.short()}"
        self.interval_began, self.interval_first_step = now, job.step


class Save:
    """A checkpoint every so many steps or minutes, or each epoch, and where training ends or stops."""

    def __init__(
        self,
        writer: Writer | None,
        record: Record,
        manifest: dict[str, Any],
        config: CheckpointConfig,
        status: RankStatus,
    ) -> None:
        """writer: on one process; the others take part without one. manifest: what stands in every checkpoint's."""
        self.writer, self.record, self.manifest, self.status = writer, record, manifest, status
        self.every_steps, self.every_minutes, self.best = config.every_steps, config.every_minutes, config.best
        self.last_save = time.monotonic()

    def due(self, job: Job) -> int:
        return _next_multiple(self.every_steps, job.step) if self.every_steps else job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        at_this_step = job.step % self.every_steps == 0 if self.every_steps else job.plan.ends_epoch(job.step)
        evaluated = self.best and self.record.score is not None
        last = job.step >= min(job.plan.steps, job.stop.last_step)
        if at_this_step or evaluated or last or self._time_is_up():
            self._save(job)
        if self.writer and last:
            self.writer.finish()

    def _time_is_up(self) -> bool:
        """By the clock of the process that writes: the others ask it, at every logging interval."""
        if self.every_minutes is None:
            return False
        up = self.writer is not None and time.monotonic() - self.last_save >= 60 * self.every_minutes
        return total(torch.tensor(float(up), device=self.record.device)).item() > 0

    def _save(self, job: Job) -> None:
        self.status.phase = "checkpoint"
        job.stepper.check()
        self.last_save = time.monotonic()
        with job.strategy.averaged(job.module) as buffers:
            if self.writer:
                self.writer.submit(lambda: self._snapshot(job, buffers))

    def _snapshot(self, job: Job, buffers: torch.Tensor) -> Snapshot:
        training = job.stepper.state() | {"buffers": buffers, "record": self.record.state()}
        return Snapshot(
            step=job.step,
            model=map_tensors(copy_of, job.module.model.state_dict()),
            training=map_tensors(copy_of, training),
            manifest={**self.manifest, "test": self.record.score and self.record.score.as_dict()},
        )


def _next_multiple(period: int, step: int) -> int:
    return (step // period + 1) * period
