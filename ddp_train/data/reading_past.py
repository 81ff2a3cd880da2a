"""Samples of a stream that are read past, on the way to those that are wanted."""

from __future__ import annotations

import logging
import time

from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.text import counted

SLOW_SECONDS = 10.0
"""Reading past the samples that are done is told of if it takes longer."""
HOW_TO_GO_ON = "a stream with state_dict() and load_state_dict() of plain data resumes at once"
log = logging.getLogger(__name__)


class ReadingPast:
    """One way to a wanted sample: progress for the launcher, and a line if it takes long."""

    def __init__(
        self, status: RankStatus, name: str, samples: int, advice: str = "", *, is_told: bool = True
    ) -> None:
        """
        status: of this process.
        name: of the stream.
        samples: those to be read past.
        advice: how the user avoids it; "" for none.
        is_told: a line tells of it if it takes longer than SLOW_SECONDS.
        """
        self.status = status
        self.name = name
        self.samples = samples
        self.advice = advice
        self.is_told = is_told
        self.passed = 0
        self.began = time.monotonic()

    def add(self, samples: int = 1) -> None:
        """Count samples that were read past."""
        self.status.samples_passed += samples
        self.passed += samples
        if self.is_told and time.monotonic() - self.began > SLOW_SECONDS:
            self.is_told = False
            self._tell()

    def _tell(self) -> None:
        log.warning(
            "to resume, the run reads %s of the stream %s again and skips them: %s so far, in"
            " %.3g s%s",
            counted(self.samples, "sample"),
            self.name,
            f"{self.passed:,}",
            time.monotonic() - self.began,
            f"; {self.advice}" if self.advice else "",
        )
