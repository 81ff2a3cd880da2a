"""Streams of samples in a session, against plain loops in one process."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.sessions.run import Run
from examples import streaming_text
from tests.sessions.seen_batches import (
    EPOCHS,
    SAMPLES,
    losses_of,
    net,
    plain_loop,
    session_loop,
    sgd,
    weights_of,
)
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on
from tests.support.streams import Positioned, Stream

BATCH = 4
RANKS = [3, *(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 4))]
Sample = tuple[Tensor, int]


ROWS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SHARED = [(row, number) for number, row in enumerate(ROWS)]
ALONE = World(0, 1, 0, 1)


class PositionedByPart(Positioned):
    """A stream whose position JSON would not give back: its key is a number."""

    def state_dict(self) -> dict[Any, int]:  # type: ignore[override]
        return {0: self.place}

    def load_state_dict(self, state: dict[Any, int]) -> None:
        self.place = state.get(0, 0)


def loader_of(stream: Any, **arguments: Any) -> Callable[[Run], Any]:
    return lambda run: run.loader(stream, global_batch_size=BATCH, **arguments)


def part_of(world: World) -> slice:
    """All samples but two go round; those two are of rank 0."""
    return slice(world.rank, None, world.size)


STREAMS: dict[str, tuple[Callable[[World], Any], dict[str, Any]]] = {
    "whole": (lambda world: Stream(SHARED), {}),
    "positioned": (lambda world: Positioned(SHARED), {"drop_last": True}),
    "loader processes": (lambda world: Stream(SHARED), {"num_workers": 2}),
    "split": (lambda world: Stream(SHARED, part_of(world)), {"split_by_node": True}),
    "split, positioned": (
        lambda world: Positioned(SHARED, part_of(world)),
        {"split_by_node": True},
    ),
}


def all_streams(world: World, folder: str, device: str = "cpu") -> dict[str, Any]:
    train = partial(session_loop, world, device=device)
    found = {}
    for kind, (stream_of, arguments) in STREAMS.items():
        calm = train(Path(folder, kind), loader_of(stream_of(world), **arguments))
        again = Path(folder, f"again {kind}")
        first, _ = train(again, loader_of(stream_of(world), **arguments), until=8)
        stream = stream_of(world)
        rest, weights = train(again, loader_of(stream, **arguments))
        assert torch.equal(weights, calm[1]), kind
        assert first + rest == calm[0], kind
        if "positioned" in kind and world.rank == 0:
            assert stream.read < len(calm[0]) * BATCH, "what was done is not read again"
        found[kind] = calm
    return found


@pytest.mark.slow
def test_state_that_json_would_change_is_read_past(tmp_path: Path) -> None:
    calm, _ = session_loop(ALONE, tmp_path / "calm", loader_of(PositionedByPart(SHARED)))
    first, _ = session_loop(ALONE, tmp_path / "again", loader_of(PositionedByPart(SHARED)), until=8)
    rest, _ = session_loop(ALONE, tmp_path / "again", loader_of(PositionedByPart(SHARED)))
    assert first + rest == calm


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_read_past_is_progress_and_told(
    num_workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ddp_train.data.reading_past.SLOW_SECONDS", -1.0)
    passed = []
    for until in (4, None):
        with contextlib.suppress(Interrupted), session_on(ALONE, str(tmp_path)) as run:
            loader = run.loader(Stream(SHARED), global_batch_size=BATCH, num_workers=num_workers)
            model = run.wrap(net())
            run.resume(model=model)
            for _ in run.epochs(1):
                for inputs, _ in loader:
                    run.mean(losses_of(model, inputs)).backward()
                    if run.step + 1 == until:
                        run.save()
                    if run.step == until:
                        raise Interrupted
            passed.append(run._steps.status.samples_passed)
    # Of 16 samples that are done the first four are compared with those of before.
    assert passed == [12]
    told = [record.message for record in caplog.records if "and skips them" in record.message]
    assert (
        len(told) == 1
        and "to resume, the run reads 16 samples of the stream Stream again" in told[0]
    )


class PlacedForGood(Stream):
    """A stream whose passes all begin where a state has put it."""

    start = place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]

    def __iter__(self) -> Iterator[Sample]:
        self.place = self.start
        for sample in itertools.islice(super().__iter__(), self.start, None):
            self.place += 1
            yield sample


@pytest.mark.slow
def test_the_pass_after_a_resumed_one_is_whole(tmp_path: Path) -> None:
    calm, _ = session_loop(ALONE, tmp_path / "calm", loader_of(PlacedForGood(SHARED)))
    first, _ = session_loop(ALONE, tmp_path / "again", loader_of(PlacedForGood(SHARED)), until=8)
    stream = PlacedForGood(SHARED)
    rest, _ = session_loop(ALONE, tmp_path / "again", loader_of(stream))
    assert first + rest == calm
    assert stream.read < len(calm) * BATCH, "what was done is not read again"


def expected_batches(kind: str, processes: int, epoch: int) -> Any:
    """The batches of an epoch, without this package."""
    if not kind.startswith("split"):
        stream = Stream(SHARED)
        stream.set_epoch(epoch)
        workers = STREAMS[kind][1].get("num_workers", 0)
        return DataLoader(stream, BATCH, num_workers=workers, drop_last=kind == "positioned")
    parts = []
    for rank in range(processes):
        stream = Stream(SHARED, slice(rank, None, processes))
        stream.set_epoch(epoch)
        size = BATCH // processes + (rank < BATCH % processes)
        parts.append(list(DataLoader(stream, size)))
    batches = itertools.zip_longest(*parts)
    return [
        [torch.cat(pieces) for pieces in zip(*filter(None, batch), strict=True)]
        for batch in batches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("processes", RANKS)
def test_streams_are_those_of_a_plain_loop(processes: int, tmp_path: Path) -> None:
    for found in on_ranks(processes, all_streams, str(tmp_path)):
        for kind, (seen, weights) in found.items():
            expected_seen, expected = plain_loop(
                lambda epoch, kind=kind: expected_batches(kind, processes, epoch)
            )
            assert seen == expected_seen, kind
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10, msg=kind)


def batches_until(folder: Path, part: slice, step: int | None) -> list[list[int]]:
    """The batches of two epochs of a stream. step: after which it is saved and interrupted."""
    seen: list[list[int]] = []
    with session_on(World(), str(folder)) as run:
        model = run.wrap(net())
        loader = run.loader(Positioned(SHARED, part), global_batch_size=BATCH)
        run.resume(model=model)
        steps = run._steps
        end_step = steps.end_step

        def end_and_leave(*arguments: Any) -> None:
            end_step(*arguments)
            if run.step == step:
                steps.saving.save()
                raise Interrupted

        steps.end_step = end_and_leave  # type: ignore[method-assign]
        for _ in run.epochs(2):
            for inputs, numbers in loader:
                seen.append(numbers.tolist())
                run.mean(losses_of(model, inputs)).backward()
    return seen


@pytest.mark.parametrize(
    ("part", "steps"), [(slice(None), (6, 12)), (slice(20), (5, 10))], ids=["short", "full"]
)
@pytest.mark.slow
def test_a_stream_saved_behind_its_last_batch_goes_on(
    part: slice, steps: tuple[int, ...], tmp_path: Path
) -> None:
    """A short one has ended, and its own state is that of its beginning; a full one has not, and
    a resumed run finds its end."""
    calm = batches_until(tmp_path / "calm", part, None)
    for step in steps:
        first = batches_until(tmp_path / f"again {step}", part, step)
        assert first + batches_until(tmp_path / f"again {step}", part, None) == calm


def pairs_until(folder: Path, sampler: Any, until: int | None) -> list[list[int]]:
    """The numbers that a stream and a longer loader give in each step, up to one that is saved."""
    seen = []
    with contextlib.suppress(Interrupted), session_on(World(), str(folder)) as run:
        model = run.wrap(net())
        streamed = run.loader(Positioned(SHARED, slice(0, 7)), global_batch_size=BATCH)
        numbered = run.loader(
            torch.arange(20), global_batch_size=BATCH, shuffle=sampler is None, sampler=sampler
        )
        run.resume(model=model)
        for epoch in run.epochs(3):
            for (inputs, numbers), further in zip(streamed, numbered, strict=False):
                seen.append([epoch, *numbers.tolist(), *further.tolist()])
                run.mean(losses_of(model, inputs), of=streamed).backward()
                if run.step + 1 == until:
                    run.save()
            if run.step == until:
                raise Interrupted
    return seen


@pytest.mark.parametrize("is_drawn", [False, True], ids=["shuffled", "sampler of its own"])
def test_a_loader_that_zip_left_begins_anew_after_a_resume(is_drawn: bool, tmp_path: Path) -> None:
    """Where the stream has no batches left, zip makes an iterator of the other and never asks it."""

    def sampler() -> Any:
        if not is_drawn:
            return None
        return RandomSampler(range(20), generator=torch.Generator().manual_seed(4))

    calm = pairs_until(tmp_path / "calm", sampler(), None)
    first = pairs_until(tmp_path / "again", sampler(), 4)
    assert len(calm) == 6 and len(first) == 4
    assert first + pairs_until(tmp_path / "again", sampler(), None) == calm


class Batched(Stream):
    """Batches of five samples, of which the last has three."""

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        for first in range(0, len(samples), 5):
            yield default_collate(samples[first : first + 5])


def joined(batches: list[Any]) -> Any:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def batched_loop(world: World, folder: Path, until: int | None = None) -> Tensor:
    """Two batches of a stream in each step. until: see `session_loop`."""
    with session_on(world, str(folder)) as run:
        model = run.wrap(net())
        optimizer = sgd(model)
        loader = run.loader(Batched(SHARED), global_batch_size=2, collate_fn=joined)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(EPOCHS):
            for inputs, _ in loader:
                if until is not None and run.step == until:
                    raise Interrupted
                if until is not None and run.step == until - 1:
                    run.save()
                losses = losses_of(model, inputs)
                optimizer.zero_grad()
                run.mean(losses, over=losses.numel()).backward()
                optimizer.step()
    return weights_of(model)


def batched_and_resumed(world: World, folder: str) -> Tensor:
    calm = batched_loop(world, Path(folder, "calm"))
    batched_loop(world, Path(folder, "again"), until=5)
    assert torch.equal(batched_loop(world, Path(folder, "again")), calm)
    return calm


def two_at_a_time(epoch: int) -> Iterator[Any]:
    stream = Batched(SHARED)
    stream.set_epoch(epoch)
    batches = list(stream)
    for first in range(0, len(batches), 2):
        yield joined(batches[first : first + 2])


@pytest.mark.parametrize("processes", RANKS)
def test_batches_of_a_stream_are_joined_and_weighted(processes: int, tmp_path: Path) -> None:
    _, expected = plain_loop(two_at_a_time)
    for weights in on_ranks(processes, batched_and_resumed, str(tmp_path)):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def refusals(world: World, folder: str) -> list[str]:
    found = []
    for part, split in ((part_of(world), False), (slice(None), True), (slice(0, world.rank), True)):
        try:
            session_loop(world, Path(folder), loader_of(Stream(SHARED, part), split_by_node=split))
        except (PeerError, DataError) as error:
            found.append(str(error))
    one_more = Stream(SHARED, slice(0, world.rank + 1))
    with pytest.raises(DataError, match="too few samples for a full batch on rank 0") as refused:
        session_loop(world, Path(folder), loader_of(one_more, split_by_node=True, drop_last=True))
    assert refused.value.remedy == "use a smaller global_batch_size than 4, or drop_last=False"
    return found


def test_what_a_stream_promises_is_looked_at(tmp_path: Path) -> None:
    for messages in on_ranks(3, refusals, str(tmp_path)):
        for message, said in zip(
            messages,
            ("the first samples of Stream is not the same for", "the same samples", "for rank 0"),
            strict=True,
        ):
            assert said in message


class Endless(IterableDataset[Tensor]):
    """No loader process knows of another one."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(2) for _ in itertools.count())


@pytest.mark.slow
def test_an_endless_stream_is_left_and_resumed(tmp_path: Path) -> None:
    seen = []
    for steps in (2, 4, 4):
        folder = tmp_path / ("calm" if len(seen) == 2 else "again")
        with session_on(World(), str(folder)) as run:
            loader = run.loader(Endless(), global_batch_size=3)
            run.resume(model=run.wrap(net()))
            batches = []
            for _ in run.epochs(1):
                for batch in loader:
                    if run.step == steps:
                        break
                    batches.append(batch)
                break
        seen.append(batches)
    again, calm = [*seen[0], *seen[1]], seen[2]
    assert [len(part) for part in seen] == [2, 2, 4]
    assert all(torch.equal(one, other) for one, other in zip(again, calm, strict=True))


def loop_over(**arguments: Any) -> Callable[[Any], None]:
    def loop(run: Any) -> None:
        loader = run.loader(**arguments)
        run.resume(model=run.wrap(net()))
        for _ in run.epochs(1):
            next(iter(loader))
            next(iter(loader))

    return loop


MISTAKES: list[tuple[Callable[[Any], None], str]] = [
    (loop_over(dataset=Stream(SHARED)), "run.loader: global_batch_size is missing"),
    (
        loop_over(dataset=Batched(SHARED), global_batch_size=5),
        "run.loader: two samples of a batch have the shapes [5, 4] and [3, 4]",
    ),
    (
        loop_over(dataset=iter([1]), global_batch_size=2),
        "run.loader: list_iterator is an iterator, which is empty after one epoch",
    ),
    (
        loop_over(dataset=Stream(SHARED), shuffle=True, global_batch_size=2),
        "but shuffle, sampler",
    ),
    (
        loop_over(dataset=ROWS, split_by_node=True, global_batch_size=2),
        "run.loader: split_by_node=True is for an IterableDataset, but Tensor is",
    ),
    (
        loop_over(dataset=[torch.ones(2)] * 4, split_by_node=True, global_batch_size=2),
        "run.loader: split_by_node=True is for an IterableDataset, but list is",
    ),
]


@pytest.mark.parametrize(
    ("mistake", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES]
)
def test_each_mistake_is_named(mistake: Any, message: str, tmp_path: Path) -> None:
    with (
        pytest.raises((ConfigError, DataError), match=re.escape(message)),
        session_on(World(), str(tmp_path)) as run,
    ):
        mistake(run)


def test_a_stream_of_batches_is_told_to_give_samples(tmp_path: Path) -> None:
    streams = (
        (Batched(SHARED), 5),
        (DataLoader(Batched(SHARED), 5, num_workers=1), None),
        (DataLoader(Batched(SHARED), None), None),
    )
    for stream, size in streams:
        with (
            pytest.raises((ConfigError, DataError)) as caught,
            session_on(World(), str(tmp_path)) as run,
        ):
            loop_over(dataset=stream, global_batch_size=size)(run)
        assert "give single samples" in caught.value.remedy


class Telling(Stream):
    def __len__(self) -> int:
        return SAMPLES


def test_a_loader_is_as_long_as_its_stream_unless_that_is_a_part(tmp_path: Path) -> None:
    with session_on(World(), str(tmp_path)) as run:
        assert len(run.loader(Telling(SHARED), global_batch_size=BATCH)) == 6
        assert len(run.loader(Telling(SHARED), global_batch_size=BATCH, drop_last=True)) == 5
        with pytest.raises(TypeError, match="length of this process's part alone"):
            len(run.loader(Telling(SHARED), global_batch_size=BATCH, split_by_node=True))


class InUnevenParts(Stream):
    """The first of two loader processes reads a quarter of it."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        for number in range(SAMPLES):
            if worker is None or (number % 4 > 0) == bool(worker.id):
                yield self.samples[number]


@pytest.mark.slow
def test_loader_processes_leave_out_what_is_not_full_of_their_own(tmp_path: Path) -> None:
    expected = [
        numbers.tolist()
        for _, numbers in DataLoader(InUnevenParts(SHARED), BATCH, num_workers=2, drop_last=True)
    ]
    assert len(expected[-1]) == BATCH and len(expected) > 3
    arguments = {"num_workers": 2, "drop_last": True}
    seen, _ = session_loop(ALONE, tmp_path, loader_of(InUnevenParts(SHARED), **arguments))
    assert seen[: len(expected)] == expected


class CountsItsPasses(IterableDataset[Sample]):
    """Its order is that of a pass which it counts itself."""

    read = passes = 0

    def __iter__(self) -> Iterator[Sample]:
        for number in random.Random(self.passes).sample(range(SAMPLES), SAMPLES):
            self.read += 1
            yield SHARED[number]
        self.passes += 1


@pytest.mark.parametrize(
    ("stream", "is_noted"),
    [(CountsItsPasses(), True), (Stream(SHARED), False), (Positioned(SHARED), False)],
)
def test_passes_that_differ_by_what_a_stream_keeps_are_noted(
    stream: Any,
    is_noted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ddp_train.data.sample_stream.TRIAL_SECONDS", 60.0)
    with session_on(ALONE, str(tmp_path)) as run:
        run.loader(stream, global_batch_size=BATCH)
    note = "gives other samples each time it is iterated"
    assert (note in capfd.readouterr().err) is is_noted
    assert stream.read == 0, "a copy was tried"


class Same(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20.0))


def test_loader_processes_that_read_the_same_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="gives the same samples to several loader processes"),
        session_on(World(), str(tmp_path)) as run,
    ):
        loader = run.loader(Same(), global_batch_size=2, num_workers=2)
        run.resume(model=run.wrap(net()))
        for _ in run.epochs(1):
            list(loader)


def weights_of_example(world: World, folder: str) -> Tensor:
    streaming_text.TOPICS, streaming_text.EPOCHS = 1, 1
    torch.set_default_dtype(torch.float64)
    with session_on(world, folder) as run:
        model = streaming_text.main(run)
    torch.set_default_dtype(torch.float32)
    return weights_of(model)


@pytest.mark.slow
def test_the_example_is_the_same_on_three_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOPICS", "EPOCHS"):
        monkeypatch.setattr(streaming_text, name, 1)
    alone = weights_of_example(World(), str(tmp_path / "alone"))
    for weights in on_ranks(3, weights_of_example, str(tmp_path / "three")):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-10)
