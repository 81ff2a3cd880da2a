"""The batches of a session.

The global batches are the same for any number of processes, which share each.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from ddp_train.data.batch_plan import MicroBatch, evaluation_batch
from ddp_train.data.collate_trial import WARNING, dependence_of_collate
from ddp_train.data.datasets import digests
from ddp_train.data.global_batches import (
    EvenBatches,
    GlobalBatches,
    number_of_batches,
)
from ddp_train.data.loader import LoaderOptions
from ddp_train.data.rng import hash_key
from ddp_train.data.sampled_batches import SampledBatches
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.process_group import averaged_buffers, same_everywhere
from ddp_train.distributed.training_step import scored, shared_out
from ddp_train.distributed.world import World
from ddp_train.models.put_back import leaving_nothing
from ddp_train.resilience.failure import READS_AT_ONCE
from ddp_train.resilience.heartbeat import EPOCH_END
from ddp_train.sessions.data_arguments import DataArguments, known_length
from ddp_train.sessions.feed import NumberedFeed, look_at_empty_batch, reported_batches
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.update_record import UPDATES
from ddp_train.sessions.watches.score_watch import TAKEN_OVER_STEPS
from ddp_train.sessions.wrapped import WAY_OF_UPDATE_BN, is_in_update_bn
from ddp_train.tasks.logged_numbers import no_numbers
from ddp_train.text import counted

log = logging.getLogger(__name__)
Collate = Callable[[list[Any]], Any]
"""Samples -> a batch."""
SAME_DATA = (
    "create the data set inside of `with ddp_train.session(...)`, where all processes draw the"
    " same random numbers. If it is created before, use a generator with a seed for random_split"
    " and all other shuffling"
)


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
    is_iterable = isinstance(dataset, IterableDataset)  # which inherits a __getitem__
    if is_iterable or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{method}: {name} is an iterable data set, but {method} divides the samples among"
            " the processes by index",
            "pass a map-style data set, with __getitem__ and __len__, for example a list:"
            f" {method}(list(data), batch_size=256)",
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{method}: {name} has no __len__, but {method} divides the samples among the"
            " processes by index",
            "add def __len__(self), which returns the number of samples",
        )
    if not len(dataset):
        remedy = "check how the data set is created"
        if method == "run.loader":
            remedy += (
                ". For a buffer that is filled later (a replay buffer), use loader ="
                " run.loader(range(64), global_batch_size=64, shuffle=False, repeat=True) in"
                " place of the buffer. Draw the indices of a whole batch on all processes alike,"
                " and train on buffer[indices[mine]] for each mine in loader"
            )
        raise UsageError(f"{method}: {name} has no samples", remedy)
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
    try:
        with leaving_nothing(f"{method}: a look at some samples", _parts_of(source)):
            first = digests(source)
            again = digests(source)
    except Exception as error:
        error.add_note(f"({method} {READS_AT_ONCE})")
        raise
    same_everywhere(len(source), device, f"{method}: the number of samples", SAME_DATA)
    number = 0
    if again == first:
        last_digits = "".join(first.values())[-15:]
        number = int.from_bytes(last_digits.encode(), "big") % (2**61 - 1)
    else:
        first = {}  # it draws with a generator of its own
    same_everywhere(number, device, f"{method}: a digest of the samples", SAME_DATA)
    return first


def _parts_of(source: Rows | UserDataset) -> dict[str, Any]:
    """The objects that may change when samples are read, by names."""
    parts = {"the data set": source.dataset}
    if isinstance(source, UserDataset):
        parts["collate_fn"] = source.collate
    return parts


def numbered_feed(steps: Steps, arguments: DataArguments) -> NumberedFeed:
    """The batches of a map-style data set, in order, shuffled or by a sampler.

    Raises UsageError if there are none, and PeerError if the data are not the same everywhere.
    """
    settings = steps.settings
    method = "run.loader"
    arguments.check(method)
    source = source_of(arguments.dataset, settings.seed, arguments.collate_fn, method)
    data = common_digests(source, steps.device, method)
    if arguments.collate_fn is not None and steps.world.size > 1:
        _try_collate(source, steps.world)
    batches = _global_batches(steps, source, arguments)
    facts = {
        "samples": len(source),
        "global_batch_size": arguments.batch_size,
        "shuffle": arguments.is_shuffled,
        "drop_last": arguments.drop_last,
        "seed": settings.seed,
        "sampler": "none",
        "data": data,
    }
    if isinstance(batches, SampledBatches):
        facts["sampler"] = batches.name
    if arguments.batch_size:
        drawn = source if arguments.sampler is None else arguments.sampler
        _look_at_batches(steps, source, known_length(drawn), arguments)
    options = options_of(steps.device, arguments.num_workers)
    options = dataclasses.replace(
        options,
        worker_init_fn=arguments.worker_init_fn,
        prefetch_factor=arguments.prefetch_factor,
        persistent_workers=options.persistent_workers and arguments.persistent_workers,
    )
    return NumberedFeed(steps, source, batches, options, facts)


def _try_collate(source: UserDataset, world: World) -> None:
    """Warn if a sample depends, by the user's collate_fn, on what else is in its batch."""
    with leaving_nothing("run.loader: a trial of collate_fn", _parts_of(source)):
        dependence = dependence_of_collate(source)
    if dependence and world.is_leader:
        log.warning(WARNING, "run.loader: collate_fn", dependence)


def _look_at_batches(
    steps: Steps, source: Any, samples: int | None, arguments: DataArguments
) -> None:
    """Raise UsageError if there are no batches, and say if one has too few samples.

    samples: of an epoch; None if nobody knows.
    """
    size = arguments.batch_size
    assert size, "without it the batches are those of a batch sampler"
    if samples is None:
        return
    count = number_of_batches(samples, size, arguments.drop_last)
    if not count:
        raise UsageError(
            f"run.loader: drop_last=True leaves no batch: there are {counted(samples, 'sample')},"
            f" fewer than global_batch_size={size}",
            f"use global_batch_size={max(samples, 1)}, or drop_last=False",
        )
    smallest = min(samples - (count - 1) * size, size)
    look_at_empty_batch(source, smallest, steps.world)


def _global_batches(steps: Steps, source: Any, arguments: DataArguments) -> GlobalBatches:
    seed = steps.settings.seed
    batch_sampler = arguments.any_batch_sampler()
    if batch_sampler is not None:
        number = len(steps.loaders.current)
        return SampledBatches(
            batch_sampler,
            source,
            hash_key(seed, "loader", number),
            steps.device,
            keyed_by_place=not isinstance(source, Rows),
            loader_generator=arguments.generator,
        )
    assert arguments.batch_size, "check has seen to it"
    order_seed = seed if arguments.is_shuffled else None
    short_batch_at = None
    if steps.settings.is_proof:
        short_batch_at = UPDATES - 1
    return EvenBatches(
        source, arguments.batch_size, arguments.drop_last, order_seed, short_batch_at
    )


class TestLoader:
    """Each sample once, on one process, in the order of the data set: process 0 has the first ones.

    The batches are the same for any number of processes, which share them, so a sum over all of
    them is the same, also of means of batches. It may be iterated often.
    """

    __test__ = False  # no tests, for pytest

    def __init__(
        self, steps: Steps, source: Any, dataset: Any, batch_size: int, options: LoaderOptions
    ) -> None:
        """dataset: what the user gave; source: gives its samples."""
        self.dataset = dataset
        self.shares = TestShares(source, batch_size, steps.world)
        batches = len(self.shares.starts)
        if batches < steps.world.size and steps.world.is_leader:
            print(
                f"note: run.test_loader: there are {batches} batches for {steps.world.size}"
                " processes, so some processes have nothing to do; use a smaller batch_size",
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

        Raises UsageError for torch's `update_bn`, which takes statistics of the batches that it is
        given, on several processes.
        """
        steps = self.steps
        if steps.world.size > 1 and is_in_update_bn():
            raise UsageError(
                "update_bn got a run.test_loader, whose batches differ between processes, so the"
                " statistics of batch norm would differ too",
                WAY_OF_UPDATE_BN,
            )
        averaged = averaged_buffers(steps.modules_together(), keep_if_alike=True)
        step = steps.loop.position.step
        open_step = steps.loop.open_step
        with steps.watches.scores.scoring(averaged, shared_out(), no_numbers()):
            for batch in self.batches:
                steps.watches.scores.begin_batch()
                with scored(batch.micro_batch):
                    yield batch.data
                if steps.loop.position.step != step or steps.loop.open_step is not open_step:
                    raise UsageError(*TAKEN_OVER_STEPS)
        if steps.world.size > 1 and steps.world.is_leader:
            steps.watches.printed_counts.end_pass()
        steps.status.phase = EPOCH_END


@dataclasses.dataclass
class TestShares:
    """This process's batches of a data set that is scored."""

    __test__ = False  # no tests, for pytest

    source: Any
    batch_size: int
    world: World

    @property
    def starts(self) -> range:
        """Numbers of the first sample of each global batch, at the data set's present length."""
        return range(0, len(self.source), self.batch_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        starts = self.starts
        first = -(-len(starts) * self.world.rank // self.world.size)
        end = -(-len(starts) * (self.world.rank + 1) // self.world.size)
        for number, start in enumerate(starts[first:end]):
            indices = np.arange(start, min(start + self.batch_size, starts.stop))
            yield evaluation_batch(number, indices)


def options_of(device: str, num_workers: int) -> LoaderOptions:
    on_gpu = device.startswith("cuda")
    return LoaderOptions(
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=on_gpu,
        non_blocking=on_gpu,
    )
