"""State shared by everything that one process does in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_train.distributed.world import World
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.runs.worker_process import WorkerProcess
from ddp_train.telemetry.console import Display


@dataclass(frozen=True)
class RunContext:
    """The config, and this process's place, device and outputs."""

    config: Config
    worker: WorkerProcess
    device: str
    display: Display

    @property
    def run_dir(self) -> Path:
        return self.worker.run_dir

    @property
    def world(self) -> World:
        return self.worker.world

    @property
    def status(self) -> RankStatus:
        """The place of this process in the run, for the launcher."""
        return self.worker.status
