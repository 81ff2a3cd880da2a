"""The arguments of `run.loader`, which may be those of a DataLoader of torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.streams.loader_processes import start_method
from ddp_train.plain_state import PLAIN_DATA, problem_of_state
from ddp_train.sessions.settings import UsageError

BATCH_SIZE = (
    "use run.loader(dataset, global_batch_size=64), where 64 is the number of samples of a step"
    " over all processes together"
)

TEST_BATCH_SIZE = (
    "use run.test_loader(dataset, batch_size=256), where 256 is the number of samples of a batch"
    " on one process"
)


@dataclass(frozen=True)
class DataArguments:
    """The arguments from which batches are made, by the names of torch's DataLoader."""

    dataset: Any
    batch_size: int | None = None
    """Samples of a global batch; None with a batch sampler of the user's own."""
    shuffle: bool | None = None
    """None: only without a sampler."""
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    generator: torch.Generator | None = None
    """The generator of a DataLoader."""
    worker_init_fn: Callable[[int], Any] | None = None
    prefetch_factor: int = 2
    persistent_workers: bool = True
    """Loader processes live on from pass to pass, while the data set stays as it is."""

    @property
    def is_shuffled(self) -> bool:
        return self.shuffle is not False

    def any_batch_sampler(self) -> Any:
        """An iterable of batches as lists of sample numbers; None without a sampler."""
        if self.batch_sampler is not None:
            return self.batch_sampler
        if self.sampler is None:
            return None
        assert self.batch_size, "check has seen to it"
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)

    def check(self, method: str) -> None:
        """Raise UsageError if arguments contradict each other. method: the one that was called."""
        samplers = {"sampler": self.sampler, "batch_sampler": self.batch_sampler}
        given = {name: value for name, value in samplers.items() if value is not None}
        both = ""
        if len(given) == 2:
            both = "sampler and batch_sampler"
        elif given and self.shuffle:
            both = "shuffle and a sampler"
        elif "batch_sampler" in given and (self.batch_size is not None or self.drop_last):
            both = "batch_sampler and global_batch_size (or drop_last)"
        if both:
            raise UsageError(
                f"{method} got {both}, which contradict each other",
                "use sampler= with global_batch_size=, or batch_sampler= alone (its batches are"
                " for all processes together)",
            )
        if self.batch_sampler is None:
            checked_batch_size(self.batch_size, "global_batch_size", BATCH_SIZE, method)
        for name, sampler in given.items():
            _check_sampler(name, sampler, method)


def checked_batch_size(size: Any, name: str, remedy: str, method: str) -> int:
    """The size. Raises UsageError for what is no number of samples. name: of the argument."""
    if not isinstance(size, int) or size < 1:
        value = "missing" if size is None else size
        raise UsageError(f"{method}: {name} is {value}", remedy)
    return size


def _check_sampler(name: str, sampler: Any, method: str) -> None:
    if isinstance(sampler, type) or not hasattr(sampler, "__iter__"):
        raise UsageError(
            f"{method}: {name} is a {type(sampler).__name__}, which cannot be iterated",
            "pass an object, not a class. Its __iter__ must give the indices of the samples of"
            " an epoch",
        )
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"{method}: {name} is an iterator ({type(sampler).__name__}), which is empty after one"
            " epoch",
            "pass an object whose __iter__ starts a new epoch each time it is called",
        )
    inner = getattr(sampler, "sampler", None)
    for one in [sampler] if inner is None else [sampler, inner]:
        if isinstance(one, DistributedSampler):
            raise UsageError(
                f"{method}: {name} is a DistributedSampler, but run.loader divides the samples"
                " among the processes itself",
                "leave the DistributedSampler out. If it wraps another sampler, pass that one",
            )
        if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
            problem = problem_of_state(one.state_dict())
            if problem:
                raise UsageError(
                    f"{method}: the state_dict of {name} is not plain data: {problem}",
                    PLAIN_DATA,
                )


def known_length(samples: Any) -> int | None:
    """The length of a data set or a sampler; None if it has none."""
    try:
        return len(samples)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def whole_arguments(given: DataArguments, method: str) -> DataArguments:
    """The arguments, or those of the DataLoader that was given as data set.

    Raises UsageError if both say something.
    """
    loader = given.dataset
    if not isinstance(loader, DataLoader):
        return given
    if given != DataArguments(loader):
        raise UsageError(
            f"{method} got a DataLoader and other arguments",
            "pass the DataLoader alone, or its data set with the other arguments",
        )
    return taken_apart(loader, method)


def taken_apart(loader: DataLoader[Any], method: str) -> DataArguments:
    """The arguments that a DataLoader was made with. Raises UsageError if it makes no batches."""
    if loader.batch_sampler is None:
        remedy = "give the DataLoader a batch_size, or a batch_sampler"
        if isinstance(loader.dataset, IterableDataset):
            remedy = (
                "let the data set give single samples (for example leave out .batched()), and"
                " give the DataLoader a batch_size"
            )
        raise UsageError(
            f"{method} got a DataLoader with batch_size=None, whose data set makes the batches",
            remedy,
        )
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    _check_processes(loader, method)
    arguments = DataArguments(
        loader.dataset,
        collate_fn=collate_fn,
        num_workers=loader.num_workers,
        generator=loader.generator,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor or 2,
        # Whether a function is called for each pass can be seen, the start of a process cannot.
        persistent_workers=loader.persistent_workers or loader.worker_init_fn is None,
    )
    if type(loader.batch_sampler) is not BatchSampler:
        return replace(arguments, batch_sampler=loader.batch_sampler)
    arguments = replace(arguments, batch_size=loader.batch_size, drop_last=loader.drop_last)
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return arguments
    if type(sampler) is SequentialSampler:
        return replace(arguments, shuffle=False)
    if is_plain_shuffle(sampler):
        return replace(arguments, shuffle=True)
    return replace(arguments, sampler=sampler)


def _check_processes(loader: DataLoader[Any], method: str) -> None:
    """Raise UsageError if its processes are to be started in another way than those of a session.

    What it says of hangs and of pinned memory has no effect, which is noted.
    """
    context = loader.multiprocessing_context
    if context is not None:
        asked = context.get_start_method()
        used = start_method()
        if asked != used:
            raise UsageError(
                f"{method} got a DataLoader with multiprocessing_context={asked!r}, but all"
                f" loader processes are started by {used!r}",
                f"call multiprocessing.set_start_method({asked!r}) before the data set is created,"
                " and leave out multiprocessing_context",
            )
    unused = {}
    if loader.timeout:
        unused[f"timeout={loader.timeout:g}"] = (
            "use timeout_seconds of ddp_train.session, which detects hangs"
        )
    if loader.pin_memory_device:
        device = loader.pin_memory_device
        unused[f"pin_memory_device={device!r}"] = "batches are copied to run.device"
    for option, instead in unused.items():
        print(f"note: {method}: {option} has no effect: {instead}", file=sys.stderr)


def is_plain_shuffle(sampler: Any) -> bool:
    """True for what `shuffle=True` of a DataLoader makes: each sample once, by no own generator."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler._num_samples is None
        and sampler.generator is None
    )


def scored_samples(arguments: DataArguments, seed: int) -> Any:
    """The data set of a DataLoader that is scored, of those samples that its sampler gives.

    Raises UsageError for a batch sampler of the user's own.
    """
    if arguments.batch_sampler is not None:
        raise UsageError(
            "run.test_loader got a DataLoader with a batch_sampler of its own",
            "pass the data set: run.test_loader(dataset, batch_size=256)",
        )
    assert arguments.batch_size, "check has seen to it"
    numbers: list[int] | range = range(len(arguments.dataset))
    if arguments.sampler is not None and not isinstance(arguments.sampler, RandomSampler):
        with keyed_generators() as seed_generators:
            seed_generators(hash_key(seed, "test sampler"))
            numbers = [int(number) for number in arguments.sampler]
    if arguments.drop_last:
        numbers = numbers[: len(numbers) // arguments.batch_size * arguments.batch_size]
    if isinstance(numbers, range) and len(numbers) == len(arguments.dataset):
        return arguments.dataset
    return Subset(arguments.dataset, numbers)  # type: ignore[arg-type]
