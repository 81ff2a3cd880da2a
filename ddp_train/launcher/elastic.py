"""The number of processes of a run: asked for by `ddp-train resize`, or what failures leave of it.
Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_train.config.freeze import freeze
from ddp_train.distributed.environment import visible_devices
from ddp_train.errors import ConfigError
from ddp_train.hardware import gpu_names, unreachable_gpus
from ddp_train.launcher.resize import Requests
from ddp_train.launcher.size import Change, Size
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import StatusBoard
from ddp_train.text import counted

CHANGES_TOLD = 20


class Elastic:
    """What the launcher asks before each start: the config for the number of processes that comes
    next."""

    def __init__(self, config: Config, at_another_number: Callable[[int], Config] | None) -> None:
        """at_another_number: the config for it; None, or a config without a range: the number
        stays."""
        self.config = config
        self.at_another_number = at_another_number
        counts = config.process_counts if at_another_number else []
        gpus = gpu_names(visible_devices()) if counts and config.device == "cuda" else []
        self.size = Size(int(config.launch.nproc_per_node) if counts else 0, counts, gpus)
        self.requests = Requests(Path(str(config.run_dir)), self.size.refusal) if counts else None
        self.changes: list[Change] = []
        self.from_step: int | None = None
        """Where the processes of a change that was asked for begin, until they have done a step."""

    @property
    def is_asked(self) -> bool:
        """Whether somebody has asked for another number, and it is not there yet."""
        return (
            self.requests is not None and self.requests.asked is not None and self.from_step is None
        )

    def last_changes(self) -> list[dict[str, Any]]:
        """For each start: one may have been followed by the next before it was noted."""
        return [change.as_dict() for change in self.changes[-CHANGES_TOLD:]]

    def wait(self, seconds: float) -> None:
        """In place of sleeping."""
        if self.requests:
            self.requests.wait(seconds)
        else:
            time.sleep(seconds)

    def see(self, board: StatusBoard) -> None:
        """Answers who has asked once all ranks have done a step."""
        if self.from_step is not None and all(
            status.step > self.from_step for status in board.ranks
        ):
            self._answer_done()

    def _answer_done(self) -> None:
        if self.requests and self.requests.asked and self.changes:
            change = self.changes[-1]
            numbers = (
                f"{change.before} to {counted(change.after, 'process')} after step"
                f" {self.from_step:,}"
            )
            seconds = time.monotonic() - self.requests.asked.at
            self.requests.answer(True, f"{numbers}; {seconds:.2f} s until they had done a step")
        self.from_step = None

    def shrink(self, rank: int | None, progressed: bool, at: float) -> str:
        """After a failure, see `Size.shrink`. at: when a rank was lost. Returns why, empty if the
        number stays."""
        if not self.size.counts:
            return ""
        before = self.size.count
        gone = unreachable_gpus(self.size.devices())
        if why := self.size.shrink(rank, progressed, gone):
            if not self._become(before, why, at, time.time() - (time.monotonic() - at)):
                return ""
            if self.requests and self.from_step is not None:
                self.requests.answer(
                    False, f"{why}; the run continues with {counted(self.size.count, 'process')}"
                )
                self.from_step = None
        return why

    def become_what_is_asked(self, from_step: int) -> bool:
        """Once the processes of before have ended. from_step: where those of the next start will
        begin."""
        if not self.is_asked or not self.requests or not self.requests.asked:
            return False
        asked = self.requests.asked
        before = self.size.count
        self.size.become(asked.count)
        if not self._become(before, "asked for", asked.at, asked.time):
            return False
        self.from_step = from_step
        return True

    def _become(self, before: int, why: str, at: float, moment: float) -> bool:
        if before == self.size.count or not self.at_another_number:
            return True  # on other GPUs
        config = self.at_another_number(self.size.count)
        try:
            freeze(config)
        except ConfigError as error:
            self.size.count = before
            stays = f"it stays at {counted(before, 'process')}: {error.problems[0]}"
            print(stays, file=sys.stderr)
            if self.requests:
                self.requests.answer(False, stays)
            return False
        self.config = config
        self.changes.append(Change(before, self.size.count, why, at, moment))
        return True

    def close(self, completed: bool) -> None:
        if completed and self.from_step is not None:
            self._answer_done()
        if self.requests:
            self.requests.close()
