"""A stream of samples, an iterable data set, whose samples are numbered by their places in a pass.

With numbers it is read by the plan of a run, as any other data set is: the same global batches on
any number of processes, evaluations that count each sample once, a resume at any step. Each process
reads the whole stream in its order, and keeps its samples.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data._utils import worker

from ddp_train.data.reading_past import HOW_TO_GO_ON, ReadingPast
from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.data.sample_stream import (
    COMPARED,
    TRIAL_SECONDS,
    digests_of_pass,
    load_json,
    problem_of_state,
    state_as_json,
)
from ddp_train.data.stream_place import StreamPlace
from ddp_train.errors import DataError
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.text import counted

COUNT_SECONDS = 120.0
"""The longest time for which a stream is counted that tells no length."""
LIMIT = "use data.limit=1000, which holds for each set, or give the stream a __len__"
BY_STEPS = "; for training without epochs use train.epochs=null train.max_steps=1000"
_NOTHING = object()


class NumberedStream:
    """A stream as a map-style data set.

    Reading a later number reads past those before it; reading an earlier one begins the pass anew,
    or goes on from the last known place before it, if the stream has a state of its own.
    """

    def __init__(
        self,
        stream: Any,
        seed: int,
        limit: int | None = None,
        needed: int | None = None,
        *,
        trains: bool = True,
        status: RankStatus | None = None,
    ) -> None:
        """Count the samples of a pass, unless the stream tells them.

        seed: of what it draws from torch's, numpy's and Python's global generators.
        limit: samples of a pass that are read at most.
        needed: samples of the whole run; with it a stream that tells no length is read on and on,
            one pass after the other. None: the run counts passes.
        trains: else it is scored, or only looked at.
        status: of this process, to which samples that are read past are reported.

        Raises DataError for an iterator, for a stream without a sample or an end, and for one that
        gives other samples when it is begun again.
        """
        self.stream = stream
        self.name = type(stream).__name__
        self.seed = seed
        self.trains = trains
        self.status = status or RankStatus()
        if isinstance(stream, Iterator):
            raise DataError(
                f"data._target_: {self.name} is an iterator, which is empty after one epoch",
                "return an object whose __iter__ starts again each time it is called",
            )
        self.epoch = 0
        self.problem_of_state = problem_of_state(stream)
        """Why it does not go on by a state of its own; "" if it does."""
        self.state_at_start = ""
        """The stream's state before its first pass, as JSON; "" if it does not go on by one."""
        if not self.problem_of_state:
            self.state_at_start = state_as_json(stream)
        self.known_places: Sequence[StreamPlace] = ()
        """Places at which a pass may be begun too: those of a checkpoint."""
        self.begin()
        self.told = told_length(stream)
        self.is_repeated = self.told is None and limit is None and needed is not None
        self.is_whole = self.told is not None and (limit is None or limit >= self.told)
        """Its last number is the last sample of a pass."""
        self.limit = limit
        self.first_digests: list[int] = []
        """Digests of the first samples, with which the pass after the first end is compared; empty
        after that."""
        if needed is not None and self.is_repeated:
            self.length = needed
        elif self.told is None:
            self.first_digests, _ = self._digests(self.state_at_start, COMPARED)
            self.length = self._count(limit)
        else:
            self.length = self.told if limit is None else min(self.told, limit)

    def __len__(self) -> int:
        return self.length

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the stream: `classes`, `collate_fn`."""
        if name.startswith("_") or name in ("stream", "get_batch", "to"):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: iterators cannot be copied."""
        return self.__dict__ | {"samples": None, "place": -1, "passes": 0, "last": _NOTHING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.begin()

    def set_epoch(self, epoch: int) -> None:
        """Let the next read begin the pass of an epoch."""
        self.epoch = epoch
        self.begin()

    def begin(self) -> None:
        """Let the next read begin the pass anew."""
        self.samples: Iterator[Any] | None = None
        self.place = -1
        """The number of the sample that was read last."""
        self.passes = 0
        """Passes that have ended before, where one follows the other."""
        self.state_to_begin = self.state_at_start
        """The stream's state with which the next read begins, as JSON; "" for none."""
        self.last: Any = _NOTHING
        """A copy of the sample that was read last: code of the user's may change what it gets."""

    @property
    def stream_place(self) -> StreamPlace | None:
        """The place behind the sample that was read last; None if the stream has no state."""
        if not self.state_at_start or self.samples is None:
            return None
        state = state_as_json(self.stream)
        if not state:
            return None
        return StreamPlace(self.epoch, self.passes, self.place, state)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context around reads after which the next one begins the pass of the same epoch."""
        epoch = self.epoch
        try:
            yield
        finally:
            self.set_epoch(epoch)

    def __getitem__(self, number: int) -> Any:
        """The sample of a place. Raises DataError if the pass ends before it, or goes on behind the
        length that the stream tells."""
        if number == self.place and self.last is not _NOTHING:
            return copy.deepcopy(self.last)
        if number <= self.place:
            self.begin()
        begins = self.samples is None
        if begins:
            self._begin_before(number)
        passed = ReadingPast(
            self.status,
            self.name,
            number - self.place - 1,
            "" if self.state_at_start else HOW_TO_GO_ON,
            is_told=begins,
        )
        sample = _NOTHING
        while self.place < number:
            sample = self._next()
            if sample is _NOTHING:
                raise DataError(
                    f"data._target_: {self.name} gave {counted(self.place + 1, 'sample')} in"
                    f" epoch {self.epoch + 1}, but {self.length:,} were expected, by its __len__"
                    " or an earlier epoch",
                    "give the same number of samples in each epoch, or use data.limit=NUMBER with"
                    " that of the shortest epoch. To train without epochs, use train.epochs=null"
                    " train.max_steps=NUMBER",
                )
            self.place += 1
            if self.place < number:
                passed.add()
        self.last = _NOTHING
        with contextlib.suppress(Exception):  # an object of any type may be no one's to copy
            self.last = copy.deepcopy(sample)
        if self.is_whole and number == self.length - 1:
            self._check_end()
        return sample

    def check_same_when_begun_again(self) -> None:
        """Raise DataError if the first samples are others when the pass is begun again.

        A pass that ends within TRIAL_SECONDS is compared whole with the one that follows it. Of
        others the end is seen later, by the process that comes to it.
        """
        most = self.length + (self.limit is None)  # with its end
        first, has_ended = self._digests(self.state_at_start, most, TRIAL_SECONDS)
        self.first_digests = first[:COMPARED]
        if has_ended:
            self._compare_next_pass(first, TRIAL_SECONDS)
        else:
            again, _ = self._digests(self.state_at_start, COMPARED)
            self._compare(first, again)
        self.begin()

    def _compare_next_pass(self, first: list[int], seconds: float = 0.0) -> None:
        """Compare the pass that follows one that has ended, without the state of the start."""
        again, _ = self._digests("", len(first), seconds)
        self._compare(first, again)
        self.first_digests = []

    def _compare(self, first: list[int], again: list[int]) -> None:
        for number, (one, other) in enumerate(zip(first, again, strict=False), 1):
            if one != other:
                raise DataError(
                    f"data._target_: {self.name} gives other samples each time it is iterated"
                    f" (first seen at sample {number:,}), so a resumed run would train on other"
                    " samples",
                    "let the samples depend on the arguments of the class and on"
                    " set_epoch(epoch) alone. Draw random numbers from torch's, numpy's or"
                    " Python's global generators, which the run seeds, or from a generator that"
                    " __iter__ creates with a fixed seed",
                )

    def _digests(self, state: str, most: int, seconds: float = 0.0) -> tuple[list[int], bool]:
        """See `digests_of_pass`, for the pass of epoch 0 from a state on."""
        place = self.epoch, self.passes
        self.epoch = self.passes = 0
        try:
            with as_in_no_loader_process():
                return digests_of_pass(lambda: self._begun(state), self.seed, most, seconds)
        finally:
            self.epoch, self.passes = place

    def _begin_before(self, number: int) -> None:
        """Let the next read go on from the last known place before a number of this epoch."""
        places = [
            known
            for known in self.known_places
            if known.epoch == self.epoch and known.number < number
        ]
        if not places:
            return
        last = max(places, key=lambda known: known.number)
        self.place = last.number
        self.passes = last.passes
        self.state_to_begin = last.state

    def _next(self) -> Any:
        """The next sample; _NOTHING behind the last one.

        Its draws follow from seed, epoch and place: who reads past a sample draws the same.
        """
        with keyed_generators() as seed_generators, as_in_no_loader_process():
            seed_generators(hash_key(self.seed, "stream", self.epoch, self.place + 1))
            if self.samples is None:
                self.samples = self._begun(self.state_to_begin)
            sample = next(self.samples, _NOTHING)
            if sample is _NOTHING and self.is_repeated and self.place >= 0:
                self._see_end()
                self.passes += 1
                self.samples = self._begun(self.state_at_start)
                sample = next(self.samples, _NOTHING)
            return sample

    def _begun(self, state: str) -> Iterator[Any]:
        """The samples of a pass from a state of the stream on; "": it has none, and begins."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self.epoch + self.passes)
        if state:
            load_json(self.stream, state)
        return iter(self.stream)

    def _check_end(self) -> None:
        """Raise DataError if the pass goes on behind its last number."""
        if self.samples is None:
            return
        with keyed_generators() as seed_generators, as_in_no_loader_process():
            seed_generators(hash_key(self.seed, "stream", self.epoch, self.length))
            more = next(self.samples, _NOTHING)
        self.samples = iter(())
        if more is not _NOTHING:
            raise DataError(
                f"data._target_: {self.name} gives more samples than its __len__, {self.length:,}",
                f"correct its __len__, or use data.limit={self.length}",
            )
        self._see_end()

    def _see_end(self) -> None:
        """Compare the pass that follows the first one that has ended."""
        if self.first_digests:
            self._compare_next_pass(self.first_digests)

    def _count(self, limit: int | None) -> int:
        """The samples of the first pass, up to a limit."""
        end = time.monotonic() + COUNT_SECONDS
        count = 0
        while (limit is None or count < limit) and self._next() is not _NOTHING:
            self.place = count
            count += 1
            self.status.samples_passed += 1
            if time.monotonic() > end:
                raise DataError(
                    f"data._target_: {self.name} has no __len__, and did not end after"
                    f" {counted(count, 'sample')} in {COUNT_SECONDS:g} s",
                    LIMIT + BY_STEPS if self.trains else LIMIT,
                )
        if limit is None or count < limit:
            self._compare_next_pass(self.first_digests)
        self.begin()
        return count


@contextlib.contextmanager
def as_in_no_loader_process() -> Iterator[None]:
    """A context in which torch tells of no loader process.

    A stream may give each loader process a part, or another order: shuffled streams of Hugging
    Face's do, even if there is one process. Here each process reads all, wherever it does so.
    """
    told = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = told


def told_length(stream: Any) -> int | None:
    """The length that a stream tells; None if it tells none."""
    if not hasattr(stream, "__len__"):
        return None
    try:
        return len(stream)
    except (TypeError, NotImplementedError):
        return None
