"""Where the user's loop is: its position, and the epoch and the step that have begun."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_train.sessions.open_step import OpenStep
from ddp_train.sessions.position import Position
from ddp_train.sessions.settings import UsageError
from ddp_train.text import counted


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
        self.loops = 0
        """Loops over run.epochs that this process has begun."""
        self.is_in_loop = False
        """One of them goes on."""
        self.largest_count = 0
        """The largest number of epochs that one of them got."""

    def begin_loop(self, count: int) -> None:
        """Begin a loop over `run.epochs(count)`.

        Raises UsageError inside of another one, behind one that a `break` has left inside of an
        epoch, and if all epochs of an earlier one are done and the count is not above theirs.
        """
        call = f"run.epochs({count})"
        position = self.position
        if self.is_in_loop:
            raise UsageError(
                f"{call} was called inside of another loop over run.epochs",
                "use one loop for all epochs of the run, and find the part from the epoch's"
                " number: for epoch in run.epochs(6): part = epoch // 3",
            )
        if self.open_epoch and position.batch > self.open_epoch.first_batch:
            raise UsageError(
                f"{call}: an earlier loop over run.epochs was left inside of epoch"
                f" {position.epoch}, after {counted(position.batch, 'step')} of it",
                "leave a loop over epochs at the top of an epoch, before its first batch: `if"
                " is_done: break`",
            )
        if 0 < count <= min(position.epoch, self.largest_count):
            raise UsageError(
                f"{call} has no epoch left: earlier loops have done {position.epoch}, and the"
                " count is that of the whole run",
                f"for {counted(count, 'further epoch')} use run.epochs({position.epoch + count})",
            )
        self.loops += 1
        self.is_in_loop = True
        self.largest_count = max(self.largest_count, count)
        position.loops = max(position.loops, self.loops)

    def check_loop(self) -> None:
        """Raise UsageError if a resumed run trains in an earlier loop than before."""
        if self.loops < self.position.loops:
            raise UsageError(
                f"the checkpoint was saved in loop {self.position.loops} of the script's"
                " `for ... in run.epochs(...)` loops, but the resumed run is training in loop"
                f" {self.loops}",
                f"if a `break` ended loop {self.loops}, its condition must be true again after a"
                " resume: test the epoch (`if epoch >= 3: break`), or a value in an object that"
                " you pass to run.resume. To start over, use a new folder:"
                " ddp_train.session('runs/new')",
            )

    def take_left_count(self) -> int:
        """The count of the loop that the checkpoint's run left by `break` at an epoch's end.

        0 if it did not, if more epochs were asked for since, and after the first call.
        """
        count = self.position.left_count
        self.position.left_count = 0
        if count < self.largest_count:
            return 0
        return count

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
