"""The batches of a session: the global batches are the same for any number of processes, each has
its share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.datasets import digests
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.process_group import averaged_buffers, same_everywhere
from ddp_train.engine.step_observers import ReportedBatches
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps

Collate = Callable[[list[Any]], Any]
SAME_DATA = (
    "give random_split, and whatever shuffles before the `with`, a generator with a seed, or make"
    " the data set inside of the `with`, where all processes draw the same"
)


class Rows:
    """A TensorDataset: its rows are cut out at once, and nothing is drawn."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.tensors = dataset.tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> Any:
        index = torch.from_numpy(indices)  # 32 rows in 6 us, not the 9 of a numpy index
        return [tensor[index] for tensor in self.tensors]


def source_of(dataset: Any, seed: int, collate: Collate | None, what: str) -> Any:
    """What gives samples by their numbers. Raises UsageError for what has no numbers. what: the
    method that was called."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{what}: it was given a DataLoader",
            f"give it the data set itself: {what}(loader.dataset)",
        )
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise UsageError(
            f"{what}: {type(dataset).__name__} is iterable: its samples have no numbers, and cannot"
            " be shared exactly",
            "give it a map-style data set, with __getitem__ and __len__",
        )
    if not len(dataset):
        raise UsageError(f"{what}: {type(dataset).__name__} has no samples", "check its arguments")
    if type(dataset) is TensorDataset and collate is None:
        return Rows(dataset)
    source = UserDataset(dataset, seed, collate=collate or default_collate)
    source.dataset = dataset  # as it is, also one of torchvision's with masks
    return source


def common_digests(source: Any, device: str, what: str) -> dict[str, str]:
    """What identifies the data. Raises PeerError if it is not the same for all processes."""
    found = digests(source)
    same_everywhere(len(source), device, f"{what}: the number of samples", SAME_DATA)
    drawn = int(digests(source) != found)  # with a generator of its own, other samples each time
    if drawn:
        number = 0
    else:
        number = int.from_bytes("".join(found.values()).encode()[-15:], "big") % (2**61 - 1)
    same_everywhere(number, device, f"{what}: a digest of the samples", SAME_DATA)
    return {} if drawn else found


class TrainingLoader:
    """Gives each epoch's batches, or what is left of them, once: `for inputs, targets in
    loader`."""

    def __init__(
        self,
        steps: Steps,
        source: Any,
        global_batch_size: int,
        shuffle: bool,
        options: LoaderOptions,
    ) -> None:
        world = steps.world
        kind = BatchPlan if shuffle else _InOrder
        plan = kind(
            len(source), global_batch_size, 1, 0, steps.settings.seed, world.rank, world.size
        )
        self.steps = steps
        self.shares = _Shares(plan)
        self.facts = {
            "samples": len(source),
            "global_batch_size": global_batch_size,
            "shuffle": shuffle,
            "seed": steps.settings.seed,
            "steps_per_epoch": plan.steps_per_epoch,
        }
        self.epoch_used = -1
        self.batches = _reported(steps, source, self.shares, options)

    def __len__(self) -> int:
        """Batches of an epoch: as many on all processes."""
        return self.facts["steps_per_epoch"]

    def __iter__(self) -> Iterator[Any]:
        steps = self.steps
        epoch = steps.open_epoch("the loader of run.loader")
        if self.epoch_used == epoch:
            raise UsageError(
                f"the loader was used twice in epoch {epoch}",
                "use it once in each epoch; score with run.test_loader",
            )
        self.epoch_used = epoch
        self.shares.begin(epoch, steps.position.batch)
        for batch in self.batches:
            steps.begin_step(batch.micro_batch)
            yield batch.data
            steps.end_step(is_last=steps.position.batch + 1 == len(self))
        steps.status.phase = "hook"


class _InOrder(BatchPlan):
    """The samples in the order of the data set, in every epoch."""

    def global_batch(self, step: int) -> np.ndarray:
        start = step % self.steps_per_epoch * self.global_batch_size
        return np.arange(start, min(start + self.global_batch_size, self.samples))


class _Shares:
    """This process's share of each global batch that is left of an epoch. Iterated once for each
    epoch."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.first_step = 0

    def begin(self, epoch: int, batch: int) -> None:
        each = self.plan.steps_per_epoch
        self.plan = dataclasses.replace(self.plan, steps=(epoch + 1) * each)
        self.first_step = epoch * each + batch

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.plan.micro_batches(self.first_step)


class TestLoader:
    """Each sample once, on one process, in the order of the data set: process 0 has the first ones.
    Iterated as often as one likes."""

    __test__ = False  # no tests, for pytest

    def __init__(self, steps: Steps, source: Any, batch_size: int, options: LoaderOptions) -> None:
        count = len(source)
        world = steps.world
        first, last = (count * rank // world.size for rank in (world.rank, world.rank + 1))
        self.shares = [
            MicroBatch(None, number, indices, len(indices), 0.0, True)
            for number, start in enumerate(range(first, last, batch_size))
            for indices in [np.arange(start, min(start + batch_size, last))]
        ]
        self.steps = steps
        self.batches = _reported(steps, source, self.shares, options, "evaluation ")

    def __len__(self) -> int:
        """Batches of this process."""
        return len(self.shares)

    def __iter__(self) -> Iterator[Any]:
        """Buffers that differ between processes, batch norm's statistics without synchronising, are
        their mean meanwhile."""
        model = self.steps.model
        with (
            averaged_buffers(model.module, keep_if_alike=True)
            if model
            else contextlib.nullcontext()
        ):
            self.steps.is_scoring = True
            try:
                for batch in self.batches:
                    yield batch.data
            finally:
                self.steps.is_scoring = False
        self.steps.status.phase = "hook"


def _reported(
    steps: Steps,
    source: Any,
    shares: Iterable[MicroBatch],
    options: LoaderOptions,
    prefix: str = "",
) -> ReportedBatches:
    loader = Loader(source, shares, steps.device, options)
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
