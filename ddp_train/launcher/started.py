"""What the launcher starts in each process of a run, and in which words it then speaks of it.
Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_train.config.auto import described
from ddp_train.config.schema import Config
from ddp_train.launcher.fork_server import MODULE, WORKER
from ddp_train.resilience.failure_report import Failure
from ddp_train.telemetry.pages.live import NoPage


def _run_dir_and_rank(run_dir: Path, rank: int) -> list[str]:
    return [str(run_dir.absolute()), f"rank={rank}"]  # the rank is for readers of `ps`


@dataclasses.dataclass(frozen=True)
class Started:
    """The defaults are those of `python launch.py`: our worker, with a frozen config."""

    program: tuple[str, ...] = (*MODULE, WORKER)
    """What Python runs in each process, as on its command line."""
    arguments: Callable[[Path, int], list[str]] = _run_dir_and_rank
    """Of the program, for a run directory and a rank."""
    facts: Callable[[Config], dict[str, Any]] = described
    """The fields of summary.json that are known before the run starts."""
    words: Callable[[str], str] = str
    """A message, with the keys of the config as the user of this program knows them."""
    page: NoPage = dataclasses.field(default_factory=NoPage)
    """That the launcher writes of the run."""

    def worded(self, failure: Failure) -> Failure:
        return dataclasses.replace(
            failure, detail=self.words(failure.detail), remedy=self.words(failure.remedy)
        )


def with_page(config: Config) -> Started:
    """Our worker, and the page of a run that trains, unless it shall have none."""
    from ddp_train.config.freeze import not_default
    from ddp_train.telemetry.pages.live import LivePage

    if config.mode != "train" or not config.launch.page:
        return Started()
    return Started(page=LivePage(Path(str(config.run_dir)), not_default(config)))
