"""What `all_gather` must know of the current training step. Strategies set it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

ACCUMULATES = (
    "train.accumulation_steps: ddp_train.all_gather sees the samples of one micro-batch, so the"
    " loss would depend on accumulation; use train.accumulation_steps=1"
)


class TrainingStep:
    """A context around forward and backward of a micro-batch."""

    def __init__(self, counts: bool = True, is_last: bool = True, refused: str = "") -> None:
        """counts: whether the rows of this process count; False for an empty batch, or a stand-in,
            see `data.batch_plan.MicroBatch`.
        is_last: whether the micro-batch is the last of its optimizer step.
        refused: why rows cannot be gathered here, with the remedy.
        """
        self.counts = counts
        self.refused = refused or ("" if is_last else ACCUMULATES)
        self._without_samples = contextlib.ExitStack()

    def __enter__(self) -> None:
        CURRENT.step = self
        if not self.counts:
            from ddp_train.distributed.empty_batch import step_without_samples  # imports torch

            self._without_samples = step_without_samples()

    def __exit__(self, *_: object) -> None:
        if not self.counts:
            self._without_samples.close()
        CURRENT.step = None


class Current:
    """The current step of the process, not of a thread: the replicas of DataParallel run in threads
    of their own. An object holds it, since each assignment to a class empties Python's caches for
    that class."""

    step: TrainingStep | None = None
    is_shared_out: bool = False
    """Processes are given batches of their own, of which they have different numbers."""


CURRENT = Current()
training_step = functools.cache(TrainingStep)
"""Returns a shared TrainingStep: making one takes a microsecond of each step."""


@contextlib.contextmanager
def shared_out() -> Iterator[None]:
    """A context in which processes have different numbers of batches."""
    CURRENT.is_shared_out = True
    try:
        yield
    finally:
        CURRENT.is_shared_out = False
