"""`hydra/launcher=pool`: each job in a process of its own, while devices are free."""
# No `from __future__ import annotations`: Hydra runs this module before it is in sys.modules, where
# dataclasses look.

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.ddp_train_pool import _jobs
from hydra_plugins.ddp_train_pool._devices import Devices, PoolError, asked_gpus, visible_gpus
from hydra_plugins.ddp_train_pool._listener import current_listener
from hydra_plugins.ddp_train_pool._runner import Application, JobRunner, JobSource, ListedJobs
from hydra_plugins.ddp_train_pool._signals import StopSignals

log = logging.getLogger(__name__)


@dataclass
class PoolConf:
    """`hydra.launcher`."""

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
    """Least time between two starts."""
    output: str | None = None
    """A file in the directory of each job for all that it prints; None: the terminal."""


ConfigStore.instance().store(
    group="hydra/launcher", name="pool", node=PoolConf, provider="ddp_train_pool"
)


class PoolLauncher(Launcher):
    """Runs each job in a process of its own, as many at a time as there are free devices.

    The application learns of its jobs by a `SweepListener`. A signal goes to all jobs, is waited
    for, and is raised again at the end; the third one kills them.
    """

    def __init__(self, **settings: Any) -> None:
        """settings: the fields of `PoolConf`."""
        super().__init__()
        self.settings = PoolConf(**settings)
        self.signals = StopSignals()
        self.listener = current_listener()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config = config
        self.application = Application(hydra_context, task_function, config, self.settings.output)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        jobs = ListedJobs(job_overrides, initial_job_idx)
        with self.reporting_problems():
            self.launch_from(jobs, len(job_overrides))
        return [jobs.returned[key] for key in sorted(jobs.returned)]

    @contextlib.contextmanager
    def reporting_problems(self) -> Iterator[None]:
        """Has the application report a PoolError, if it does that."""
        try:
            yield
        except PoolError as error:
            code = self.listener.report_problem(str(error))
            if code is None:
                raise
            raise _jobs.SweepEnd(code) from None

    def launch_from(self, source: JobSource, count: int) -> None:
        """Run the jobs of a source, each as soon as there are devices for it.

        count: the number of jobs, for the log.
        """
        setup_globals()
        HydraConfig.instance().set_config(self.config)  # for the listener; a job sets its own
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        obstacle = _jobs.obstacle_to_fork()
        if obstacle:
            raise PoolError(obstacle)
        devices = self.open_devices()
        with contextlib.closing(devices), self.signals.listening():
            log.info("Launching %d jobs, at most %d at a time", count, devices.at_once)
            self.listener.before_jobs()
            runner = JobRunner(
                self.application,
                source,
                devices,
                self.listener,
                self.signals,
                self.settings.start_delay_seconds,
            )
            runner.run()
        self.signals.raise_first()

    def open_devices(self) -> Devices:
        """The devices of all jobs. Raises PoolError."""
        settings = self.settings
        least = {"gpus_per_trial": 0, "processes_at_once": 1, "start_delay_seconds": 0}
        for name, lowest in least.items():
            value = getattr(settings, name)
            if value is not None and value < lowest:
                raise PoolError(f"hydra.launcher.{name}={value}: must be at least {lowest}")
        if settings.gpus_per_trial == 0:
            names = []
        elif settings.devices is not None:
            names = asked_gpus([str(device) for device in settings.devices])
        else:
            names = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        per_job = settings.gpus_per_trial
        if per_job is None:
            per_job = min(1, len(names))
        folder = Path(settings.lock_folder).expanduser() if settings.lock_folder else None
        return Devices(names, per_job, settings.processes_at_once, folder)
