"""Batches of a stream of samples in a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.global_batches import Pass, part_of_rank
from ddp_train.data.reading_past import HOW_TO_GO_ON, ReadingPast
from ddp_train.data.rng import hash_key
from ddp_train.data.sample_stream import (
    StreamedBatch,
    StreamReader,
    begins_there_again,
    has_state,
    load_json,
    passes_differ_by_themselves,
    problem_of_state,
    state_as_json,
)
from ddp_train.data.streams.loader_processes import LoaderProcesses
from ddp_train.data.streams.placement import Placement
from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.process_group import from_all_ranks, same_everywhere
from ddp_train.engine.step_observers import ReportedBatches
from ddp_train.errors import DataError, LaunchError
from ddp_train.sessions.data_arguments import DataArguments, known_length
from ddp_train.sessions.exchange_watch import STREAMED_BATCH
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.steps import Steps
from ddp_train.tensor_tree import tensors
from ddp_train.text import see_page

SAME_STREAM = (
    "let the stream give the same samples on all processes: seed its shuffling, and do not use"
    " the rank. Or let each process read its own part, with run.loader(..., split_by_node=True)"
)


def collated(samples: list[Any]) -> Any:
    """The batch that torch makes of samples of a stream. Raises DataError if their shapes differ.

    Batches of which the last one is shorter are such samples.
    """
    try:
        return default_collate(samples)
    except RuntimeError as error:
        first, *others = [_shapes(sample) for sample in samples]
        for shapes in others:
            for one, other in zip(first, shapes, strict=False):
                if one != other:
                    raise DataError(
                        f"run.loader: two samples of a batch have the shapes {one} and {other}",
                        "if the shapes are meant to differ, pass a collate_fn that pads the"
                        " samples. If the stream makes batches, as .batched() does, let it give"
                        " single samples: global_batch_size makes the batches",
                    ) from error
        raise


def _shapes(sample: Any) -> list[list[int]]:
    return [list(tensor.shape[1:]) for tensor in tensors(default_collate([sample]))]


class StreamFeed:
    """The batches of an iterable data set.

    Either every process reads all of it, and keeps its rows of each global batch, which are those
    of one process; or the stream gives each process other samples, and a global batch is what all
    of them read for it.
    """

    def __init__(self, steps: Steps, arguments: DataArguments, split_by_node: bool) -> None:
        """Read nothing yet.

        split_by_node: the stream gives each process samples of its own.
        """
        world = steps.world
        size = arguments.batch_size
        assert size, "check has seen to it"
        self.stream = arguments.dataset
        self.name = type(self.stream).__name__
        self.world = world
        self.exchange_watch = steps.exchange_watch
        self.device = steps.device
        self.status = steps.status
        self.size = size
        self.drop_last = arguments.drop_last
        self.split_by_node = split_by_node
        self.num_workers = arguments.num_workers
        self.key = hash_key(steps.settings.seed, "loader", len(steps.loaders.current))
        self.facts: dict[str, Any] = {
            "stream": self.name,
            "global_batch_size": size,
            "drop_last": arguments.drop_last,
            "num_workers": arguments.num_workers,
            "seed": steps.settings.seed,
        }
        collate = arguments.collate_fn or collated
        self.place_of_rank = 0
        """The place of this process's part in a full batch, where each reads its own."""
        if split_by_node:
            self.facts["processes"] = world.size
            self.key = hash_key(self.key, "rank", world.rank)
            part = part_of_rank(size, world.rank, world.size)
            self.place_of_rank = part.start
            size_here = part.stop - part.start
            smallest = size // world.size
            self.reader = StreamReader(self.stream, collate, size_here, 0, 1, smallest)
        else:
            self.reader = StreamReader(self.stream, collate, size, world.rank, world.size, size)
        # Each loader process has an end of its own, and that of one is not that of the pass.
        self.reader.drop_last = self.drop_last
        self.streamed = StreamedParts(self, arguments)
        self.reported = ReportedBatches(self.streamed, steps.status)
        self.problem_of_state = "its loader processes have read ahead"
        if not self.num_workers:
            self.problem_of_state = problem_of_state(self.stream)
        """Why it is read past what is done; "" if it goes on by its own state."""
        self.saved_state = ""
        """The stream's own state where a resumed run goes on, as JSON."""
        self.state_at_start = ""
        """The stream's state at its beginning, as JSON, in the pass that goes on at a later one."""
        self.begins_there_again = False
        """The pass after the resumed one would begin there too, and not at the beginning."""
        self.begun = Pass(0)
        self.first = 0
        self.digest = 0
        """A digest of the first batch of the pass; 0 where that was not read."""
        self.digest_before = 0
        """The digest of the first batch of the pass inside of which the run was saved."""
        self.given = 0
        """Batches of the pass that were given, and those that were read past."""

    def __len__(self) -> int:
        samples = known_length(self.stream)
        if samples is None:
            raise TypeError(f"{self.name} has no length")
        if self.split_by_node:
            raise TypeError(
                f"run.loader has no length: the __len__ of {self.name} is the length of this"
                " process's part alone"
            )
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def begin(self, begun: Pass, first: int) -> None:
        """Begin a pass. The samples of the first batch are compared when they are read."""
        self.begun = begun
        self.first = self.given = first
        self.reader.key = hash_key(self.key, begun.key)
        self.reader.first = self.reader.skipped = 0
        self.reader.is_at_end = False
        self.digest = 0
        if self.state_at_start and self.begins_there_again:
            load_json(self.stream, self.state_at_start)
        self.state_at_start = ""
        if self.saved_state:
            self.begins_there_again = begins_there_again(self.stream, self.saved_state)
            self.state_at_start = state_as_json(self.stream)
            load_json(self.stream, self.saved_state)
            self.saved_state = ""
            self.reader.first = self.reader.skipped = first
        elif not self.num_workers:
            self.reader.skipped = first

    def first_part(self) -> StreamedBatch:
        """The first part of a stream that a resumed run has found at its end."""
        load_json(self.stream, self.state_at_start)
        self.reader.first = self.reader.skipped = 0
        part = next(iter(self.reader))
        load_json(self.stream, self.state_at_start)  # for the next pass
        return part

    def pass_facts(self) -> dict[str, Any]:
        return {}

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.reported)

    def is_last(self, number: int) -> bool:
        return False

    def state(self, in_pass: bool, batch: int) -> dict[str, Any]:
        """The stream's own state on each process, if it has one that can be written as JSON.

        Without one, and behind its last sample, the stream is read past in a resumed run.
        """
        text = ""
        is_at_batch = in_pass and self.given == batch and not self.reader.is_at_end
        if is_at_batch and not self.problem_of_state:
            text = state_as_json(self.stream)
        states = [text]
        if self.split_by_node:
            states = texts_from_all_ranks(text, self.device)
        return {"states": states if all(states) else [], "digest": self.digest}

    def restore(self, state: dict[str, Any], in_pass: bool) -> None:
        states = state["states"]
        if in_pass:
            self.digest_before = state["digest"]
        if not states or self.problem_of_state:
            return
        saved = states[self.world.rank if self.split_by_node else 0]
        if in_pass:
            self.saved_state = saved
        else:
            load_json(self.stream, saved)

    def micro_batch(
        self, number: int, part: StreamedBatch, size: int, all_have_samples: bool
    ) -> MicroBatch:
        """The share of this process in a batch of `size` samples over all of them."""
        # Where a sample stands in its pass: what keyed noise depends on.
        first = number * self.size + self.place_of_rank + part.start
        return MicroBatch(
            epoch=self.begun.key,
            step=number,
            indices=first + np.arange(max(part.count, 1)),
            num_real=part.count,
            scale=self.world.size / size if part.count else 0.0,
            is_last=True,
            shard_index=self.world.rank,
            all_have_samples=all_have_samples,
        )

    def check_first(self, part: StreamedBatch | None) -> None:
        """Compare the first batch of a pass between the processes. A collective.

        Raises PeerError for a stream that gives each process other samples, where all should read
        the same, and DataError for the opposite, and for a process without any sample.
        """
        digest = 0
        if part and not part.number:
            digest = self.digest = part.digest
        if not self.split_by_node and self.digest_before not in (0, digest) and digest:
            raise DataError(
                f"run.loader: since the run was resumed, {self.name} gives other samples than"
                " before",
                f"let {self.name} give the same samples again: seed its shuffling, or write"
                " state_dict and load_state_dict for it. To start over, use a new folder:"
                " ddp_train.session('runs/new')",
            )
        self.digest_before = 0
        if not self.split_by_node:
            what = f"run.loader: the first samples of {self.name}"
            same_everywhere(digest, self.device, what, SAME_STREAM)
            return
        digests = from_all_ranks(torch.tensor([digest, part is None], device=self.device)).tolist()
        without = [rank for rank, (_, is_missing) in enumerate(digests) if is_missing]
        if without and len(without) < len(digests) and not self.first:
            if self.drop_last:
                raise DataError(
                    f"run.loader: {self.name} has too few samples for a full batch on rank"
                    f" {without[0]}, and drop_last=True leaves out smaller ones",
                    f"use a smaller global_batch_size than {self.size}, or drop_last=False",
                )
            raise DataError(
                f"run.loader: {self.name} has no sample for rank {without[0]}",
                f"give {self.name} at least as many files (shards) as there are processes. Or"
                " leave out split_by_node: then every process reads all samples",
            )
        if len(digests) > 1 and digest and len({first for first, _ in digests}) == 1:
            raise DataError(
                f"run.loader: {self.name} gives all processes the same samples, but"
                " split_by_node=True needs a part for each",
                "split the stream, for example by split_dataset_by_node(data, run.rank,"
                " run.processes). Or leave out split_by_node: then every process reads all"
                " samples, and trains on its part",
            )


class StreamedParts:
    """The batches of the pass that a feed has begun, read here or by loader processes."""

    in_flight: tuple[MicroBatch, ...] = ()

    def __init__(self, feed: StreamFeed, arguments: DataArguments) -> None:
        on_gpu = feed.device.startswith("cuda")
        self.feed = feed
        self.stream = self  # what ReportedBatches iterates
        self.placement = Placement(torch.device(feed.device), non_blocking=on_gpu)
        self.pin_memory = on_gpu
        self.processes = LoaderProcesses(arguments.num_workers, arguments.worker_init_fn)
        self.prefetch_factor = arguments.prefetch_factor

    def __iter__(self) -> Iterator[Batch]:
        """This process's parts. Ends on all processes alike.

        Raises PeerError and DataError, see StreamFeed.check_first.
        """
        feed = self.feed
        parts = self._parts()
        part = next(parts, None)
        feed.check_first(part)
        first_part = part
        if part is None and feed.state_at_start:
            first_part = feed.first_part()
        empty = first_part.empty if first_part else None
        number = feed.first
        if part and part.number < number:
            part = next(parts, None)
        while True:
            size, all_have_samples = self._size_of_all(part)
            if not size or (feed.drop_last and size < feed.size):
                return
            if part is None:
                part = StreamedBatch(number, empty, 0, 0)
            share = feed.micro_batch(number, part, size, all_have_samples)
            number += 1
            feed.given = number
            batch = Batch(part.data, share)
            yield batch.pin_memory() if self.pin_memory else batch
            part = next(parts, None)

    def _size_of_all(self, part: StreamedBatch | None) -> tuple[int, bool]:
        """Samples of a batch over all processes, 0 behind the last one; whether each has one."""
        size = part.size if part else 0
        if not self.feed.split_by_node:
            return size, size >= self.feed.world.size
        self.feed.exchange_watch.enter(STREAMED_BATCH)
        sizes = from_all_ranks(torch.tensor(size, device=self.feed.device))
        return int(sizes.sum()), bool(sizes.min() > 0)

    def _parts(self) -> Iterator[StreamedBatch]:
        """The parts of this process without those that are read past, but for the first one."""
        feed = self.feed
        advice = HOW_TO_GO_ON
        if feed.num_workers:
            advice += ", if num_workers=0"
        samples = (feed.first - feed.reader.first) * feed.reader.size
        passed = ReadingPast(feed.status, feed.name, samples, advice)
        for part in self._read():
            if 0 < part.number < feed.first:
                passed.add(part.size)
            else:
                yield part

    def _read(self) -> Iterator[StreamedBatch]:
        feed = self.feed
        if not feed.num_workers:
            yield from feed.reader
            return
        loader: DataLoader[Any] = DataLoader(
            _SentParts(feed.reader),
            batch_size=None,
            num_workers=feed.num_workers,
            prefetch_factor=self.prefetch_factor,
            generator=torch.Generator(),  # see WorkerStream
            worker_init_fn=self.processes.enter,
        )
        digests: list[int] = []
        for number, part in enumerate(self.processes.iterate(loader)):
            if isinstance(part, LaunchError):
                raise part
            if number < feed.num_workers:
                if part.digest and part.digest in digests:
                    raise DataError(
                        f"run.loader: {feed.name} gives the same samples to several loader"
                        " processes, so each sample would be used several times",
                        "divide the samples in __iter__ by torch.utils.data.get_worker_info(),"
                        " or use num_workers=1",
                    )
                digests.append(part.digest)
            part.number = number
            yield part

    def place(self, batch: Batch) -> Batch:
        return self.placement(batch)

    def close(self) -> None:
        """Loader processes end with their pass."""


class _SentParts(IterableDataset[Any]):
    """The parts that a loader process reads."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[StreamedBatch | LaunchError]:
        try:
            yield from self.reader
        except LaunchError as error:
            # As a value: the DataLoader would wrap it into text and drop its remedy.
            yield error


def stream_feed(steps: Steps, arguments: DataArguments, split_by_node: bool) -> StreamFeed:
    """The batches of a stream.

    Raises UsageError for arguments that a stream has not, and for a stream that ends for ever.
    """
    method = "run.loader"
    name = type(arguments.dataset).__name__
    if isinstance(arguments.dataset, Iterator):
        raise UsageError(
            f"{method}: {name} is an iterator, which is empty after one epoch",
            "pass an object whose __iter__ starts again each time it is called",
        )
    if split_by_node and arguments.batch_size and arguments.batch_size < steps.world.size:
        raise UsageError(
            f"{method}: global_batch_size={arguments.batch_size} gives some of the"
            f" {steps.world.size} processes no sample",
            f"use global_batch_size={steps.world.size} or more",
        )
    if arguments.shuffle or arguments.sampler is not None or arguments.batch_sampler is not None:
        raise UsageError(
            f"{method}: {name} is a stream, but shuffle, sampler and batch_sampler need a data set"
            " that is read by index (__getitem__)",
            "leave these arguments out, and shuffle in the stream itself, for example within a"
            " buffer",
        )
    arguments.check(method)
    feed = StreamFeed(steps, arguments, split_by_node)
    if has_state(feed.stream) and feed.problem_of_state and steps.world.is_leader:
        print(
            f"note: {method}: a resumed run will read {name} from its beginning, and skip the"
            f" samples that are done ({feed.problem_of_state})",
            file=sys.stderr,
        )
    if steps.world.is_leader and passes_differ_by_themselves(feed.stream):
        print(
            f"note: {method}: {name} gives other samples each time it is iterated. But a new"
            " process starts again like in the first epoch: in a resumed run, and with"
            " num_workers in each epoch. Let the samples depend on set_epoch(epoch)",
            file=sys.stderr,
        )
    if steps.world.size > 1 and steps.world.is_leader and not split_by_node:
        print(
            f"note: {method}: each of {steps.world.size} processes reads all samples of {name},"
            " and trains on its part. With split_by_node=True each process reads its own part"
            f" only{see_page('Your own loop')}",
            file=sys.stderr,
        )
    return feed
