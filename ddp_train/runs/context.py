"""State shared by everything that one process does in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.assembly.batches import scored_batches
from ddp_train.data.batch import Batch
from ddp_train.data.datasets import BatchSource
from ddp_train.distributed.process_group import Store
from ddp_train.distributed.world import World
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import RankStatus, StatusBoard
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
    store: Store | None
    """The key-value store that all processes share; None without a process group."""
    leave: Callable[[int], Any]
    """Ends the process with an exit code, for a stop on which the ranks cannot agree."""
    board: StatusBoard | None = None
    """The board of our own launcher; None under torchrun."""

    @property
    def run_dir(self) -> Path:
        return Path(str(self.config.run_dir))

    @property
    def summaries(self) -> Summary:
        return Summary(self.config, self.run_dir, self.device)

    def scored_batches(self, source: BatchSource) -> Iterator[Batch]:
        """The batches of an evaluation, the same on all processes."""
        return scored_batches(self.config, source, self.device)
