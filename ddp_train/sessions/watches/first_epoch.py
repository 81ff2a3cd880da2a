"""Looks, in the first epoch of a session, at variables of the loop that would make its result
depend on the number of processes, or on where it was resumed.

Rank 0 warns. What takes an exchange is compared at the end of the epoch; carried numbers at the end
of the second, the fourth, the eighth epoch too. What is lost is looked for again after them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.world import World
from ddp_train.sessions.exchange_watch import SUM
from ddp_train.sessions.watches.carried_numbers import CARRIED, CarriedNumbers
from ddp_train.sessions.watches.counts_beside_copies import COUNTS, CountsBesideCopies
from ddp_train.sessions.watches.first_step import SAME_ROWS
from ddp_train.sessions.watches.lost_variables import (
    LOST,
    LOST_OVER_EPOCHS,
    MADE_AGAIN,
    LostVariables,
)
from ddp_train.sessions.watches.padded_images import PaddedImages
from ddp_train.sessions.watches.row_tables import RowTables, warning_of

log = logging.getLogger(__name__)


class FirstEpoch:
    """Looks at the variables of the user's loop."""

    def __init__(self, world: World, saved: Collection[Any] | None, whole: bool) -> None:
        """
        saved: the models and the objects of run.resume; None where nothing is resumed.
        whole: whether it is resumed at the beginnings of epochs alone.
        """
        self.world = world
        self.row_tables: RowTables | None = None
        """None on one process, and when they were compared."""
        self.carried: CarriedNumbers | None = None
        """None on one process, and while they are not looked at."""
        self.epochs = 0
        """Epochs that have ended."""
        self.has_told = False
        """Whether carried numbers were told."""
        self.lost: LostVariables | None = None
        """On rank 0 alone."""
        self.counts: CountsBesideCopies | None = None
        """On rank 0 alone, in the first epoch."""
        self.whole = whole
        self.looks_at_steps = not whole
        """Whether variables that are lost inside of an epoch are looked for."""
        self.rows: str | None = None
        """The digest of `FirstStep.rows`; None before the first step, and when it was compared."""
        self.padded_images: PaddedImages | None = None
        """Those of the first step; None before it, and when they were compared."""
        if world.size > 1:
            self.row_tables = RowTables()
            self.carried = CarriedNumbers()
        if world.is_leader and saved is not None:
            self.lost = LostVariables(saved)
            self.counts = CountsBesideCopies(saved)

    def begin_step(self, facts: list[Mapping[str, Any]]) -> None:
        """facts: of the loaders, see `Feed`."""
        if self.row_tables:
            self.row_tables.begin(facts)

    def see_batch(self, share: MicroBatch, batch: Any) -> None:
        """Called with each batch before the user's loop has it."""
        if self.row_tables:
            self.row_tables.see_batch(share.sample_numbers[: share.num_real], batch)

    def see_sum(self, call: str, value: Any) -> None:
        """Called when a value is added up, or gathered, over all processes. call: SUM or GATHER."""
        if self.row_tables and call == SUM:
            self.row_tables.see_sum(value)

    def end_step(self, samples: int) -> None:
        """samples: of this process in the step."""
        if self.row_tables:
            self.row_tables.end()
        if self.carried:
            self.carried.look(samples)
        if self.lost and self.looks_at_steps:
            self._tell_of_lost(self.lost)
        if self.counts:
            self.counts.end_step()

    def _tell_of_lost(self, lost: LostVariables) -> None:
        names = lost.look()
        if names is None:
            return
        self.looks_at_steps = False
        if names:
            log.warning(LOST, ", ".join(names))

    def look_over_epochs(self) -> None:
        """Name what the loop carries from epoch to epoch and no checkpoint holds, each once.

        To be called before the first epoch, and between two.
        """
        # Some may be set after a warm-up: in the second, the fourth, the eighth epoch ...
        is_due = self.epochs.bit_count() <= 1
        if self.lost and is_due and not self.looks_at_steps:
            carried, made_again = self.lost.look_over_epochs()
            if carried:
                log.warning(LOST_OVER_EPOCHS, ", ".join(carried))
            if made_again:
                log.warning(MADE_AGAIN, ", ".join(made_again))
            self.looks_at_steps = not self.whole

    def compare(self, device: str) -> None:
        """Name once what each process has of its own samples alone. A collective."""
        self._compare_rows(device)
        if self.counts and self.lost:
            names = [name for name in self.counts.changed() if name not in self.lost.told]
            self.counts = None
            if names:
                log.warning(COUNTS, ", ".join(names))
        if self.padded_images:
            warning = self.padded_images.warning(device)
            self.padded_images = None
            if warning and self.world.is_leader:
                log.warning(warning)
        if self.row_tables and self.row_tables.is_complete:
            names = self.row_tables.apart(device)
            self.row_tables = None
            if names and self.world.is_leader:
                log.warning(warning_of(names))
        if self.carried and self.carried.is_complete:
            names = self.carried.apart(device)
            self.carried = None
            self.has_told = bool(names)
            if names and self.world.is_leader:
                log.warning(CARRIED, ", ".join(names))
        self.epochs += 1
        # A number may be used after a warm-up: in the second, the fourth, the eighth epoch ...
        is_due = (self.epochs + 1).bit_count() == 1
        may_look = self.world.size > 1 and self.carried is None and not self.has_told
        if may_look and is_due:
            self.carried = CarriedNumbers()

    def _compare_rows(self, device: str) -> None:
        """Say if all processes had the same rows in the first step."""
        rows = self.rows
        if rows is None or self.world.size == 1:
            return
        self.rows = None
        are_same = {rows} == set(texts_from_all_ranks(rows, device))
        if are_same and rows and self.world.is_leader:
            log.warning(SAME_ROWS, self.world.size)
