"""A stream of samples, an iterable data set, as batches: each process reads it."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ddp_train.data.dataset_content import bytes_of, content_of_sample
from ddp_train.data.global_batches import part_of_rank
from ddp_train.data.no_samples import without_samples
from ddp_train.data.rng import hash_key, keyed_generators, number_of_digest
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.tensor_tree import tensors
from ddp_train.text import first_line

PARTS_WITHIN = 6
"""Levels at which a stream may hold another one."""
TRIED = 8
"""Samples that a stream reads to try its state."""
COMPARED = 8
"""The least number of samples that are compared when a pass is begun again."""
TRIAL_SECONDS = 0.3
"""The longest time for which a pass is read to be compared with the next one."""


@dataclass
class StreamedBatch:
    """The part of one process in a batch."""

    number: int
    """The place of the batch in the pass, or in the part of it that a loader process reads."""
    data: Any
    count: int
    """Samples in `data`."""
    size: int
    """Samples that this process has read for the batch."""
    start: int = 0
    """The place among these of the first sample in `data`."""
    digest: int = 0
    """The digest of the first samples, in the first batch that a process reads; else 0."""
    empty: Any = None
    """The batch without samples, in that batch and where `count` is 0; else None."""


@dataclass
class StreamReader(IterableDataset[StreamedBatch]):
    """The parts of one process in the batches of a stream, from its beginning.

    Before each batch the global generators of torch, numpy and Python are seeded: what the stream
    draws from them follows from `key` and the number of the batch, and nothing needs to be restored
    where it goes on.
    """

    stream: Any
    collate: Callable[[list[Any]], Any]
    size: int
    """Samples that are read for a batch."""
    rank: int
    world_size: int
    """Parts of each batch; 1: this process has all that it reads."""
    compared: int
    """Samples of the first batch that have a digest."""
    drop_last: bool = False
    """Samples at the end that are no full batch are left out."""
    key: int = 0
    """The key of the random draws of the pass."""
    skipped: int = 0
    """Batches that are read past: they come without samples. Only the first one is made, to be
    compared."""
    first: int = 0
    """The number of the first batch that is read."""
    is_at_end: bool = False
    """True once the stream has ended. Its own state then may be that of its beginning."""

    def __iter__(self) -> Iterator[StreamedBatch]:
        worker = get_worker_info()
        key = hash_key(self.key, "stream", worker.id if worker else 0)
        samples_of_stream: Iterator[Any] | None = None
        number = self.first
        is_first = True
        while True:
            with keyed_generators() as seed_generators:
                seed_generators(hash_key(key, number))
                if samples_of_stream is None:
                    samples_of_stream = iter(self.stream)
                samples = list(islice(samples_of_stream, self.size))
                self.is_at_end = len(samples) < self.size
                if not samples or (self.drop_last and self.is_at_end):
                    return
                batch = StreamedBatch(number, None, 0, len(samples))
                if number >= self.skipped or not number:
                    batch = self._part(number, samples, is_first)
                    is_first = False
            yield batch
            number += 1

    def _part(self, number: int, samples: list[Any], is_first: bool) -> StreamedBatch:
        places = part_of_rank(len(samples), self.rank, self.world_size)
        part = samples[places]
        # Before the other batches are made: what it draws must not depend on whether they are.
        data = self.collate(part) if part else None
        empty = None
        if is_first or not part:
            one = self.collate(samples[:1])
            empty = without_samples(one, self.collate([samples[0], samples[0]]))
        if not part:
            data = empty
        digest = digest_of(self.collate(samples[: self.compared])) if is_first else 0
        return StreamedBatch(number, data, len(part), len(samples), places.start, digest, empty)


def has_state(stream: Any) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def problem_of_state(stream: Any) -> str:
    """Why a stream does not go on to the same samples by its own state; "" if it does.

    Many do but for the samples of a buffer within which they shuffle. It is tried with copies of
    the stream, which read some samples.
    """
    if not has_state(stream):
        return "no state_dict and load_state_dict"
    if _leaves_out_a_buffer(stream):
        return "its state_dict leaves out the samples in the buffer of its shuffle"
    try:
        original, restored = copy.deepcopy(stream), copy.deepcopy(stream)
        with keyed_generators() as seed_generators:
            seed_generators(0)
            samples = iter(original)
            next(samples)
            state = state_as_json(original)
            seed_generators(1)
            expected = [content_of_sample(sample) for sample in islice(samples, TRIED)]
            if not state:
                return "its state_dict has more than texts, numbers, lists and dicts"
            load_json(restored, state)
            seed_generators(1)
            found = [content_of_sample(sample) for sample in islice(iter(restored), TRIED)]
    except Exception as error:  # noqa: BLE001  code of the user's, which may not be made for copies
        cause = first_line(error) or type(error).__name__
        return f"a trial of its state_dict failed: {cause}"
    if expected != found:
        return "after load_state_dict it gave other samples"
    return ""


def begins_there_again(stream: Any, state: str) -> bool:
    """True if not one pass alone, but each, begins where `load_state_dict` puts a stream.

    It is tried with a copy. state: see `state_as_json`.
    """
    clone = copy.deepcopy(stream)
    load_json(clone, state)
    passes = []
    with keyed_generators() as seed_generators:
        for _ in range(2):
            seed_generators(0)
            passes.append([content_of_sample(sample) for sample in islice(iter(clone), TRIED)])
    first, second = passes
    return first == second


def passes_differ_by_themselves(stream: Any) -> bool:
    """True if a copy of a stream gives other samples in each pass, by what it keeps between them.

    A pass that ends within TRIAL_SECONDS is compared with the next one, another with its own
    beginning. False for a stream that cannot be copied.
    """
    try:
        tried = copy.deepcopy(stream)
        state = state_as_json(tried) if has_state(tried) else ""
        first, has_ended = digests_of_pass(lambda: _begun(tried), 0, sys.maxsize, TRIAL_SECONDS)
        if not has_ended and has_state(tried):
            if not state:
                return False
            load_json(tried, state)
        again, _ = digests_of_pass(lambda: _begun(tried), 0, len(first), TRIAL_SECONDS)
    except Exception:  # noqa: BLE001  code of the user's, which may not be made for copies
        return False
    return any(one != other for one, other in zip(first, again, strict=False))


def _begun(stream: Any) -> Iterator[Any]:
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(0)
    return iter(stream)


def digests_of_pass(
    begin: Callable[[], Iterator[Any]], key: int, most: int, seconds: float
) -> tuple[list[int], bool]:
    """The digests of the first samples of a pass, and whether it has ended.

    They are of COMPARED samples, or of as many more as come within some seconds.

    begin: begins the pass.
    key: of its draws from the global generators.
    most: samples that are read at most.
    """
    digests: list[int] = []
    end = time.monotonic() + seconds
    with keyed_generators() as seed_generators:
        seed_generators(hash_key(key, "stream", 0, 0))
        samples = begin()
        while len(digests) < most and (len(digests) < COMPARED or time.monotonic() < end):
            seed_generators(hash_key(key, "stream", 0, len(digests)))
            try:
                sample = next(samples)
            except StopIteration:
                return digests, True
            digests.append(digest_of(as_tensors(sample)))
    return digests, False


def state_as_json(stream: Any) -> str:
    """The state of a stream; "" if it would come back as another one.

    JSON has no tensors and tuples, and its keys are texts: the stream is read past then.
    """
    try:
        state = stream.state_dict()
        text = json.dumps(state)
    except TypeError:
        return ""
    return text if json.loads(text) == state else ""


def load_json(stream: Any, state: str) -> None:
    """Let a stream go on from a state that `state_as_json` returned."""
    stream.load_state_dict(json.loads(state))


def _leaves_out_a_buffer(part: Any, levels: int = PARTS_WITHIN) -> bool:
    """True for a shuffled stream of Hugging Face's, or one made of such.

    Its state is right within the first file, so that no trial would tell.
    """
    if "BufferShuffled" in type(part).__name__:
        return True
    within = getattr(part, "__dict__", {})
    if not levels or isinstance(part, type):
        return False
    return any(_leaves_out_a_buffer(value, levels - 1) for value in within.values())


def digest_of(batch: Any) -> int:
    """A number below 2**61 that identifies the tensors of a batch; 0 if it has none."""
    content = hashlib.sha256()
    has_tensors = False
    for tensor in tensors(batch):
        has_tensors = True
        content.update(bytes_of(tensor))
    if not has_tensors:
        return 0
    return number_of_digest(content.digest())


def is_stream(dataset: Any) -> bool:
    """True for an iterable data set: its samples have no numbers."""
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and (is_iterable_of_torch(dataset) or not is_map_style)


def is_iterable_of_torch(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset)  # which inherits a __getitem__
