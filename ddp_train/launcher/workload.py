"""The program that the launcher runs in each process, and its name in messages. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_train.config.freeze import run_facts
from ddp_train.launcher.fork_server import MODULE, WORKER
from ddp_train.options.schema import Config
from ddp_train.resilience.failure import Failure
from ddp_train.telemetry.pages.live import NoPage


def _run_dir_and_rank(run_dir: Path, rank: int) -> list[str]:
    return [str(run_dir.absolute()), f"rank={rank}"]  # the rank is for readers of `ps`


@dataclasses.dataclass(frozen=True)
class Workload:
    """The program of a run's processes.

    The defaults are those of `python launch.py`: our worker, with a frozen config.
    """

    program: tuple[str, ...] = (*MODULE, WORKER)
    """The program that Python runs in each process, as on its command line."""
    arguments: Callable[[Path, int], list[str]] = _run_dir_and_rank
    """Arguments of the program, for a run directory and a rank."""
    facts: Callable[[Config], dict[str, Any]] = run_facts
    """The fields of summary.json that are known before the run starts."""
    translate: Callable[[str], str] = str
    """Replaces the keys of the config in a message by the names that the user of this program
    knows."""
    page: NoPage = dataclasses.field(default_factory=NoPage)
    """Writes the page of the run."""

    def translated(self, failure: Failure) -> Failure:
        """A failure in the terms of this program's user."""
        detail = self.translate(failure.detail)
        remedy = self.translate(failure.remedy)
        return dataclasses.replace(failure, detail=detail, remedy=remedy)


def workload_of(config: Config) -> Workload:
    """The workload of a run of ours; one that trains has a page unless `launch.page` is false."""
    from ddp_train.config.freeze import not_default
    from ddp_train.telemetry.pages.live import LivePage

    if config.mode != "train" or not config.launch.page:
        return Workload()
    page = LivePage(Path(str(config.run_dir)), not_default(config))
    return Workload(page=page)
