"""What happens beside training: numbers are recorded, checkpoints written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ddp_train import checkpoint
from ddp_train.health import Position
from ddp_train.loop import Job, evaluate
from ddp_train.metrics import MetricsFile, Score
from ddp_train.progress import Display, epoch_line


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
    ) -> None:
        self.display, self.metrics, self.device, self.epochs = display, metrics, device, epochs
        self.log_every_steps, self.evaluate_every_epochs = log_every_steps, evaluate_every_epochs
        self.epoch_seconds: list[float] = []
        self.samples_here = 0
        """Samples trained on in this process's time, over all processes."""
        self.score: Score | None = None
        self.loss: float | None = None
        self.epoch_began = self.interval_began = time.perf_counter()
        self.epoch_first_step = self.interval_first_step = 0

    def begin(self, job: Job) -> None:
        """Starts the clocks, after all the building."""
        self.epoch_began = self.interval_began = time.perf_counter()
        self.epoch_first_step = self.interval_first_step = job.step

    def due(self, job: Job) -> int:
        return min(_next_multiple(self.log_every_steps, job.step), job.plan.epoch_end(job.step))

    def act(self, job: Job) -> None:
        ends = job.plan.ends_epoch(job.step)
        if ends or job.step % self.log_every_steps == 0:
            self._record_interval(job)
        if ends:
            self._record_epoch(job)

    def _record_epoch(self, job: Job) -> None:
        seconds = time.perf_counter() - self.epoch_began
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(self.epoch_first_step)
        self.epoch_seconds.append(seconds)
        self.samples_here += samples
        epoch = -(-job.step // job.plan.steps_per_epoch)
        due = epoch % self.evaluate_every_epochs == 0 or job.step == job.plan.steps
        self.score = evaluate(job.evaluation) if due else None
        if self.score:
            self.metrics.write(kind="test", step=job.step, epoch=epoch, **self.score.as_dict())
        self.display.line(epoch_line(epoch, self.epochs, self.loss, self.score, seconds, samples))
        self.begin(job)

    def _record_interval(self, job: Job) -> None:
        self.loss = job.stepper.losses.mean(self.device)  # waits for the device: the clock is read after it
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
        )
        self.display.numbers = f"loss {self.loss:.4f}  {speed:,.0f} samples/s"
        self.interval_began, self.interval_first_step = now, job.step


class Save:
    """A checkpoint every so many steps, or each epoch, and at the end. Written by one process."""

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        every_steps: int | None,
        keep: int,
        active: bool,
        position: Position,
    ) -> None:
        self.run_dir, self.config, self.every_steps, self.keep = run_dir, config, every_steps, keep
        self.active, self.position = active, position

    def due(self, job: Job) -> int:
        return _next_multiple(self.every_steps, job.step) if self.every_steps else job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        due = job.step % self.every_steps == 0 if self.every_steps else job.plan.ends_epoch(job.step)
        if not due and job.step < job.plan.steps:
            return
        self.position.phase = "checkpoint"
        job.strategy.agree(job.module)
        if self.active:
            training = {"optimizer": job.stepper.optimizer.state_dict(), "scaler": job.stepper.scaler.state_dict()}
            checkpoint.save(self.run_dir, job.step, job.module.model, training, self.config, self.keep)


def _next_multiple(period: int, step: int) -> int:
    return (step // period + 1) * period
