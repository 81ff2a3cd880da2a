"""The batches of a session.

The global batches are the same for any number of processes, which share each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batch
from ddp_train.data.datasets import digests
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.no_samples import batch_without_samples
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.process_group import averaged_buffers, same_everywhere
from ddp_train.distributed.training_step import shared_out
from ddp_train.distributed.world import World
from ddp_train.engine.step_observers import ReportedBatches
from ddp_train.models.put_back import leaving_nothing
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.tasks.logged_numbers import no_numbers
from ddp_train.text import counted

Collate = Callable[[list[Any]], Any]
"""Samples -> a batch."""
SAME_DATA = (
    "give random_split, and whatever shuffles before the `with`, a generator with a seed, or make"
    " the data set inside of the `with`, where all processes draw the same"
)
SAME_LENGTH = "change a data set alike on all processes, by the number of the epoch for instance"


class Rows:
    """A TensorDataset as a source: its rows are cut out at once, and nothing is drawn."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> Any:
        index = torch.from_numpy(indices)  # 32 rows in 6 us, not the 9 of a numpy index
        return [tensor[index] for tensor in self.dataset.tensors]


def source_of(dataset: Any, seed: int, collate: Collate | None, method: str) -> Any:
    """A data set as a source of batches.

    method: the one that was called, for messages.

    Raises UsageError for a data set whose samples have no numbers.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{method}: it was given a DataLoader",
            f"give it the data set itself: {method}(loader.dataset)",
        )
    is_iterable = isinstance(dataset, IterableDataset)  # which inherits a __getitem__
    if is_iterable or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"{method}: {name} is iterable: its samples have no numbers, and cannot be shared"
            " exactly",
            "give it a map-style data set, with __getitem__ and __len__",
        )
    if not len(dataset):
        raise UsageError(f"{method}: {name} has no samples", "check its arguments")
    if type(dataset) is TensorDataset and collate is None:
        return Rows(dataset)
    source = UserDataset(dataset, seed, collate=collate or default_collate)
    source.dataset = dataset  # as it is, also one of torchvision's with masks
    source.epochs = None  # the user's loop calls set_epoch, and may change the length
    return source


def common_digests(source: Any, device: str, method: str) -> dict[str, str]:
    """Digests that identify the data; empty if its samples differ at each reading.

    Raises PeerError if the data are not the same for all processes.
    """
    with leaving_nothing(f"{method}: a look at some samples", {"the data set": source.dataset}):
        first = digests(source)
        again = digests(source)
    same_everywhere(len(source), device, f"{method}: the number of samples", SAME_DATA)
    number = 0
    if again == first:
        last_digits = "".join(first.values())[-15:]
        number = int.from_bytes(last_digits.encode(), "big") % (2**61 - 1)
    else:
        first = {}  # it draws with a generator of its own
    same_everywhere(number, device, f"{method}: a digest of the samples", SAME_DATA)
    return first


class TrainingLoader:
    """The batches of each epoch, or what is left of them: `for inputs, targets in loader`."""

    def __init__(
        self,
        steps: Steps,
        source: Any,
        global_batch_size: int,
        shuffle: bool,
        options: LoaderOptions,
    ) -> None:
        seed = steps.settings.seed
        world = steps.world
        kind = BatchPlan if shuffle else OrderedPlan
        plan = kind(len(source), global_batch_size, 1, 0, seed, world.rank, world.size)
        self.steps = steps
        self.source = source
        self.facts = {
            "samples": len(source),
            "global_batch_size": global_batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "steps_per_epoch": plan.steps_per_epoch,
        }
        self.epoch_used = -1
        if plan.has_empty_parts:
            with leaving_nothing("run.loader: a look at a batch", {"the data set": source.dataset}):
                batch_without_samples(source, 0, 0)  # raises where nobody knows what it is
            if world.is_leader:
                print(note_of_empty_batches(plan), file=sys.stderr)
        self.shares = EpochShares(plan, steps)
        self.batches = reported_batches(steps, source, self.shares, options)

    def __len__(self) -> int:
        """Batches of an epoch of the data set as it is now, as many on all processes; inside of a
        resumed one, those left."""
        return self._plan_of_data().steps_per_epoch - self.steps.first_batch

    def __iter__(self) -> Iterator[Any]:
        steps = self.steps
        epoch = steps.open_epoch("the loader of run.loader")
        if self.epoch_used == epoch:
            raise UsageError(
                f"the loader was used twice in epoch {epoch}",
                "use it once in each epoch; score with run.test_loader",
            )
        self.epoch_used = epoch
        plan = self._plan_of_data()
        what = "run.loader: the number of samples"
        same_everywhere(plan.samples, steps.device, what, SAME_LENGTH)
        self.shares.plan = plan
        steps.begin_batches(plan.samples, plan.steps_per_epoch)
        for batch in self.batches:
            steps.begin_step(batch.micro_batch)
            try:
                yield batch.data
            except GeneratorExit:
                steps.leave_step()
                raise
            steps.end_step(is_last=steps.position.batch + 1 == plan.steps_per_epoch)
        steps.status.phase = "hook"

    def _plan_of_data(self) -> BatchPlan:
        """The plan of an epoch: the user's loop may have changed the number of samples."""
        return dataclasses.replace(self.shares.plan, samples=len(self.source))


def note_of_empty_batches(plan: BatchPlan) -> str:
    """A note that some process has no sample in some step."""
    full = min(plan.samples, plan.global_batch_size)
    smallest = plan.samples % plan.global_batch_size or full
    return (
        f"note: run.loader: the smallest global batch has {counted(smallest, 'sample')} for"
        f" {plan.world_size} processes: those without one get a batch of the length 0, and must"
        " take part with it"
    )


class OrderedPlan(BatchPlan):
    """The samples in the order of the data set, in every epoch."""

    def global_batch(self, step: int) -> np.ndarray:
        start = step % self.steps_per_epoch * self.global_batch_size
        return np.arange(start, min(start + self.global_batch_size, self.samples))


@dataclasses.dataclass
class EpochShares:
    """This process's share of each global batch that is left of the current epoch."""

    plan: BatchPlan
    """The global batches of the data set as it is in this epoch."""
    steps: Steps

    def __iter__(self) -> Iterator[MicroBatch]:
        position = self.steps.position
        steps_per_epoch = self.plan.steps_per_epoch
        first_of_epoch = position.epoch * steps_per_epoch
        plan = dataclasses.replace(self.plan, steps=first_of_epoch + steps_per_epoch)
        return plan.micro_batches(first_of_epoch + position.batch)


class TestLoader:
    """Each sample once, on one process, in the order of the data set: process 0 has the first ones.

    The batches are the same for any number of processes, which share them: what a loop adds up of
    each, a mean among it, has the same sum. Iterated as often as one likes.
    """

    __test__ = False  # no tests, for pytest

    def __init__(self, steps: Steps, source: Any, batch_size: int, options: LoaderOptions) -> None:
        self.shares = TestShares(source, batch_size, steps.world)
        batches = len(self.shares.starts)
        if batches < steps.world.size and steps.world.is_leader:
            print(
                f"note: run.test_loader: its batches are {batches}, and the processes"
                f" {steps.world.size}: the last ones have none; give each one, or more, by a"
                " smaller batch_size",
                file=sys.stderr,
            )
        self.steps = steps
        self.batches = reported_batches(steps, source, self.shares, options, "evaluation ")

    def __len__(self) -> int:
        """Batches of all processes together: by it a sum over all of them is divided."""
        return len(self.shares.starts)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches. Meanwhile buffers that differ between processes are their mean.

        Batch norm's statistics differ, where they are not synchronised.
        """
        steps = self.steps
        averaged = contextlib.nullcontext()
        if steps.model:
            averaged = averaged_buffers(steps.model.module, keep_if_alike=True)
        step = steps.position.step
        share = steps.micro_batch
        with averaged, steps.score_watch.scoring(), shared_out(), no_numbers():
            for batch in self.batches:
                yield batch.data
                if steps.position.step != step or steps.micro_batch is not share:
                    raise UsageError(
                        "the batches of run.test_loader were taken over several steps of"
                        " training: each process has others, and another number of them",
                        "go through them in one go; to train on pairs give run.loader one data"
                        " set whose samples are the pairs",
                    )
        steps.status.phase = "hook"


@dataclasses.dataclass
class TestShares:
    """This process's batches of a data set that is scored."""

    __test__ = False  # no tests, for pytest

    source: Any
    batch_size: int
    world: World

    @property
    def starts(self) -> range:
        """The first sample of each batch of all processes, of the data set as it is now."""
        return range(0, len(self.source), self.batch_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        starts = self.starts
        first = -(-len(starts) * self.world.rank // self.world.size)
        end = -(-len(starts) * (self.world.rank + 1) // self.world.size)
        for number, start in enumerate(starts[first:end]):
            indices = np.arange(start, min(start + self.batch_size, starts.stop))
            yield evaluation_batch(number, indices)


def reported_batches(
    steps: Steps,
    source: Any,
    shares: Iterable[MicroBatch],
    options: LoaderOptions,
    prefix: str = "",
) -> ReportedBatches:
    """Batches on the device, whose place is reported to the launcher. prefix: of their phases."""
    loader = Loader(source, shares, steps.device, options, has_empty_batches=True)
    steps.loaders.append(loader)
    return ReportedBatches(loader, steps.status, prefix)


def options_of(device: str, num_workers: int) -> LoaderOptions:
    on_gpu = device.startswith("cuda")
    return LoaderOptions(
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=on_gpu,
        non_blocking=on_gpu,
    )
