"""The number of processes of a running run, and its config for that number. Torch-free."""

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
from ddp_train.launcher.resize import RequestListener
from ddp_train.launcher.size import Change, Size
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import StatusBoard
from ddp_train.text import counted

MAX_CHANGES = 20
"""Changes that workers are given at a start."""


class Elastic:
    """Changes the number of processes between two attempts: on request, or after failures."""

    def __init__(self, config: Config, at_another_number: Callable[[int], Config] | None) -> None:
        """Open the socket for requests if the config has a range.

        at_another_number: makes the config for a number of processes; None: the number stays.
        """
        self.config = config
        """The config of the next attempt."""
        self.at_another_number = at_another_number
        counts = config.process_counts if at_another_number else []
        gpus = gpu_names(visible_devices()) if counts and config.device == "cuda" else []
        self.size = Size(int(config.launch.nproc_per_node), counts, gpus)
        self.requests: RequestListener | None = None
        if counts:
            run_dir = Path(str(config.run_dir))
            self.requests = RequestListener(run_dir, lambda count: self.size.refusal(count))
        self.changes: list[Change] = []
        self.from_step: int | None = None
        """The step from which the processes of a requested change train, until all have done a
        step."""

    @property
    def is_requested(self) -> bool:
        """Whether a change is requested whose processes have not been started."""
        if self.requests is None or self.from_step is not None:
            return False
        return self.requests.pending is not None

    def last_changes(self) -> list[dict[str, Any]]:
        """The last changes, for each start: one may follow another before workers have noted it."""
        return [change.as_dict() for change in self.changes[-MAX_CHANGES:]]

    def unreachable_gpus(self) -> set[str]:
        """The GPUs in use that the driver no longer reaches; empty if the number is fixed."""
        if not self.size.counts:
            return set()
        return unreachable_gpus(self.size.gpus_in_use())

    def wait(self, seconds: float) -> None:
        """Sleep, or return earlier: when a request comes, which is accepted."""
        if self.requests:
            self.requests.wait(seconds)
        else:
            time.sleep(seconds)

    def answer_when_done(self, board: StatusBoard) -> None:
        """Answer the request once all ranks have done a step."""
        if self.from_step is None:
            return
        if all(status.step > self.from_step for status in board.ranks):
            self._answer_done()

    def become_smaller(self, size: Size, reason: str, at: float) -> bool:
        """Take the size that was decided on after a failure. Returns whether it could.

        at: when the rank was lost, by `time.monotonic`.
        """
        moment = time.time() - (time.monotonic() - at)
        if not self._become(size, reason, at, moment):
            return False
        if self.requests and self.from_step is not None:
            processes = counted(size.count, "process")
            self.requests.answer(False, f"{reason}; the run continues with {processes}")
            self.from_step = None
        return True

    def become_requested(self, from_step: int) -> bool:
        """Take the requested size, once the processes of before have ended.

        from_step: the step from which the next processes will train.

        Returns whether it did.
        """
        if not self.is_requested:
            return False
        assert self.requests and self.requests.pending
        request = self.requests.pending
        size = self.size.resized(request.count)
        if not self._become(size, "asked for", request.at, request.time):
            return False
        self.from_step = from_step
        return True

    def close(self, completed: bool) -> None:
        if completed and self.from_step is not None:
            self._answer_done()
        if self.requests:
            self.requests.close()

    def _become(self, size: Size, why: str, at: float, moment: float) -> bool:
        """Take another size. Returns whether the config for that number could be written."""
        before = self.size.count
        if size.count != before and self.at_another_number:
            config = self.at_another_number(size.count)
            try:
                freeze(config)
            except ConfigError as error:
                text = f"the run stays at {counted(before, 'process')}: {error.problems[0]}"
                print(text, file=sys.stderr)
                if self.requests:
                    self.requests.answer(False, text)
                return False
            self.config = config
            self.changes.append(Change(before, size.count, why, at, moment))
        self.size = size
        return True

    def _answer_done(self) -> None:
        if self.requests and self.requests.pending and self.changes:
            change = self.changes[-1]
            processes = counted(change.after, "process")
            seconds = time.monotonic() - self.requests.pending.at
            self.requests.answer(
                True,
                f"{change.before} to {processes} after step {self.from_step:,}; the next step was"
                f" done {seconds:.2f} s after the request",
            )
        self.from_step = None
