"""Runs the jobs of a sweep: starts them while devices are free, waits, and collects their ends."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from hydra_plugins.ddp_train_pool import _jobs
from hydra_plugins.ddp_train_pool._devices import Devices, PoolError
from hydra_plugins.ddp_train_pool._listener import SweepListener
from hydra_plugins.ddp_train_pool._signals import StopSignals

log = logging.getLogger("hydra_plugins.ddp_train_pool.launcher")
POLL_SECONDS = 0.1
"""Between two looks for devices that other sweeps have released. The end of a job is noticed at
once."""
PATIENCE_SECONDS = 5.0
"""Without a device, until the terminal shows a note."""
ALONE = -1
"""The key of the job that runs alone after all others, which belongs to no source."""


class JobSource(Protocol):
    """Where jobs come from, each under a key of the source."""

    def ask(self) -> tuple[int, list[str]] | None:
        """The key and the overrides of a job that may start now; None: there is none.

        Asked again when a job has ended.
        """
        ...

    def ended(self, key: int, returned: JobReturn) -> None:
        """A job has ended, and this is what it returned."""
        ...

    def jobs_to_stop(self, numbers: dict[int, int]) -> list[int]:
        """The keys of the jobs that get SIGTERM.

        numbers: those of the running jobs, by key.
        """
        ...


class ListedJobs:
    """A source whose jobs are all known from the beginning."""

    def __init__(self, jobs: Sequence[Sequence[str]], first: int) -> None:
        self.waiting = [(key, list(overrides)) for key, overrides in enumerate(jobs, first)]
        self.returned: dict[int, JobReturn] = {}

    def ask(self) -> tuple[int, list[str]] | None:
        return self.waiting.pop(0) if self.waiting else None

    def ended(self, key: int, returned: JobReturn) -> None:
        self.returned[key] = returned

    def jobs_to_stop(self, numbers: dict[int, int]) -> list[int]:
        return []


@dataclass(frozen=True)
class Application:
    """The application of a sweep: composes the config of a job, and calls its function."""

    hydra_context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    output: str | None
    """A file in the directory of each job for all that it prints; None: the terminal."""

    def compose(self, number: int, overrides: list[str]) -> DictConfig:
        """The config of a job."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = number
            config.hydra.job.num = number
        return config

    def call(self, config: DictConfig) -> JobReturn:
        """Run a job in this process."""
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def output_file(self, config: DictConfig) -> Path | None:
        """The file for what a job prints."""
        if not self.output:
            return None
        return Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir), self.output)


@dataclass(frozen=True)
class ComposedJob:
    """A job that can start as soon as there are devices for it."""

    key: int
    number: int
    overrides: list[str]
    config: DictConfig


class JobRunner:
    """Runs the jobs of a source, as many at a time as there are free devices."""

    def __init__(
        self,
        application: Application,
        source: JobSource,
        devices: Devices,
        listener: SweepListener,
        signals: StopSignals,
        start_delay_seconds: float,
    ) -> None:
        self.application = application
        self.source = source
        self.devices = devices
        self.listener = listener
        self.signals = signals
        self.start_delay_seconds = start_delay_seconds
        self.running: dict[int, _jobs.Job] = {}
        self.next_job: ComposedJob | None = None
        self.children_before: set[int] = set()
        """Processes that this one had started before the sweep."""
        self.last_start = -start_delay_seconds
        self.last_end = time.monotonic()
        self.waiting_was_noted = False

    def run(self) -> None:
        """Run all jobs. After a signal no more are started, and those that run are waited for."""
        self.children_before = _jobs.children()
        _jobs.adopt(True)
        try:
            while True:
                self.compose_next()
                if self._start_next():
                    continue
                if not self.running and (self.signals.received or self.next_job is None):
                    return
                self._note_waiting()
                self._wait()
                self.listener.while_waiting()
                self._stop_pruned()
                self._collect_ended()
        finally:
            self._kill_running()
            _jobs.adopt(False)

    def compose_next(self) -> None:
        """Find the next job that must run, if one may start now."""
        while self.next_job is None and self._may_start():
            asked = self.source.ask()
            if asked is None:
                break
            self.next_job = self._composed(*asked)
        if self.next_job is None and not self.running and not self.signals.received:
            alone = self.listener.job_alone()
            if alone is not None:
                number, overrides = alone
                config = self.application.compose(number, overrides)
                self.next_job = ComposedJob(ALONE, number, overrides, config)

    def _may_start(self) -> bool:
        return not self.signals.received and len(self.running) < self.devices.at_once

    def _composed(self, key: int, overrides: list[str]) -> ComposedJob | None:
        """The job; None if its result is known, or its config cannot be composed.

        The latter ends no other job.
        """
        number = self.listener.job_number(key, overrides)
        value = self.listener.known_value(number, overrides)
        if value is not None:
            returned = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
            returned.return_value = value
            self.source.ended(key, returned)
            return None
        try:
            config = self.application.compose(number, overrides)
        # whatever Hydra, OmegaConf or a resolver of the application raises
        except Exception as error:  # noqa: BLE001
            log.info("\t#%d : %s: %s", number, " ".join(filter_overrides(overrides)), error)
            returned = _jobs.failed(error, overrides)
            self.listener.job_ended(number, overrides, returned, 1, 0.0)
            self.source.ended(key, returned)
            return None
        return ComposedJob(key, number, overrides, config)

    def _start_next(self) -> bool:
        """Start the next job, if it is due and there are devices for it."""
        due = self.last_start + self.start_delay_seconds
        if self.next_job is None or not self._may_start() or time.monotonic() < due:
            return False
        job = self._start(self.next_job)
        if job is None:
            return False
        self.running[self.next_job.key] = job
        self.next_job = None
        self.last_start = time.monotonic()
        self.listener.job_started(job.number, job.overrides, job.grant.names)
        return True

    def _start(self, composed: ComposedJob) -> _jobs.Job | None:
        """The job, if there are devices, memory and a process for it."""
        grants = [job.grant for job in self.running.values()]
        grant = self.devices.take({name for grant in grants for name in grant.names})
        if grant is None:
            return None
        try:
            job = _jobs.start(
                composed.number,
                composed.overrides,
                grant,
                run=lambda: self.application.call(composed.config),
                output=self.application.output_file(composed.config),
                foreign_locks=[lock for other in grants for lock in other.locks],
            )
        except OSError as error:
            grant.release()
            if not self.running:
                raise PoolError(f"job {composed.number} cannot be started: {error}") from None
            return None  # until another one has ended
        shown = [*filter_overrides(composed.overrides), *grant.names]
        log.info("\t#%d : %s", composed.number, " ".join(shown))
        return job

    def _note_waiting(self) -> None:
        """Say once that other sweeps have the devices."""
        if self.running or self.waiting_was_noted:
            return
        if time.monotonic() > self.last_end + PATIENCE_SECONDS:
            self.waiting_was_noted = True
            wanted = f"{self.devices.per_job} of {', '.join(self.devices.names)}"
            print(f"note: waiting for devices that other sweeps use: {wanted}", file=sys.stderr)

    def _wait(self) -> None:
        """Wait for the end of a job, at most POLL_SECONDS; a signal ends the wait too."""
        poller = select.poll()
        descriptors = []
        try:
            for job in self.running.values():
                descriptor = os.pidfd_open(job.pid)
                descriptors.append(descriptor)
                poller.register(descriptor, select.POLLIN)
            poller.poll(POLL_SECONDS * 1000)
            self.signals.hand_on([*self.running.values()])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _stop_pruned(self) -> None:
        numbers = {key: job.number for key, job in self.running.items()}
        for key in self.source.jobs_to_stop(numbers):
            self.running[key].send(signal.SIGTERM)

    def _collect_ended(self) -> None:
        for key, job in list(self.running.items()):
            if not job.poll():
                continue
            del self.running[key]
            self.last_end = time.monotonic()
            alive = {other.pid for other in self.running.values()}
            _jobs.end_adopted(self.children_before | alive)
            job.grant.release()
            returned = job.returned()
            seconds = time.monotonic() - job.started
            log.info("\t#%d ended after %.1f s", job.number, seconds)
            exit_code = job.exit_code or 0
            self.listener.job_ended(job.number, job.overrides, returned, exit_code, seconds)
            if key != ALONE:
                self.source.ended(key, returned)

    def _kill_running(self) -> None:
        """End what is left after an error of this process."""
        for job in self.running.values():
            job.send(signal.SIGKILL)
            os.waitpid(job.pid, 0)
        _jobs.end_adopted(self.children_before)
        for job in self.running.values():
            job.grant.release()
