"""The end of each epoch, and the lines that people see of epochs and evaluations."""

from __future__ import annotations

from ddp_train.engine.loop import Job
from ddp_train.engine.metrics_hook import MetricsHook, epoch_of
from ddp_train.telemetry.rates import in_words
from ddp_train.telemetry.summary_lines import epoch_line, epoch_title, evaluation_line, step_title
from ddp_train.text import counted


class EpochHook:
    """Closes epochs, and shows a line for each, and for each evaluation in the middle of one.

    In a run that counts steps, not epochs, the lines are those of its evaluations.
    """

    def __init__(self, metrics_hook: MetricsHook) -> None:
        """metrics_hook: has the numbers.

        The selection hook acts before: it may end the plan in the middle of an epoch.
        """
        self.metrics_hook = metrics_hook
        self.epochs = metrics_hook.intervals.epochs

    def due(self, job: Job) -> int:
        return job.plan.epoch_end(job.step)

    def act(self, job: Job) -> None:
        if self.metrics_hook.owes_score:
            return  # a stop request: the run that resumes here scores this step, and comes here
        ends_epoch = job.plan.ends_epoch(job.step)
        if ends_epoch:
            self.metrics_hook.end_epoch()
        if ends_epoch and self.epochs is not None:
            self._show_epoch(job, self.epochs)
        elif job.scores:
            self._show_evaluation(job)

    def _show_epoch(self, job: Job, epochs: int) -> None:
        steps_per_epoch = job.plan.steps_per_epoch
        epoch = epoch_of(job)
        steps_before = (epoch - 1) * steps_per_epoch
        steps = job.step - steps_before
        samples = job.plan.samples_seen(job.step) - job.plan.samples_seen(steps_before)
        title = epoch_title(epoch, epochs)
        if steps < steps_per_epoch:
            title += f"  cut to {steps} of {counted(steps_per_epoch, 'step')}"
        seconds = self.metrics_hook.epoch_seconds[-1]
        loss = self.metrics_hook.last_epoch_loss
        self._show(epoch_line(title, loss, self._scores(job), seconds, samples))

    def _show_evaluation(self, job: Job) -> None:
        interval = self.metrics_hook.last_interval
        speeds = in_words(interval) if interval else ""
        title = step_title(job.step, job.plan.steps)
        self._show(evaluation_line(title, interval.get("loss"), self._scores(job), speeds))

    def _scores(self, job: Job) -> dict[str, dict[str, object]]:
        return {name: score.as_dict() for name, score in job.scores.items()}

    def _show(self, line: str) -> None:
        gpus = self.metrics_hook.hardware.gpu_text()
        self.metrics_hook.display.line("  ".join(filter(None, [line, gpus])))
