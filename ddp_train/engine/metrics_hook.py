"""What happens beside training: metrics are recorded, and checkpoints saved."""

from __future__ import annotations

import time
from typing import Any

from ddp_train.engine.loop import Job
from ddp_train.engine.scoring import score_with_average
from ddp_train.tasks.mean_loss import Mean
from ddp_train.tasks.score import Score
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.rates import Rates, in_words
from ddp_train.telemetry.summary_lines import epoch_line, epoch_title
from ddp_train.text import counted

RESIZE = "resize"
"""The kind of a line of metrics.jsonl: from here on another number of processes computes."""


class MetricsHook:
    """Loss and speed at each logging interval, a score at each evaluation: to metrics.jsonl and to
    the display."""

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
        self.units_before = 0.0
        """Of `interval_loss`, those of earlier processes: this one's clock knows nothing of
        them."""
        self.recoveries: list[dict[str, Any]] = []
        """For summary.json: each restart after a rank was lost."""
        self.resizes = [line for line in metrics.kept if line["kind"] == RESIZE]
        """Likewise: each change of the number of processes."""
        self.owes_score = False
        """Whether a stop has cut off the evaluation of the step that was done last. The run that
        goes on from there makes up for it: best checkpoint and early stopping depend on it."""
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
            "interval_loss": [self.interval_loss.sum, self.interval_loss.units],
            "units": self.units,
            "last_epoch_loss": self.last_epoch_loss,
            "figures": self.hardware.state(),
            "recoveries": self.recoveries,
            "owes_score": self.owes_score,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.seconds_before = state["seconds"]
        self.epoch_seconds = list(state["epoch_seconds"])
        self.epoch_seconds_before = state["this_epoch_seconds"]
        self.epoch_loss = Mean(*state["epoch_loss"])
        self.interval_loss = Mean(*state["interval_loss"])
        self.units_before = self.interval_loss.units
        self.units = state["units"]
        self.last_epoch_loss = state["last_epoch_loss"]
        self.hardware.load_state(state["figures"])
        self.recoveries = list(state["recoveries"])
        self.owes_score = state["owes_score"]

    def due(self, job: Job) -> int:
        return min(next_multiple(self.log_every_steps, job.step), job.plan.epoch_end(job.step))

    def act(self, job: Job) -> None:
        epoch_ends = job.plan.ends_epoch(job.step)
        job.score = None
        if self.owes_score:
            self._evaluate(job)
            self._show_epoch(job)
            return
        stopped = job.step >= job.stop.last_step and not job.stop.goes_on
        if epoch_ends or job.step % self.log_every_steps == 0 or stopped:
            self._record_interval(job)
        if epoch_ends:
            self._record_epoch(job)

    def _record_epoch(self, job: Job) -> None:
        self.epoch_seconds.append(
            self.epoch_seconds_before + time.perf_counter() - self.epoch_began
        )
        self.last_epoch_loss = self.epoch_loss.value
        if self._epoch(job) % self.evaluate_every_epochs == 0 or job.step == job.plan.steps:
            self._evaluate(job)
        self._show_epoch(job)
        self.epoch_loss = Mean()
        self.epoch_seconds_before = 0.0
        self.epoch_began = self.interval_began = time.perf_counter()

    def _epoch(self, job: Job) -> int:
        """That `job.step` is in."""
        return -(-job.step // job.plan.steps_per_epoch)

    def _evaluate(self, job: Job) -> None:
        """If a stop cuts it off, training ends with this step: a later one has other weights."""
        job.score = score_with_average(job.evaluation, job.stepper.average)
        self.owes_score = job.score is None
        if job.score:
            self.write_score(job, self.split, job.score)
        else:
            job.stop.end_at(job.step)

    def _show_epoch(self, job: Job) -> None:
        """The epoch that has just ended."""
        steps_per_epoch = job.plan.steps_per_epoch
        epoch = self._epoch(job)
        before = (epoch - 1) * steps_per_epoch
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(before)
        title = epoch_title(epoch, self.epochs)
        cut_short = job.step < before + steps_per_epoch
        if cut_short:
            title += f"  cut to {job.step - before} of {counted(steps_per_epoch, 'step')}"
        score = job.score and (self.split, job.score.as_dict())
        line = epoch_line(title, self.last_epoch_loss, score, self.epoch_seconds[-1], samples)
        self.display.line("  ".join(filter(None, [line, self.hardware.short_of_gpus()])))

    def catch_up(self, job: Job) -> None:
        """Before a checkpoint: the losses since the last line belong to the epoch that it is in. A
        collective."""
        if job.step > self.interval_first_step:
            self._add(job.stepper.mean_loss())

    def _add(self, loss: Mean) -> None:
        self.interval_loss += loss
        self.epoch_loss += loss
        self.units += loss.units

    def write_score(self, job: Job, split: str, score: Score) -> None:
        """A line of an evaluation, unless a run that goes on has it already."""
        if self.metrics.has(split, job.step):
            return
        self.metrics.write(
            kind=split, step=job.step, epoch=self._epoch(job), time=time.time(), **score.as_dict()
        )

    def _record_interval(self, job: Job) -> None:
        self._add(
            job.stepper.mean_loss(self.hardware)
        )  # waits for the device: the clock is read after it
        loss = self.interval_loss
        self.interval_loss = Mean()
        norm = job.stepper.last_gradient_norm
        now = time.perf_counter()
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(self.interval_first_step)
        speeds = self.rates.of(samples, loss.units - self.units_before, now - self.interval_began)
        self.units_before = 0.0
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
        numbers = (
            f"epoch {epoch}/{self.epochs}  loss {loss.value:.4f}  {in_words(speeds)} "
            f" {self.hardware.short()}"
        )
        self.display.interval(job.step, numbers)
        self.interval_began = now
        self.interval_first_step = job.step


def next_multiple(period: int, step: int) -> int:
    return (step // period + 1) * period
