"""The step or batch that is being computed: what `all_gather` and keyed noise must know of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

ACCUMULATES = (
    "train.accumulation_steps: ddp_train.all_gather sees the samples of one micro-batch, so the"
    " loss would depend on accumulation; use train.accumulation_steps=1"
)

ALL_GATHER = "ddp_train.all_gather"
BATCH_NORM = "batch norm"


class Share(Protocol):
    """The samples of one forward pass, see `data.batch_plan.MicroBatch`."""

    @property
    def seed(self) -> int: ...
    @property
    def epoch(self) -> int | None: ...
    @property
    def step(self) -> int: ...
    @property
    def indices(self) -> Any: ...
    @property
    def num_real(self) -> int: ...


class TrainingStep:
    """A context around forward and backward of a micro-batch."""

    __slots__ = ("_without_samples", "all_count", "counts", "has_replicas", "refused", "share")

    def __init__(
        self,
        counts: bool = True,
        is_last: bool = True,
        refused: str = "",
        share: Share | None = None,
        has_replicas: bool = False,
        all_count: bool = True,
    ) -> None:
        """counts: whether the rows of this process count; False for an empty batch, or a stand-in,
            see `data.batch_plan.MicroBatch`.
        is_last: whether the micro-batch is the last of its optimizer step.
        refused: why rows cannot be gathered here, with the remedy.
        share: the samples of the micro-batch; None: nobody knows them.
        has_replicas: several GPUs compute a part of the rows each, in threads of this process.
        all_count: in a session, whether there are rows that count on every process.
        """
        self.counts = counts
        self.refused = refused or ("" if is_last else ACCUMULATES)
        self.share = share
        self.has_replicas = has_replicas
        self.all_count = all_count
        self._without_samples: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        CURRENT.begin(self)
        if not self.counts:
            from ddp_train.distributed.empty_batch import step_without_samples  # imports torch

            self._without_samples = step_without_samples()

    def __exit__(self, *_: object) -> None:
        if self._without_samples:
            self._without_samples.close()
        CURRENT.end()


class Current:
    """The current step of the process, not of a thread: the replicas of DataParallel run in threads
    of their own. An object holds it, since each assignment to a class empties Python's caches for
    that class."""

    step: TrainingStep | None = None
    share: Share | None = None
    """The samples in the rows of the current batch, in a training step or in an evaluation."""
    draws: Any = None
    """The draws for these samples, see `data.keyed_noise.Draws`; None before the first."""
    scored: list[ScoredBatch]
    """The batches whose scoring has begun and not ended, in that order."""
    marks: int = 0
    """How often this process has called `data.rng.draw_mark`."""
    gathers: int = 0
    """How often this process has called `ddp_train.all_gather`."""
    see_exchange: Callable[[str], None] | None = None
    """Called with the name of an exchange in a forward pass before it: ALL_GATHER, BATCH_NORM."""
    contexts_shared_out: int = 0
    """Contexts in which processes have different numbers of batches; iterators that hold some may
    end in any order."""

    @property
    def is_shared_out(self) -> bool:
        """Processes are given batches of their own, of which they have different numbers."""
        return self.contexts_shared_out > 0

    def __init__(self) -> None:
        self.scored = []

    def begin(self, step: TrainingStep) -> None:
        self.step = step
        self.share = step.share
        self.draws = None

    def end(self) -> None:
        self.step = None
        self.share = None
        self.draws = None


CURRENT = Current()


@dataclass(eq=False)
class ScoredBatch:
    """A batch that is scored, and what was current before it."""

    share: Share
    share_before: Share | None
    draws_before: Any

    def begin(self) -> None:
        CURRENT.scored.append(self)
        CURRENT.share = self.share
        CURRENT.draws = None

    def end(self) -> None:
        """Make that current again which was so before, unless another batch has begun since.

        The iterators of a `zip` end their batches in the order in which they began them: the batch
        that began later then leads back to what was current before both.
        """
        CURRENT.scored.remove(self)
        for later in CURRENT.scored:
            if later.share_before is self.share:
                later.share_before = self.share_before
                later.draws_before = self.draws_before
        if CURRENT.share is self.share:
            CURRENT.share = self.share_before
            CURRENT.draws = self.draws_before


@contextlib.contextmanager
def scored(share: Share) -> Iterator[None]:
    """A context around the forward pass of a batch that is scored, inside of a step or outside."""
    batch = ScoredBatch(share, CURRENT.share, CURRENT.draws)
    batch.begin()
    try:
        yield
    finally:
        batch.end()


@contextlib.contextmanager
def beside(step: TrainingStep) -> Iterator[None]:
    """A context around the forward pass of a batch that is no step of training, inside of one or
    outside."""
    before = CURRENT.step, CURRENT.share, CURRENT.draws
    try:
        with step:
            yield
    finally:
        CURRENT.step, CURRENT.share, CURRENT.draws = before


@contextlib.contextmanager
def thrown_away() -> Iterator[None]:
    """A context around passes that do not count: draws after it are numbered as if it were not."""
    before = CURRENT.draws
    CURRENT.draws = None
    try:
        yield
    finally:
        CURRENT.draws = before


@contextlib.contextmanager
def shared_out() -> Iterator[None]:
    """A context in which processes have different numbers of batches."""
    CURRENT.contexts_shared_out += 1
    try:
        yield
    finally:
        CURRENT.contexts_shared_out -= 1
