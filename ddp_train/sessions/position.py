"""The position of the user's loop, and the place of each of its loaders."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_train.text import counted


@dataclass
class Position:
    """The place of a loop: `batch` of the current epoch's batches are done."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    """Batches done in all epochs."""
    loops: int = 0
    """Loops over run.epochs that were begun."""
    left_count: int = 0
    """The count of epochs of the loop that the session left by `break` at an epoch's end, and ended
    so; 0 if it did not."""

    def end_epoch(self) -> None:
        self.epoch += 1
        self.batch = 0

    def __str__(self) -> str:
        if not self.batch:
            return f"epoch {self.epoch}"
        return f"epoch {self.epoch}, after {counted(self.batch, 'step')}"


@dataclass
class Place:
    """The place of a training loader: `batch` batches of a pass are done."""

    epoch: int
    """The epoch in which the pass began."""
    repetition: int = 0
    """Passes of the loader that began in this epoch before."""
    batch: int = 0
    is_over: bool = False
    step: int = 0
    """Steps that were done after the last one with a batch of it."""
    left_at: int = -1
    """Steps that were done when a `break` ended the pass."""
    first: int = 0
    """Batches of the pass that were done before it was resumed here."""

    def next(self, epoch: int) -> Place:
        """The beginning of a new pass."""
        if self.epoch == epoch:
            return Place(epoch, self.repetition + 1)
        return Place(epoch)

    def leave(self, step: int) -> None:
        """End the pass by `break`. step: steps that are done."""
        self.is_over = True
        self.left_at = step

    def reopen(self, step: int) -> None:
        """Take back a `break` with which the whole training ended: a resumed run goes on there."""
        if self.left_at == step:
            self.is_over = False

    def was_done_before(self, position: Position) -> bool:
        """True if the loop over the loader was done in this epoch, and steps of others followed."""
        return self.is_over and self.epoch == position.epoch and self.step < position.step
