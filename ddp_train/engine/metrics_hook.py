"""Losses, speeds and scores between two steps: to metrics.jsonl and to the display."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ddp_train.engine.loop import Job
from ddp_train.engine.order_check import order_checks
from ddp_train.engine.scoring import score_sets
from ddp_train.tasks.mean_loss import Mean
from ddp_train.tasks.score import Score
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile
from ddp_train.telemetry.rates import Rates, in_words
from ddp_train.telemetry.summary_lines import epoch_title

RESIZE = "resize"
"""The kind of a line of metrics.jsonl: from here on another number of processes computes."""


@dataclass(frozen=True)
class Intervals:
    """The steps after which a run logs its loss and scores its model, beside the last one."""

    epochs: int | None
    """Number of epochs of the run; None: its steps end it."""
    log_every_steps: int
    evaluate_every_epochs: int | None = None
    """None: each epoch."""
    evaluate_every_steps: int | None = None
    """None: at ends of epochs."""

    def next_evaluation(self, job: Job) -> int:
        """The next step after which the model may be scored."""
        if self.evaluate_every_steps:
            return next_multiple(self.evaluate_every_steps, job.step)
        return job.plan.epoch_end(job.step)

    def include_evaluation(self, job: Job) -> bool:
        """True if the model is scored after `job.step`."""
        if job.step == job.plan.steps:
            return True
        if self.evaluate_every_steps:
            return job.step % self.evaluate_every_steps == 0
        every = self.evaluate_every_epochs or 1
        return job.plan.ends_epoch(job.step) and epoch_of(job) % every == 0


class MetricsHook:
    """Loss and speed at each logging interval, and before an evaluation; a score at each
    evaluation."""

    def __init__(
        self,
        display: Display,
        metrics: MetricsFile,
        hardware: HardwareMonitor,
        intervals: Intervals,
        rates: Rates = Rates(),  # noqa: B008  it is frozen
    ) -> None:
        self.display = display
        self.metrics = metrics
        self.hardware = hardware
        self.intervals = intervals
        self.rates = rates
        self.epoch_seconds: list[float] = []
        """Seconds of each epoch that was completed."""
        self.epoch_loss = Mean()
        """Loss of the part of an epoch that is in metrics.jsonl or in a checkpoint."""
        self.interval_loss = Mean()
        """Loss since the last line of metrics, as far as it is in a checkpoint."""
        self.units = 0.0
        """Units (samples, tokens, pixels) since the start of the run."""
        self.last_interval: dict[str, Any] = {}
        """Loss and speeds of the last logging interval of this process."""
        self.last_epoch_loss: float | None = None
        """The mean over the last epoch that was completed, or cut short by the end of the run."""
        self.seconds_before = 0.0
        """Seconds of training in earlier processes of this run."""
        self.epoch_seconds_before = 0.0
        """Seconds in the unfinished epoch, likewise."""
        self.units_before = 0.0
        """Units of `interval_loss` that earlier processes computed: this one's clock knows nothing
        of them."""
        self.recoveries: list[dict[str, Any]] = []
        """Each restart after a rank was lost, for summary.json."""
        self.resizes = [line for line in metrics.kept if line["kind"] == RESIZE]
        """Each change of the number of processes, for summary.json."""
        self.hooks_log = False
        """Hooks of the user's may log numbers, after this hook has acted."""
        self.owes_score = False
        """A stop has cut off the evaluation of the step that was done last. The run that
        resumes there makes up for it: best checkpoint and early stopping depend on it."""
        self.start_clocks(step=0)

    def start_clocks(self, step: int) -> None:
        """Start to measure, when everything is built. step: optimizer steps that are done."""
        self.began = self.epoch_began = self.interval_began = time.perf_counter()
        self.interval_first_step = step
        self.hardware.collect()  # set-up does not count in the first interval

    @property
    def seconds(self) -> float:
        """Seconds of training, without the time between the processes of a run that was resumed."""
        return self.seconds_before + time.perf_counter() - self.began

    @property
    def _seconds_of_this_epoch(self) -> float:
        return self.epoch_seconds_before + time.perf_counter() - self.epoch_began

    def state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs to report on the whole of it."""
        return {
            "seconds": self.seconds,
            "epoch_seconds": list(self.epoch_seconds),
            "this_epoch_seconds": self._seconds_of_this_epoch,
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
        next_log = next_multiple(self.intervals.log_every_steps, job.step)
        next_evaluation = self.intervals.next_evaluation(job)
        return min(next_log, next_evaluation, job.plan.epoch_end(job.step))

    def act(self, job: Job) -> None:
        job.scores = {}
        if self.owes_score:
            self._evaluate(job)
            return
        evaluates = self.intervals.include_evaluation(job)
        is_multiple = job.step % self.intervals.log_every_steps == 0
        is_stopped = job.step >= job.stop.last_step and not job.stop.goes_on
        if evaluates or is_multiple or is_stopped or job.plan.ends_epoch(job.step):
            self._log_interval(job)
        if evaluates:
            self._evaluate(job)

    def _evaluate(self, job: Job) -> None:
        """Score this step. If a stop cuts that off, training ends here: later weights differ."""
        began = time.perf_counter()
        scores = score_sets(job.evaluations, job.stepper.average)
        self.owes_score = scores is None
        if scores is None:
            job.stop.end_at(job.step)
        else:
            job.scores = scores
            for name, score in scores.items():
                self.write_score(job, name, score)
        # Speeds are those of training.
        self.epoch_began += time.perf_counter() - began
        self.interval_began = time.perf_counter()

    def end_epoch(self) -> None:
        """Close an epoch that has ended, or was cut short by the end of the run."""
        self.epoch_seconds.append(self._seconds_of_this_epoch)
        self.last_epoch_loss = self.epoch_loss.value
        self.epoch_loss = Mean()
        self.epoch_seconds_before = 0.0
        self.epoch_began = self.interval_began = time.perf_counter()

    def catch_up(self, job: Job) -> None:
        """Take the losses since the last line before a checkpoint: they belong to the epoch that it
        is in. A collective."""
        if job.step > self.interval_first_step or self.hooks_log:
            self._add(job.stepper.mean_loss(job.stepper.logged))
            self._write_moments(job)

    def _add(self, loss: Mean) -> None:
        self.interval_loss += loss
        self.epoch_loss += loss
        self.units += loss.units

    def write_score(self, job: Job, split: str, score: Score) -> None:
        """Write the line of an evaluation, unless a resumed run has it already."""
        if not self.metrics.has(split, job.step):
            self._write(split, job, **score.as_dict())

    def _write(self, kind: str, job: Job, **numbers: Any) -> None:
        self.metrics.write(
            kind=kind, step=job.step, epoch=epoch_of(job), time=time.time(), **numbers
        )

    def _write_moments(self, job: Job) -> None:
        """Write a line for each step after which hooks logged numbers, unless a resumed run has it
        already."""
        for moment, numbers in job.stepper.logged.take_moments():
            step = moment.step
            if self.metrics.has(moment.kind, step):
                continue
            epoch = max(1, -(-step // job.plan.steps_per_epoch))
            self.metrics.write(
                kind=moment.kind, step=step, epoch=epoch, time=time.time(), **numbers
            )

    def _log_interval(self, job: Job) -> None:
        stepper = job.stepper
        orders = order_checks(job.plan, job.step)
        # Waits for the device.
        self._add(stepper.mean_loss(self.hardware, stepper.logged, *orders))
        self._write_moments(job)  # of earlier steps than this one
        gradient_norm = stepper.last_gradient_norm
        now = time.perf_counter()
        seconds = now - self.interval_began
        loss = self.interval_loss
        samples_seen = job.plan.samples_seen(job.step)
        samples = samples_seen - job.plan.samples_seen(self.interval_first_step)
        speeds = self.rates.of(samples, loss.units - self.units_before, seconds)
        numbers: dict[str, Any] = {
            "loss": loss.value,
            "lr": stepper.last_learning_rate,
            "lrs": stepper.last_learning_rates,
        }
        if gradient_norm is not None:
            numbers["grad_norm"] = gradient_norm
        self._write(
            "train",
            job,
            **numbers,
            **speeds,
            samples_seen=samples_seen,
            figures=self.hardware.take_interval(seconds),
            **stepper.logged.take(),
        )
        self.last_interval = {"loss": loss.value, **speeds}
        place = f"{epoch_title(epoch_of(job), self.intervals.epochs)}  loss {loss.value:.4f}"
        self.display.interval(job.step, f"{place}  {in_words(speeds)}  {self.hardware.bar_text()}")
        self.interval_loss = Mean()
        self.units_before = 0.0
        self.interval_began = now
        self.interval_first_step = job.step


def epoch_of(job: Job) -> int:
    """Number of the epoch that the last step was in, from 1."""
    return -(-job.step // job.plan.steps_per_epoch)


def next_multiple(period: int, step: int) -> int:
    return (step // period + 1) * period
