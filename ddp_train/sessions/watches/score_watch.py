"""Scores that each process computed of all samples, and adds up over the processes."""

from __future__ import annotations

import contextlib
import linecache
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.watches.carried_names import LoopCode
from ddp_train.tensor_tree import tensors

TAKEN_OVER_STEPS = (
    "batches of run.test_loader were used in several training steps, but each process has"
    " different batches, and a different number of them",
    "read all batches in one loop, between two training steps. If you only look at one batch,"
    " keep that batch, not the iterator: batch = next(iter(test_loader)). To train on pairs, use"
    " two loaders of run.loader, or a data set of pairs",
)
CARRIED = (
    "run.test_loader: the model got what it returned for an earlier batch (a hidden state, for"
    " example). Each process has only some of the batches, so the score depends on the number of"
    " processes. Score with torch's DataLoader, which gives each process all batches, and leave"
    " out run.sum"
)
log = logging.getLogger(__name__)


class ScoreWatch:
    """Warns once if what each process computed of all samples is added up, and once if a model is
    given what it returned for an earlier batch of a test loader."""

    def __init__(self) -> None:
        self.open: list[contextlib.ExitStack] = []
        """The contexts of the test loaders that give batches now."""
        self.scored_elsewhere = False
        """The model has scored other batches since the last sum, or since a step began."""
        self.scored_before_steps = False
        """It did so before a step."""
        self.sums: set[tuple[str, int]] = set()
        """The files and lines of sums that were looked at since then."""
        self.has_warned = False
        self.has_warned_of_carried = False
        self.returned: list[StorageWeakRef] = []
        """The memory of what models returned for the current batch of a test loader."""
        self.returned_before: list[StorageWeakRef] = []
        """The same of the batch before. None of it is kept alive."""

    @property
    def is_scoring(self) -> bool:
        return bool(self.open)

    @contextlib.contextmanager
    def scoring(self, *contexts: AbstractContextManager[Any]) -> Iterator[None]:
        """Inside, batches come from a test loader, and `contexts` are entered."""
        with contextlib.ExitStack() as scoring:
            for context in contexts:
                scoring.enter_context(context)
            self.open.append(scoring)
            scoring.callback(self.open.remove, scoring)
            yield

    def end(self) -> None:
        """Leave the contexts of iterators that somebody keeps."""
        while self.open:
            self.open[-1].close()

    def check_ended(self) -> None:
        """Raise UsageError if a loss was computed in the contexts of a test loader."""
        if self.open:
            raise UsageError(*TAKEN_OVER_STEPS)

    def see_score(self) -> None:
        if not self.is_scoring:
            self.scored_elsewhere = True

    def begin_step(self) -> None:
        """To be called when a training step begins. A pass before it is a score if what it gave is
        added up later."""
        self.scored_before_steps |= self.scored_elsewhere
        self.scored_elsewhere = False

    def begin_batch(self) -> None:
        """To be called when a test loader gives a batch."""
        self.returned_before = self.returned
        self.returned = []

    def see_pass(self, inputs: Any, outputs: Any) -> None:
        """Called after a forward pass. inputs, outputs: any containers of tensors."""
        if not self.is_scoring or self.has_warned_of_carried:
            return
        before = {memory.cdata for memory in self.returned_before}
        if before and any(memory.cdata in before for memory in _memory_of(inputs)):
            self.has_warned_of_carried = True
            log.warning(CARRIED)
        self.returned += _memory_of(outputs)

    def see_sum(self, processes: int, value: Any = 1) -> None:
        """Called before a value is added up. 0 counts nothing twice: the call is a barrier."""
        is_barrier = isinstance(value, int) and value == 0
        may_warn = not self.has_warned and processes > 1 and not is_barrier
        if may_warn and (self.scored_elsewhere or self.scored_before_steps):
            self._look_at_sum(processes)
        self.scored_elsewhere = False

    def _look_at_sum(self, processes: int) -> None:
        """Warn if the user's line adds up a score, and is no mean over the processes."""
        frame = next(user_frames(), None)
        place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        is_score = self.scored_elsewhere
        if frame and not is_score and place not in self.sums:
            self.sums.add(place)
            is_score = LoopCode.of_frame(frame).is_summed_after_steps(frame.f_lineno)
        if is_score and ".processes" not in linecache.getline(*place):
            self.has_warned = True
            log.warning(
                "run.sum: the model got batches that are not from run.test_loader. If every"
                " process got all batches, the sum counts each of them %d times; use"
                " run.test_loader(data, batch_size=256)",
                processes,
            )


def _memory_of(value: Any) -> list[StorageWeakRef]:
    """Weak references to the memory of the tensors in a value. As long as one is kept, no other
    memory has its `cdata`."""
    return [
        StorageWeakRef(tensor.untyped_storage())
        for tensor in tensors(value)
        if tensor.layout == torch.strided
    ]
