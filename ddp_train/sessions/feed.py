"""The sources of batches for the loaders of a session."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.global_batches import GlobalBatches, Pass, share_of
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.no_samples import batch_without_samples
from ddp_train.distributed.process_group import same_everywhere
from ddp_train.distributed.world import World
from ddp_train.engine.step_observers import ReportedBatches
from ddp_train.models.put_back import leaving_nothing
from ddp_train.sessions.data_arguments import known_length
from ddp_train.sessions.steps import Steps
from ddp_train.text import counted

SAME_LENGTH = (
    "change the data set in the same way on all processes: let the change depend on the epoch,"
    " not on the process"
)


class Feed(Protocol):
    """This process's share of the global batches of each pass over some data."""

    facts: dict[str, Any]
    """Facts that identify the batches; inside of a pass they must not change."""

    def __len__(self) -> int:
        """The number of batches of a pass over the data as they are now.

        Raises TypeError if nobody knows it.
        """
        ...

    def set_epoch(self, epoch: int) -> None:
        """Called where an epoch begins, before the user's loop has it."""
        ...

    def begin(self, begun: Pass, first: int) -> None:
        """Begin a pass at its batch `first`. A collective: every process must call it."""
        ...

    def pass_facts(self) -> dict[str, Any]:
        """Facts that identify the batches of the pass that has begun."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the pass that has begun, on the device."""
        ...

    def is_last(self, number: int) -> bool:
        """True if the batch with this number is known to be the last one of its pass."""
        ...

    def state(self, in_pass: bool, batch: int) -> dict[str, Any]:
        """The state that `restore` takes, plain data. A collective: every process must call it.

        in_pass: inside of the current pass.
        batch: its batches that are done.
        """
        ...

    def restore(self, state: dict[str, Any], in_pass: bool) -> None:
        """Called before the first pass of a resumed run.

        in_pass: it goes on in the pass inside of which `state` was saved; else in the next one.
        """
        ...


class NumberedFeed:
    """Batches of a map-style data set."""

    def __init__(
        self,
        steps: Steps,
        source: Any,
        batches: GlobalBatches,
        options: LoaderOptions,
        facts: dict[str, Any],
    ) -> None:
        self.device = steps.device
        self.source = source
        self.batches = batches
        self.facts = facts
        self.data_epochs = steps.watches.data_epochs
        self.epoch_methods = self.data_epochs.methods_of(source)
        self.shares = PassShares(batches, steps.world)
        self.reported = reported_batches(steps, source, self.shares, options)

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def begin(self, begun: Pass, first: int) -> None:
        what = "run.loader: the number of samples"
        same_everywhere(len(self.source), self.device, what, SAME_LENGTH)
        self.data_epochs.begin_pass(self.epoch_methods, self.source, begun.epoch)
        self.batches.begin(begun)
        self.shares.begin(begun, first)

    def pass_facts(self) -> dict[str, Any]:
        return {"samples_of_epoch": len(self.source), **self.batches.pass_facts()}

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.reported)

    def is_last(self, number: int) -> bool:
        return number + 1 == known_length(self.batches)

    def state(self, in_pass: bool, batch: int) -> dict[str, Any]:
        return self.batches.state(in_pass)

    def restore(self, state: dict[str, Any], in_pass: bool) -> None:
        self.batches.restore(state, in_pass)


class PassShares:
    """This process's share of each global batch that is left of a pass."""

    def __init__(self, batches: GlobalBatches, world: World) -> None:
        self.batches = batches
        self.world = world
        self.begun = Pass(0)
        self.first = 0

    def begin(self, begun: Pass, first: int) -> None:
        self.begun = begun
        self.first = first

    def __iter__(self) -> Iterator[MicroBatch]:
        world = self.world
        for number, indices in enumerate(self.batches.batches(self.first), self.first):
            yield share_of(indices, self.begun.key, number, world.rank, world.size)


def reported_batches(
    steps: Steps,
    source: Any,
    shares: Iterable[MicroBatch],
    options: LoaderOptions,
    prefix: str = "",
) -> ReportedBatches:
    """Batches on the device, whose place is reported to the launcher.

    Their loader processes end with them, or with the session.

    prefix: of the names of their phases.
    """
    loader = Loader(source, shares, steps.device, options, has_empty_batches=True)
    reported = ReportedBatches(loader, steps.status, prefix)
    steps.closings.append(weakref.finalize(reported, loader.close))
    return reported


def look_at_empty_batch(source: Any, smallest: int, world: World) -> None:
    """Print a note if some process will have no sample in some step.

    smallest: samples of the smallest global batch.

    Raises DataError if nobody knows what a batch without samples is.
    """
    if smallest >= world.size:
        return
    with leaving_nothing("run.loader: a look at a batch", {"the data set": source.dataset}):
        batch_without_samples(source, 0, 0)
    if world.is_leader:
        print(
            f"note: run.loader: the smallest global batch has {counted(smallest, 'sample')} for"
            f" {world.size} processes. A process without a sample gets an empty batch, and must"
            " make the same calls with it",
            file=sys.stderr,
        )
