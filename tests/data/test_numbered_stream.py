"""A stream with numbers: what it gives, how often it is read, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.errors import DataError
from ddp_train.resilience.heartbeat import RankStatus


class Shuffled(IterableDataset):
    """Twenty numbers, shuffled within a buffer of five."""

    def __init__(self, samples: int = 20) -> None:
        self.samples = samples
        self.epoch = 0
        self.begun = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += 1
        buffer: list[int] = []
        for number in range(self.samples):
            buffer.append(100 * self.epoch + number)
            if len(buffer) == 5:
                yield torch.tensor(buffer.pop(random.randrange(5)))
        for number in buffer:
            yield torch.tensor(number)


class Telling(Shuffled):
    """Tells another length than it has."""

    def __init__(self, told: int) -> None:
        super().__init__()
        self.told = told

    def __len__(self) -> int:
        return self.told


class OfItsOwn(IterableDataset):
    """Goes on where it was left."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.number += 1
        yield torch.tensor(self.number)


class Positioned(Shuffled):
    """Goes on where it was left, and by its state; its order is that of the epoch."""

    place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += 1
        numbers = random.Random(self.epoch).sample(range(self.samples), self.samples)
        while self.place < self.samples:
            number = numbers[self.place]
            self.place += 1
            yield torch.tensor(100 * self.epoch + number)
        self.place = 0


class OfItsPass(IterableDataset):
    """Its order, from a sample on, is that of a pass which it counts itself at the end of each."""

    def __init__(self, from_sample: int = 0) -> None:
        self.from_sample = from_sample
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = list(range(self.from_sample, 40))
        random.Random(self.passes).shuffle(numbers)
        for number in (*range(self.from_sample), *numbers):
            yield torch.tensor(number)
        self.passes += 1


class ToldOfItsPass(OfItsPass):
    def __len__(self) -> int:
        return 40


class OfItsPassInState(ToldOfItsPass):
    """The same, which goes on by its state within a pass."""

    place = 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]
        self.place = state["place"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for sample in itertools.islice(super().__iter__(), self.place, None):
            self.place += 1
            yield sample
        self.place = 0


def whole(stream: NumberedStream) -> list[int]:
    return [int(stream[number]) for number in range(len(stream))]


def test_who_reads_some_samples_reads_those_of_all() -> None:
    expected = whole(NumberedStream(Shuffled(), seed=3))
    assert sorted(expected) == list(range(20)) and expected != sorted(expected)
    for numbers in ([0, 7, 8, 19], [5], [9, 9, 2]):
        random.seed(8)
        stream = NumberedStream(Shuffled(), seed=3)
        random.seed(len(numbers))
        assert [int(stream[number]) for number in numbers] == [expected[n] for n in numbers]


def test_a_pass_in_order_is_read_once() -> None:
    shuffled = Shuffled()
    stream = NumberedStream(shuffled, seed=3)
    shuffled.begun = 0
    whole(stream)
    assert shuffled.begun == 1


class ByProcess(IterableDataset):
    """Gives each loader process another order, and a part, as public streams do."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        if info is None:
            yield from torch.arange(9)
        else:
            yield from torch.arange(9).flip(0)[info.id :: info.num_workers]


def test_a_loader_process_reads_what_others_read() -> None:
    stream = NumberedStream(ByProcess(), seed=0)
    assert len(stream) == 9
    for workers in (1, 2):
        loader = DataLoader(stream, batch_size=None, num_workers=workers)  # type: ignore[arg-type]
        assert torch.stack([*loader]).tolist() == [*range(9)]


def test_epochs_differ_and_come_again() -> None:
    stream = NumberedStream(Shuffled(), seed=3)
    stream.set_epoch(2)
    second = whole(stream)
    assert sorted(second) == list(range(200, 220))
    with stream.unchanged():
        stream.set_epoch(0)
        assert int(stream[3]) < 100
    assert whole(stream) == second == whole(copy.deepcopy(stream))


def test_draws_of_others_do_not_move() -> None:
    random.seed(4)
    expected = random.random()
    random.seed(4)
    whole(NumberedStream(Shuffled(), seed=3))
    assert random.random() == expected


def test_a_run_by_steps_reads_on_and_on() -> None:
    stream = NumberedStream(Shuffled(), seed=3, needed=50)
    read = whole(stream)
    assert sorted(read[:20]) == list(range(20))
    assert sorted(read[20:40]) == list(range(100, 120))
    assert read[40] >= 200 and int(stream[33]) == read[33]


@pytest.mark.parametrize("needed", [None, 50], ids=["epochs", "steps"])
def test_a_stream_with_a_state_goes_on_from_a_known_place(needed: int | None) -> None:
    stream = NumberedStream(Positioned(), seed=3, needed=needed)
    stream.check_same_when_begun_again()
    stream.set_epoch(1)
    expected = whole(stream)
    stream.begin()
    stream[33 if needed else 13]
    place = stream.stream_place
    assert place and (place.epoch, place.passes) == (1, 1 if needed else 0)
    assert place.state == '{"place": 14}'

    resumed = NumberedStream(Positioned(), seed=3, needed=needed)
    resumed.known_places = [replace(place, epoch=0, state=""), place]
    resumed.set_epoch(1)
    numbers = range(place.number + 3, len(resumed))
    resumed.stream.begun = 0
    assert [int(resumed[number]) for number in numbers] == expected[place.number + 3 :]
    assert resumed.stream.begun == (2 if needed else 1), "what was done is not read again"
    assert whole(resumed) == expected, "an earlier number begins the pass anew"


def test_a_stream_whose_state_leaves_something_out_has_no_place() -> None:
    class ByBuffer(Positioned):
        __iter__ = Shuffled.__iter__

    stream = NumberedStream(ByBuffer(), seed=3)
    assert int(stream[7]) >= 0 and stream.stream_place is None
    assert NumberedStream(Shuffled(), seed=3).stream_place is None


def test_a_long_way_to_the_first_sample_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ddp_train.data.reading_past.SLOW_SECONDS", -1.0)
    NumberedStream(Shuffled(), seed=3)[9]
    (record,) = caplog.records
    assert "reads 9 samples of the stream Shuffled again and skips them: 1 so far" in record.message
    assert "with state_dict() and load_state_dict()" in record.message


def test_samples_that_are_counted_or_read_past_are_reported() -> None:
    status = RankStatus()
    stream = NumberedStream(Shuffled(), seed=3, status=status)
    assert status.samples_passed == 20
    assert [int(stream[number]) for number in (0, 1, 9)] and status.samples_passed == 27
    copied = pickle.loads(pickle.dumps(stream))
    assert int(copied[9]) == int(stream[9]) and status.samples_passed == 27


@pytest.mark.parametrize(("limit", "length"), [(7, 7), (90, 20), (None, 20)])
def test_a_limit_cuts_a_pass(limit: int | None, length: int) -> None:
    assert len(NumberedStream(Shuffled(), seed=3, limit=limit)) == length


def test_a_sample_that_is_changed_comes_again_unchanged() -> None:
    stream = NumberedStream(Shuffled(), seed=3)
    first = stream[0].clone()
    stream[0].add_(1000)
    assert stream[0] == first


def test_lengths_that_are_not_true_are_refused() -> None:
    with pytest.raises(DataError, match="gave 20 samples in epoch 1, but 25 were expected"):
        whole(NumberedStream(Telling(25), seed=3))
    with pytest.raises(DataError, match="gives more samples than its __len__, 18"):
        whole(NumberedStream(Telling(18), seed=3))


def test_streams_that_cannot_be_read_again_are_refused() -> None:
    iterator: Any = iter([1, 2])
    with pytest.raises(DataError, match="list_iterator is an iterator, which is empty"):
        NumberedStream(iterator, seed=3)
    with pytest.raises(DataError, match="OfItsOwn gives other samples each time"):
        NumberedStream(OfItsOwn(), seed=3).check_same_when_begun_again()


@pytest.mark.parametrize("needed", [None, 200], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    "kind",
    [
        OfItsPass,
        ToldOfItsPass,
        OfItsPassInState,
        partial(OfItsPass, 20),
        partial(ToldOfItsPass, 20),
    ],
)
def test_passes_that_differ_by_what_a_stream_keeps_are_refused(
    kind: Any, needed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_train.data.numbered_stream.TRIAL_SECONDS", 60.0)
    with pytest.raises(DataError, match="gives other samples each time it is iterated"):
        NumberedStream(kind(), seed=3, needed=needed).check_same_when_begun_again()


@pytest.mark.parametrize(
    ("kind", "needed"), [(OfItsPass, None), (ToldOfItsPass, None), (OfItsPassInState, 90)]
)
def test_long_passes_that_differ_are_refused_at_the_first_end(
    kind: Any, needed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_train.data.numbered_stream.TRIAL_SECONDS", 0.0)
    with pytest.raises(DataError, match="first seen at sample 1"):
        stream = NumberedStream(kind(), seed=3, needed=needed)
        stream.check_same_when_begun_again()
        assert kind is not OfItsPass, "its samples were counted"
        whole(stream)


def test_a_stream_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_train.data.numbered_stream.COUNT_SECONDS", 0.0)
    for trains in (True, False):
        with pytest.raises(DataError, match="has no __len__, and did not end after 1") as caught:
            NumberedStream(Shuffled(), seed=3, trains=trains)
        assert "data.limit=1000" in caught.value.remedy
        assert ("train.max_steps=1000" in caught.value.remedy) == trains
