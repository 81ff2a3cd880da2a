"""Keeps states of a rank in turns, in memory that outlives it (kept_memory.py).

Every rank of a host has the weights, and what an optimizer knows of them: each keeps a share of
these. What a rank alone has, its buffers for instance, it keeps by itself. A state that all ranks
of a host have kept is whole, whatever happens to them afterwards.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ddp_train.errors import LaunchError, StateError
from ddp_train.recovery.kept_device_step import DeviceKeeping, KeptDeviceStep, WaitedDeviceStep
from ddp_train.recovery.kept_step import KeptRecords, KeptStep
from ddp_train.recovery.pace import NoPace, Pace
from ddp_train.resilience.kept_memory import TURNS, KeptMemory, Place

log = logging.getLogger(__name__)
NOT_KEPT = (
    "the state is saved in checkpoints only, so a failure costs the steps since the last one: %s"
)


class StateKeeper:
    """The two places of a rank, in which it keeps states in turns."""

    def __init__(
        self,
        memory: KeptMemory,
        rank: int,
        ranks: int,
        device: str,
        copies_beside: bool = True,
    ) -> None:
        """
        rank: the number of this process on its host.
        ranks: the processes of the host.
        device: of the state.
        copies_beside: on a GPU copies run beside the next step, whose update waits for them.
        """
        self.copies_beside = copies_beside
        self.memory = memory
        self.rank = rank
        self.ranks = ranks
        self.facts = memory.record(rank, Place.FACTS)
        self.device = None if device == "cpu" else DeviceKeeping(device)
        """None on the CPU."""
        self.pace: Pace = self.device.pace if self.device else Pace()
        self.is_over = False
        """It has given up."""
        self.next: KeptStep | None = None
        """The place that is written next; None before `begin`."""
        self.last: KeptStep | None = None
        """The one that was written last."""

    def begin(self, facts: Any) -> None:
        """Keep states from now on.

        facts: what does not change, as JSON takes it.

        Raises LaunchError where a driver, or a virtual machine, has not what it takes.
        """
        make: Callable[[KeptRecords], KeptStep] = KeptStep
        if self.device:
            kind = KeptDeviceStep if self.copies_beside else WaitedDeviceStep
            make = partial(kind, device=self.device)
        self.next, self.last = (
            make(KeptRecords.of(self.memory, places, self.rank, self.ranks)) for places in TURNS
        )
        # What an attempt before has kept is in a checkpoint by now.
        self.next.drop()
        self.last.drop()
        self.facts.open()
        self.facts.text = json.dumps(facts).encode()
        self.facts.set_numbers(-1, self.ranks)
        self.facts.complete(0)

    @contextlib.contextmanager
    def turn(self) -> Iterator[KeptStep]:
        """A context in which the next state is written into the place that it yields.

        Where there is no room for it, nothing is kept any more. After a StateError the state
        before is whole.
        """
        assert self.next and self.last, "begun"
        kept = self.next
        try:
            self.last.wait_for_all(self.memory)  # until it is whole, the other one must stay
            kept.open()
            yield kept
        except StateError:
            raise  # no checkpoint could be saved either
        except LaunchError as error:
            self.give_up(error)
            return
        self.next = self.last
        self.last = kept

    def take_back(self) -> None:
        """Drop the state that was written last: the one before counts again."""
        assert self.next and self.last, "begun"
        self.last.drop()
        dropped = self.last
        self.last = self.next
        self.next = dropped

    def give_up(self, error: Exception) -> None:
        """Keep nothing any more."""
        log.warning(NOT_KEPT, error)
        self.is_over = True
        self.pace = NoPace()
        self.facts.open()  # the other ranks do not wait for this one
        for kept in (self.next, self.last):
            if kept:
                kept.mark = None
