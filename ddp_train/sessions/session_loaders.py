"""The loaders that a session trains on: their batches, and where a resumed run goes on."""

from __future__ import annotations

from typing import Any

from ddp_train.errors import DataError
from ddp_train.sessions.loop_state import LoopState
from ddp_train.sessions.open_step import StatefulLoader
from ddp_train.sessions.session_checkpoints import SessionCheckpoints


class SessionLoaders:
    """The loaders that there are in the current epoch, in the order in which they were made."""

    def __init__(self, loop: LoopState) -> None:
        self.loop = loop
        self.current: list[StatefulLoader] = []
        self.lasting = 0
        """The number of those that were made before the first epoch; others end with theirs."""
        self.saved: dict[int, dict[str, Any]] = {}
        """The states in the checkpoint by number of the loader, until it goes on from there."""
        self.checkpoints: SessionCheckpoints | None = None
        """Those that the run resumed from; None before, and if it began anew."""
        self.first_step = 0
        """Steps that were done before, then."""

    def add(self, loader: StatefulLoader) -> int:
        """Add a loader. Returns its number."""
        self.current.append(loader)
        epoch = self.loop.open_epoch
        if epoch:
            loader.begin_epoch(self.loop.position.epoch)
            if epoch.first_batch:
                self.check_same_batches()
        return len(self.current) - 1

    def go_on(self, checkpoints: SessionCheckpoints) -> None:
        """Give the loaders what the checkpoint has of them, where a loop over epochs begins.

        Later loops begin without it.

        Raises DataError if they have other data, and it lies inside of a pass.
        """
        self.lasting = len(self.current)
        if checkpoints.resumed_from is None:
            return
        if self.checkpoints is None:
            self.checkpoints = checkpoints
            self.first_step = self.loop.position.step
            self.saved = dict(enumerate(checkpoints.saved_loaders))
        if self.loop.position.step > self.first_step:
            return
        is_inside = any(not state["place"]["is_over"] for state in checkpoints.saved_loaders)
        if is_inside or self.loop.position.batch:
            self.check_same_batches()

    def begin_epoch(self) -> None:
        """Called where an epoch begins, before the user's loop has it."""
        for number in range(self.lasting, len(self.current)):
            self.saved.pop(number, None)
        del self.current[self.lasting :]
        for loader in self.current:
            loader.begin_epoch(self.loop.position.epoch)

    def end_loop(self) -> None:
        """Called where a loop over epochs has none left: loaders of the last one end with it."""
        del self.current[self.lasting :]

    def facts(self) -> dict[str, Any]:
        """Facts that identify the batches of all loaders."""
        facts = {}
        for number, loader in enumerate(self.current):
            suffix = f" of loader {number + 1}" if number else ""
            for name, value in loader.facts.items():
                facts[name + suffix] = value
        return facts

    def state(self) -> dict[str, Any]:
        """Facts that identify the batches, and the states of the loaders. A collective."""
        states = [loader.state() for loader in self.current]
        return {"batches": self.facts(), "loaders": states}

    def check_same_batches(self) -> None:
        """Raise DataError if the checkpoint that the run resumed from has other batches."""
        assert self.checkpoints, "the run was resumed"
        self.check_batches(self.checkpoints.earlier_batches, self.facts())

    def check_batches(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse other batches inside of a pass; at its beginning others may follow.

        before, now: facts that identify them, in the checkpoint and here.

        Raises DataError if they differ.
        """
        assert self.checkpoints, "the run was resumed"
        for name, value in now.items():
            earlier = before.get(name, value)
            if earlier == value:
                continue
            change = f"{name} was {earlier} and is {value}"
            if name.startswith("data"):
                change = "its samples are different"
            elif name.startswith("drawn"):
                change = "its samples are in a different order"
            raise DataError(
                f"{self.checkpoints.resumed_from} was saved inside of an epoch, but run.loader"
                f" has changed since then: {change}",
                "finish the epoch with the earlier data and arguments. To start over, use a new"
                " folder: ddp_train.session('runs/new'). If each epoch makes its data anew (such"
                " as pseudo-labels), use run.epochs(n, whole=True) there: such a run resumes at"
                " the beginning of an epoch",
            )
