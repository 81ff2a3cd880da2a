"""A trace of a few steps by torch's profiler, for a viewer such as Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_train.engine.loop import Hook, Job
from ddp_train.errors import ConfigError
from ddp_train.telemetry.console import Display
from ddp_train.text import counted

VIEWER = "https://ui.perfetto.dev"
ROWS = 25
"""Rows of the table of operators, the slowest first."""
log = logging.getLogger(__name__)


def profile_hooks(
    steps: str | None, job: Job, path: Path, device: str, display: Display
) -> list[Hook]:
    """The hook that traces the steps which a config names.

    steps: FIRST:LAST; None: none are traced.
    path: see ProfileHook.

    Raises ConfigError if the run ends before.
    """
    if steps is None:
        return []
    first, last = map(int, steps.split(":"))
    if first > job.plan.steps:
        rule = "trace earlier steps, or raise train.epochs or train.max_steps"
        raise ConfigError(
            [f"train.profile_steps={steps}: the run has {counted(job.plan.steps, 'step')}; {rule}"]
        )
    if job.step >= last:
        display.line(
            f"profile: nothing is traced, since {counted(job.step, 'step')} of the run are"
            " done already"
        )
        return []
    return [ProfileHook(first, last, path, device, display)]


class ProfileHook:
    """Traces steps `first` to `last`, both included, of this process: RANK.json.gz, and a table in
    RANK.txt. Nothing is exchanged. If a run resumes in between, is stopped or ends, the steps are
    those that it does itself.

    A hook acts after a step, so that the first step of a start cannot be traced. It compiles and
    allocates, and is not a usual step anyway.
    """

    def __init__(self, first: int, last: int, path: Path, device: str, display: Display) -> None:
        """path: of the files, without their suffixes."""
        self.first = first
        self.last = last
        self.path = path
        self.device = device
        self.display = display
        self.profile: profile | None = None
        self.began = 0
        self.mark = record_function("")

    def due(self, job: Job) -> int:
        if job.step < self.last:
            return max(job.step + 1, self.first - 1)
        return job.plan.steps

    def act(self, job: Job) -> None:
        last = min(self.last, job.plan.steps, job.stop.last_step)
        if self.profile:
            self.mark.__exit__(None, None, None)
            if job.step >= last:
                self._write(self.profile, job.step)
                self.profile = None
        elif self.first - 1 <= job.step < last:
            activities = [ProfilerActivity.CPU]
            if self.device != "cpu":
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities, record_shapes=True)
            self.began = job.step
            self.profile.start()
        if self.profile:
            self.mark = record_function(f"step {job.step + 1}")
            self.mark.__enter__()

    def _write(self, trace: profile, step: int) -> None:
        key = "self_cpu_time_total"
        if self.device != "cpu":
            key = "self_device_time_total"
            # The host is ahead of the GPU, whose part of the last steps would be missing.
            torch.cuda.synchronize()
        trace.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(f"{self.path}.json.gz")
            table = trace.key_averages().table(sort_by=key, row_limit=ROWS)
            self.path.with_suffix(".txt").write_text(table)
        except OSError as error:  # a trace is not worth a run
            log.warning("%s cannot be written: %s", self.path, error)
            return
        steps = f"steps {self.began + 1} to {step}"
        if step == self.began + 1:
            steps = f"step {step}"
        self.display.line(f"profile: {steps} in {self.path}.json.gz; open it at {VIEWER}")
