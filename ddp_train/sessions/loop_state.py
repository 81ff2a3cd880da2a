"""Where the user's loop is: its position, and the epoch and the step that have begun."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_train.sessions.open_step import OpenStep
from ddp_train.sessions.position import Position
from ddp_train.sessions.settings import UsageError


@dataclass
class OpenEpoch:
    """An epoch between its begin in `run.epochs` and the next one's."""

    first_batch: int
    """Batches of it that were done before it began here: it was resumed."""
    is_complete: bool = False
    """The loader that began the last step has no more batches."""


class LoopState:
    """The place of one process in the user's loop."""

    def __init__(self) -> None:
        self.position = Position()
        self.open_epoch: OpenEpoch | None = None
        """None between two epochs."""
        self.open_step: OpenStep | None = None
        """None between two steps."""

    @property
    def epochs_begun(self) -> int:
        return self.position.epoch + (self.open_epoch is not None)

    @property
    def begun_epoch(self) -> int:
        """The number of the epoch that began last; 0 before the first."""
        if self.open_epoch:
            return self.position.epoch
        return max(self.position.epoch - 1, 0)

    def check_in_epoch(self, method: str) -> None:
        """Raise UsageError if `method` is used outside of an epoch."""
        if not self.open_epoch:
            raise UsageError(
                f"{method} was used outside of an epoch",
                "use it inside of: for epoch in run.epochs(10): ...",
            )

    def see_batches_left(self, some: bool) -> None:
        """Note whether the loader that began the last step has more batches of the epoch."""
        if self.open_epoch:
            self.open_epoch.is_complete = not some
