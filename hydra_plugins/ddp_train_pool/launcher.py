"""The launcher that Hydra finds: starts jobs while devices are free, waits, and hands signals
on."""
# No `from __future__ import annotations`: Hydra runs this module before it is in sys.modules, where
# dataclasses look.

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from hydra_plugins.ddp_train_pool import _jobs
from hydra_plugins.ddp_train_pool._devices import Devices, PoolError, asked_gpus, visible_gpus

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
"""Between two looks for devices that other sweeps have given back. The end of an own job is noticed
at once."""
TELL_SECONDS = 5.0
"""Without a device, until the terminal is told."""
Running = dict[int, tuple[_jobs.Job, list[str]]]
"""Jobs and their overrides by the number that their source gave them."""
ALONE = -1
"""Under this number the job runs that no source has."""


@dataclass
class PoolConf:
    _target_: str = "hydra_plugins.ddp_train_pool.launcher.PoolLauncher"
    gpus_per_trial: int | None = None
    """GPUs of each job; None: one if there are any; 0: none, and `processes_at_once` says how many
    jobs."""
    processes_at_once: int = 1
    """Jobs at a time that use no GPU."""
    devices: list[str] | None = None
    """The devices to use, as CUDA_VISIBLE_DEVICES names them; None: those that are visible."""
    lock_folder: str | None = None
    """Where sweeps lock devices against each other; None: one that all users of this host share."""
    start_delay_seconds: float = 0.0
    """At least so long between two starts."""
    output: str | None = None
    """A file in the directory of each job for all that it prints; None: the terminal."""


ConfigStore.instance().store(
    group="hydra/launcher", name="pool", node=PoolConf, provider="ddp_train_pool"
)


class Source(Protocol):
    """Where jobs come from, each under a number of the source's own."""

    def ask(self) -> tuple[int, list[str]] | None:
        """The number and the overrides of a job that may start now; None: none. Asked again when
        one has ended."""
        ...

    def ended(self, number: int, returned: JobReturn) -> None: ...

    def to_stop(self, running: dict[int, int]) -> list[int]:
        """The jobs that get SIGTERM. running: their numbers, and those that the application knows
        them by."""
        ...


class Listed:
    """All jobs are known from the beginning."""

    def __init__(self, jobs: Sequence[Sequence[str]], first: int) -> None:
        self.waiting = [(first + place, list(overrides)) for place, overrides in enumerate(jobs)]
        self.returned: dict[int, JobReturn] = {}

    def ask(self) -> tuple[int, list[str]] | None:
        return self.waiting.pop(0) if self.waiting else None

    def ended(self, number: int, returned: JobReturn) -> None:
        self.returned[number] = returned

    def to_stop(self, running: dict[int, int]) -> list[int]:
        return []


class PoolLauncher(Launcher):
    """Runs each job in a process of its own, as many at a time as there are free devices.

    The object whose method the application's function is may have methods, which are called in the
    process that starts the jobs: `before_jobs()`; `job_number(number, overrides)`, once for each
    job before it starts: the number, and so the folder, that it gets; `known_value(number,
    overrides)`: what it would return, if that is known already, and None if it must run;
    `job_started(number, overrides, devices)`; `while_waiting()`, ten times a second;
    `job_ended(number, overrides, JobReturn, exit_code, seconds)`; `job_alone()`: the number and the
    overrides of a job that runs alone after all others, or None; `refused(problem)`: says why the
    sweep cannot run, or go on, and returns the exit code. What hydra/sweeper=pool_optuna calls
    stands there. A signal goes to all jobs, is waited for, and is raised again at the end; the
    third one kills them.
    """

    def __init__(
        self,
        gpus_per_trial: int | None,
        processes_at_once: int,
        devices: Sequence[str] | None,
        lock_folder: str | None,
        start_delay_seconds: float,
        output: str | None,
    ) -> None:
        super().__init__()
        self.gpus_per_trial = gpus_per_trial
        self.processes_at_once = processes_at_once
        self.devices = None if devices is None else [str(device) for device in devices]
        self.lock_folder = Path(lock_folder).expanduser() if lock_folder else None
        self.start_delay_seconds = start_delay_seconds
        self.output = output
        self.received: list[int] = []
        self.handed_on = 0

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        listed = Listed(job_overrides, initial_job_idx)
        with self.refusing():
            self.launch_from(listed, len(job_overrides))
        return [listed.returned[number] for number in sorted(listed.returned)]

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Lets the application say a PoolError, if it can."""
        try:
            yield
        except PoolError as error:
            if (code := self.tell("refused", str(error))) is None:
                raise
            raise _jobs.SweepEnd(code) from None

    def launch_from(self, source: Source, count: int) -> None:
        """Runs what `source` has, one job as soon as there are devices for it. count: of jobs, for
        the log."""
        setup_globals()
        HydraConfig.instance().set_config(self.config)  # for what `tell` calls; a job sets its own
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        if reason := _jobs.cannot_fork():
            raise PoolError(reason)
        pool = self._pool()
        with contextlib.closing(pool), self._listening():
            log.info("Launching %d jobs, at most %d at a time", count, pool.at_once)
            self.tell("before_jobs")
            self._run_all(pool, source)
        if (
            self.received
        ):  # for whoever listened before: KeyboardInterrupt, or the end of this process
            signal.raise_signal(self.received[0])

    def _pool(self) -> Devices:
        per_job = self.gpus_per_trial
        if per_job == 0:
            names = []
        elif self.devices is not None:
            names = asked_gpus(self.devices)
        else:
            names = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        per_job = min(1, len(names)) if per_job is None else per_job
        wrong = {
            "gpus_per_trial": (per_job, per_job < 0),
            "processes_at_once": (self.processes_at_once, self.processes_at_once < 1),
            "start_delay_seconds": (self.start_delay_seconds, self.start_delay_seconds < 0),
        }
        for name, (value, is_wrong) in wrong.items():
            if is_wrong:
                raise PoolError(f"hydra.launcher.{name}={value}: is too small")
        return Devices(names, per_job, self.processes_at_once, self.lock_folder)

    def _run_all(self, pool: Devices, source: Source) -> None:
        running: Running = {}
        keep = _jobs.children()
        last_start = -self.start_delay_seconds
        ready = None
        asked = 0
        overrides = list[str]()
        last_end = time.monotonic()
        told = False
        _jobs.adopt(True)
        try:
            while True:
                may_start = not self.received and len(running) < pool.at_once
                if may_start and ready is None and (drawn := source.ask()):
                    asked, overrides = drawn
                    ready = self._make_ready(asked, overrides)
                    if isinstance(ready, JobReturn):
                        ready = source.ended(asked, ready)
                        continue
                elif (
                    not running
                    and ready is None
                    and not self.received
                    and (drawn := self.tell("job_alone"))
                ):
                    asked, (number, overrides) = ALONE, drawn
                    ready = number, self._composed(number, overrides)
                is_due = may_start and time.monotonic() >= last_start + self.start_delay_seconds
                if is_due and ready and (job := self._start(pool, *ready, overrides, running)):
                    running[asked], ready = (job, overrides), None
                    last_start = time.monotonic()
                    self.tell("job_started", job.number, overrides, job.devices)
                    continue
                if not running and (self.received or ready is None):
                    return
                if not running and not told and time.monotonic() > last_end + TELL_SECONDS:
                    told = True
                    names = ", ".join(pool.names)
                    print(
                        f"note: waits for {pool.per_job} of {names}: other sweeps have them",
                        file=sys.stderr,
                    )
                self._wait([job for job, _ in running.values()])
                self.tell("while_waiting")
                for number in source.to_stop(
                    {number: job.number for number, (job, _) in running.items()}
                ):
                    running[number][0].send(signal.SIGTERM)
                for number, (job, words) in list(running.items()):
                    if job.poll():
                        del running[number]
                        last_end = time.monotonic()
                        _jobs.end_adopted(keep | {other.pid for other, _ in running.values()})
                        job.free_devices()
                        returned = job.returned(words)
                        seconds = time.monotonic() - job.started
                        log.info("\t#%d ended after %.1f s", job.number, seconds)
                        self.tell("job_ended", job.number, words, returned, job.exit_code, seconds)
                        if number != ALONE:
                            source.ended(number, returned)
        finally:
            for job, _ in running.values():  # only after an error here
                job.send(signal.SIGKILL)
                os.waitpid(job.pid, 0)
            _jobs.end_adopted(keep)
            for job, _ in running.values():
                job.free_devices()
            _jobs.adopt(False)

    def _make_ready(self, number: int, overrides: list[str]) -> tuple[int, DictConfig] | JobReturn:
        """The number and the config of a job; its result, if that is known, or if the config cannot
        be composed, which ends no other job."""
        number = self.tell("job_number", number, overrides, default=number)
        if (known := self.tell("known_value", number, overrides)) is not None:
            returned = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
            returned.return_value = known
            return returned
        try:
            return number, self._composed(number, overrides)
        except Exception as error:  # noqa: BLE001  whatever Hydra, OmegaConf or a resolver of the application raises
            log.info("\t#%d : %s: %s", number, " ".join(filter_overrides(overrides)), error)
            returned = _jobs.failed(error, overrides)
            self.tell("job_ended", number, overrides, returned, 1, 0.0)
            return returned

    def _composed(self, number: int, overrides: list[str]) -> DictConfig:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return config

    def _start(
        self, pool: Devices, number: int, config: DictConfig, overrides: list[str], running: Running
    ) -> Any:
        """The job, if there are devices for it."""
        with pool.offered(
            {device for job, _ in running.values() for device in job.devices}
        ) as offer:
            if offer is None:
                return None
            if self.output:
                folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir))
            else:
                folder = None
            output = folder and folder / str(self.output)
            of_others = [lock for job, _ in running.values() for lock in job.locks]
            try:
                job = _jobs.start(
                    number, offer[0], lambda: self._run_job(config), output, of_others
                )
            except OSError as error:
                if not running:
                    raise PoolError(f"job {number} cannot be started: {error}") from None
                return None  # no memory, or no processes left, until another one has ended
            job.locks, offer[1][:] = (
                offer[1][:],
                [],
            )  # kept here, for its processes that do not hold them
            log.info("\t#%d : %s", number, " ".join([*filter_overrides(overrides), *offer[0]]))
            return job

    def _run_job(self, config: DictConfig) -> JobReturn:
        """In the job's process."""
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def _wait(self, running: list[_jobs.Job]) -> None:
        """For the end of a job, at most POLL_SECONDS; a signal ends it too."""
        poller = select.poll()
        opened = []
        try:
            for job in running:
                opened.append(os.pidfd_open(job.pid))
                poller.register(opened[-1], select.POLLIN)
            poller.poll(POLL_SECONDS * 1000)
            if len(self.received) > self.handed_on:
                self.handed_on = len(self.received)
                for job in running:
                    job.send(signal.SIGKILL if self.handed_on > 2 else self.received[-1])
        finally:
            for descriptor in opened:
                os.close(descriptor)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Records signals, and restores what was there before."""
        before = {number: signal.getsignal(number) for number in _jobs.SIGNALS}
        heeded = [
            number for number, handler in before.items() if handler != signal.SIG_IGN
        ]  # nohup ignores SIGHUP
        for number in heeded:
            signal.signal(number, lambda number, _: self.received.append(number))
        try:
            yield
        finally:
            for number in heeded:
                signal.signal(number, before[number])

    def tell(self, method: str, *values: Any, default: Any = None) -> Any:
        """What the application's method returns; `default` if it has none."""
        told = getattr(getattr(self.task_function, "__self__", None), method, None)
        return told(*values) if told else default
