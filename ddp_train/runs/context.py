"""What everything that one process of a run does starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_train.distributed.world import World
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.runs.summary import Summary
from ddp_train.telemetry.console import Display


@dataclass(frozen=True)
class RunContext:
    """The config, and this process's place, device and outputs."""

    config: Config
    world: World
    device: str
    status: RankStatus
    """Where this process is, for the launcher."""
    display: Display

    @property
    def run_dir(self) -> Path:
        return Path(str(self.config.run_dir))

    @property
    def summaries(self) -> Summary:
        return Summary(self.config, self.run_dir, self.device)
