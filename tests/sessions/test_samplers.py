"""Samplers and several loaders in a session, against plain loops in one process."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_train.checkpoints.training_state import TrainingState
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.sessions import data_arguments
from ddp_train.sessions.run import Run
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

BATCH = 6
RANKS = [3, *(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 4))]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    inputs = torch.randn(samples, 4, generator=generator(seed), dtype=torch.float64)
    return TensorDataset(inputs, torch.arange(samples))


class ClassBatches(Sampler[list[int]]):
    """Two classes with three samples each in a batch, by a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            classes = self.random.sample(range(4), 2)
            yield [
                4 * number + place
                for number in classes
                for place in self.random.sample(range(4), 3)
            ]


class Halves(Sampler[int]):
    """The even numbers, or the odd ones, by the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch % 2, 20, 2))


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {
        "sampler": WeightedRandomSampler(range(1, 24), 20, generator=generator(3)),
        "batch_size": BATCH,
    },
    "replacement": lambda: {
        "sampler": RandomSampler(data(), True, num_samples=16, generator=generator(3)),
        "batch_size": BATCH,
        "drop_last": True,
    },
    "subset": lambda: {
        "sampler": SubsetRandomSampler(range(4, 21), generator=generator(3)),
        "batch_size": 5,
    },
    "classes": lambda: {"batch_sampler": ClassBatches()},
    "halves": lambda: {"sampler": Halves(), "batch_size": 4},
}


def batches_of_torch(kind: str, taken_apart: bool) -> Callable[[int], DataLoader[Any]]:
    """The batches of an epoch, without this package."""
    more: dict[str, Any] = {"generator": generator(9)} if taken_apart else {}
    arguments = SAMPLERS[kind]()
    loader = DataLoader(data(), **arguments, **more)

    def batches(epoch: int) -> DataLoader[Any]:
        if kind == "halves":
            arguments["sampler"].set_epoch(epoch)
        return loader

    return batches


def loader_of(kind: str, taken_apart: bool) -> Callable[[Run], Any]:
    """The same batches in a session."""

    def loader(run: Run) -> Any:
        arguments = SAMPLERS[kind]()
        if taken_apart:
            return run.loader(DataLoader(data(), **arguments, generator=generator(9)))
        size = {"global_batch_size": arguments.pop("batch_size", None)}
        return run.loader(data(), **arguments, **size)

    return loader


def all_kinds(world: World, folder: str, device: str = "cpu") -> dict[tuple[str, bool], Any]:
    train = partial(session_loop, world, device=device)
    found = {}
    for place, kind in enumerate(SAMPLERS):
        taken_apart = place % 2 == 0
        loader = loader_of(kind, taken_apart)
        calm = train(Path(folder, kind), loader)
        again = Path(folder, f"again_{kind}")
        first, _ = train(again, loader, until=6)
        rest, weights = train(again, loader)
        assert torch.equal(weights, calm[1]), kind
        assert first + rest == calm[0], kind
        found[kind, taken_apart] = calm
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", RANKS)
def test_samplers_give_the_batches_of_a_plain_loop(processes: int, tmp_path: Path) -> None:
    for found in on_ranks(processes, all_kinds, str(tmp_path)):
        for (kind, taken_apart), (seen, weights) in found.items():
            expected_seen, expected_weights = plain_loop(batches_of_torch(kind, taken_apart))
            assert seen == expected_seen, (kind, taken_apart)
            torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-10)


# --- several loaders ------------------------------------------------------------------------------


Done = Callable[[], int]
"""The number of steps that are done, of which a loop that counts its steps subtracts those before
a resume."""


def pairs_of_zip(
    labelled: Any, unlabelled: Any, epochs: Any, done: Done
) -> Iterator[tuple[Any, Any]]:
    """The shorter one ends the epoch, the longer one begins anew in each."""
    for _ in epochs:
        yield from zip(labelled, unlabelled, strict=False)


def pairs_of_iterators(
    labelled: Any, unlabelled: Any, epochs: Any, done: Done
) -> Iterator[tuple[Any, Any]]:
    """Six steps in an epoch; each begins anew when it is through, as in FixMatch."""
    labelled_batches, unlabelled_batches = iter(labelled), iter(unlabelled)
    for _ in epochs:
        for _ in range(done() % 6, 6):
            try:
                one = next(labelled_batches)
            except StopIteration:
                labelled_batches = iter(labelled)
                one = next(labelled_batches)
            try:
                other = next(unlabelled_batches)
            except StopIteration:
                unlabelled_batches = iter(unlabelled)
                other = next(unlabelled_batches)
            yield one, other


def pairs_with_break(
    labelled: Any, unlabelled: Any, epochs: Any, done: Done
) -> Iterator[tuple[Any, Any]]:
    """Each epoch is left after two steps, when a third batch was taken."""
    for _ in epochs:
        for step, pair in enumerate(zip(labelled, unlabelled, strict=False), done() % 2):
            if step == 2:
                break
            yield pair


PAIRS = (pairs_of_zip, pairs_of_iterators, pairs_with_break)


def step_on_pair(model: Any, optimizer: Any, one: Tensor, other: Tensor, means: Any) -> None:
    optimizer.zero_grad()
    outputs = model(torch.cat([one, other]))[:, 0]
    mean_of_labelled, mean_of_unlabelled = means
    loss = mean_of_labelled((outputs[: len(one)] - one.sum(1)).square())
    loss = loss + 0.5 * mean_of_unlabelled(outputs[len(one) :].square())
    loss.backward()
    optimizer.step()


def loaders_of_pairs() -> tuple[DataLoader[Any], DataLoader[Any]]:
    labelled = DataLoader(data(10), batch_size=4, shuffle=True, generator=generator(3))
    unlabelled = DataLoader(data(23, seed=2), batch_size=5, shuffle=True, generator=generator(4))
    return labelled, unlabelled


def plain_pairs(pairs: Any) -> Tensor:
    model = net()
    optimizer = sgd(model)
    for (one, _), (other, _) in pairs(*loaders_of_pairs(), range(EPOCHS), int):
        step_on_pair(model, optimizer, one, other, (torch.mean, torch.mean))
    return weights_of(model)


def session_pairs(world: World, folder: Path, pairs: Any, until: int | None = None) -> Tensor:
    """The same in a session. until: the step at which it is saved and interrupted."""
    with session_on(world, str(folder)) as run:
        model = run.wrap(net())
        optimizer = sgd(model)
        labelled, unlabelled = map(run.loader, loaders_of_pairs())
        run.resume(model=model, optimizer=optimizer)
        means = [
            lambda losses, of=loader: run.mean(losses, of=of) for loader in (labelled, unlabelled)
        ]
        for (one, _), (other, _) in pairs(
            labelled, unlabelled, run.epochs(EPOCHS), lambda: run.step
        ):
            if until is not None and run.step == until:
                raise Interrupted
            if until is not None and run.step == until - 1:
                run.save()
            step_on_pair(model, optimizer, one, other, means)
    return weights_of(model)


def all_pairs(world: World, folder: str) -> list[Tensor]:
    found = []
    for pairs in PAIRS:
        calm = session_pairs(world, Path(folder, pairs.__name__), pairs)
        again = Path(folder, f"again_{pairs.__name__}")
        for until in (4, 5):
            session_pairs(world, again, pairs, until)
        assert torch.equal(session_pairs(world, again, pairs), calm), pairs
        found.append(calm)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", RANKS)
def test_two_loaders_in_a_step_are_those_of_a_plain_loop(processes: int, tmp_path: Path) -> None:
    for found in on_ranks(processes, all_pairs, str(tmp_path)):
        for pairs, weights in zip(PAIRS, found, strict=True):
            expected = plain_pairs(pairs)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10, msg=pairs.__name__)


def test_repeating_loaders_begin_anew_in_another_order(tmp_path: Path) -> None:
    with session_on(World(), str(tmp_path)) as run:
        model = run.wrap(net())
        run.resume(model=model)
        long = run.loader(data(), global_batch_size=5, shuffle=False)
        short = run.loader(data(7), global_batch_size=3, repeat=True)
        numbers: list[Tensor] = []
        for _ in run.epochs(1):
            numbers += [number for _, (_, number) in zip(long, short, strict=False)]
    assert [len(batch) for batch in numbers] == [3, 3, 1, 3, 3]
    first, second = torch.cat(numbers[:3]), torch.cat(numbers[3:])
    assert sorted(first.tolist()) == list(range(7)) and len(second.unique()) == 6
    assert not torch.equal(first[:6], second)


def test_a_loader_of_one_batch_repeats_within_a_step(tmp_path: Path) -> None:
    with session_on(World(), str(tmp_path)) as run:
        model = run.wrap(net())
        run.resume(model=model)
        long = run.loader(data(), global_batch_size=5)
        short = run.loader(data(4), global_batch_size=4, repeat=True)
        for _ in run.epochs(1):
            further = iter(short)
            for _ in long:
                assert sorted(next(further)[1].tolist()) == [0, 1, 2, 3]
                assert sorted(next(further)[1].tolist()) == [0, 1, 2, 3]


class Noisy(Dataset[Tensor]):
    """The samples are what the generator gives."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        return number + torch.rand(())


def repeated_draws(world: World, folder: str) -> Tensor:
    with session_on(world, folder) as run:
        loader = run.loader(Noisy(), batch_sampler=[[3, 3, 3, 5], [3, 5]])
        run.resume(model=run.wrap(net()))
        for _ in run.epochs(1):
            return torch.cat([run.gather(batch) for batch in loader])
    raise AssertionError


def test_a_sample_that_is_drawn_twice_is_augmented_twice(tmp_path: Path) -> None:
    alone = repeated_draws(World(), str(tmp_path / "alone"))
    assert alone.int().tolist() == [3, 3, 3, 5, 3, 5] and len(alone.unique()) == 6
    assert torch.equal(on_ranks(2, repeated_draws, str(tmp_path / "two"))[0], alone)


class OtherEachTime(Sampler[int]):
    """Its generator has no fixed seed."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(SAMPLES), SAMPLES))


def refusal_of_unseeded(world: World, folder: str) -> str:
    with session_on(world, folder) as run:
        loader = run.loader(data(), sampler=OtherEachTime(), global_batch_size=4)
        run.resume(model=run.wrap(net()))
        try:
            for _ in run.epochs(1):
                next(iter(loader))
        except PeerError as error:
            return str(error)
    return ""


def test_a_sampler_without_a_seed_is_refused(tmp_path: Path) -> None:
    for message in on_ranks(3, refusal_of_unseeded, str(tmp_path)):
        assert "the numbers that OtherEachTime gives is not the same for all" in message


def test_an_order_that_does_not_come_again_is_refused(tmp_path: Path) -> None:
    for until in (3, None):
        refused = nullcontext() if until else pytest.raises(DataError, match="in a different order")
        with refused, session_on(World(), str(tmp_path)) as run:
            loader = run.loader(data(), sampler=OtherEachTime(), global_batch_size=4)
            run.resume(model=run.wrap(net()))
            for _ in run.epochs(1):
                for _ in loader:
                    if run.step == until:
                        raise Interrupted
                    run.save()


def loop_over(*loaders: Any, of: Any = None) -> Callable[[Any], None]:
    """A loop over loaders that functions of the session make."""

    def loop(run: Any) -> None:
        made = [make(run) for make in loaders]
        model = run.wrap(net())
        run.resume(model=model)
        for _ in run.epochs(1):
            for batches in zip(*map(iter, made), strict=False):
                run.mean(losses_of(model, batches[0][0]), of=made[0] if of else None)

    return loop


def loader_by(**arguments: Any) -> Callable[[Any], Any]:
    return lambda run: run.loader(data(), **arguments)


def cycled(run: Any) -> Any:
    loader = run.loader(data(5), global_batch_size=4)
    model = run.wrap(net())
    run.resume(model=model)
    other = run.loader(data(), global_batch_size=4)
    for _ in run.epochs(1):
        for _, (inputs, _) in zip(other, itertools.cycle(loader), strict=False):
            run.mean(losses_of(model, inputs), of=loader)


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (
        loader_by(sampler=range(3), shuffle=True, global_batch_size=2),
        "run.loader got shuffle and a sampler",
    ),
    (loader_by(sampler=range(3)), "run.loader: global_batch_size is missing"),
    (
        loader_by(batch_sampler=[[1]], global_batch_size=2),
        "run.loader got batch_sampler and global_batch_size",
    ),
    (
        loader_by(sampler=DistributedSampler(data(), 3, 0), global_batch_size=2),
        "sampler is a DistributedSampler, but run.loader divides the samples",
    ),
    (loader_by(batch_sampler=iter([[1]])), "batch_sampler is an iterator (list_iterator)"),
    (loader_by(sampler=RandomSampler, global_batch_size=2), "sampler is a type, which cannot be"),
    (
        loader_by(global_batch_size=50, drop_last=True),
        "run.loader: drop_last=True leaves no batch: there are 23 samples, fewer than",
    ),
    (loop_over(loader_by(batch_sampler=[1, 2])), "list gave 1, which are not numbers of samples"),
    (loop_over(loader_by(batch_sampler=[[1], []])), "list gave a batch without samples"),
    (loop_over(loader_by(batch_sampler=[[1], [23]])), "list gave the number 23, but the data set"),
    (
        lambda run: run.loader(DataLoader(data(), batch_size=None)),
        "got a DataLoader with batch_size=None",
    ),
    (
        lambda run: run.loader(
            DataLoader(data(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
        ),
        "multiprocessing_context='spawn', but all loader processes are started by",
    ),
    (
        loop_over(loader_by(global_batch_size=4), loader_by(global_batch_size=4)),
        "run.mean: 2 loaders gave batches in this step",
    ),
    (cycled, "run.mean: the loader that was given as of= gave no batch in this step"),
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


def test_loaders_have_the_data_set_that_they_got(tmp_path: Path) -> None:
    rows = TensorDataset(torch.zeros(6, 2))
    with session_on(World(), str(tmp_path)) as run:
        whole = DataLoader(rows, 3, shuffle=True)
        assert run.test_loader(rows, batch_size=3).dataset is rows
        assert run.test_loader(whole).dataset is rows
        assert run.loader(whole).dataset is rows


def test_what_has_no_effect_of_a_data_loader_is_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loader = DataLoader(data(), num_workers=1, timeout=5, multiprocessing_context="fork")
    assert data_arguments.taken_apart(loader, "run.loader").persistent_workers
    said = capsys.readouterr().err
    assert said.startswith("note: run.loader: timeout=5 has no effect: use timeout_seconds")
    each_pass = DataLoader(data(), num_workers=1, worker_init_fn=print)
    assert not data_arguments.taken_apart(each_pass, "run.loader").persistent_workers
    assert capsys.readouterr().err == ""


def test_a_checkpoint_without_states_of_loaders_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun() -> None:
        with session_on(World(), str(tmp_path)) as run:
            model = run.wrap(torch.nn.Linear(4, 1).double())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.resume(model=model, optimizer=optimizer)
            loader = run.loader(data(), global_batch_size=6)
            for _ in run.epochs(1):
                for inputs, _ in loader:
                    optimizer.zero_grad()
                    run.mean(model(inputs).flatten()).backward()
                    optimizer.step()

    begun()
    load = TrainingState.load

    def of_an_earlier_version(path: Path) -> TrainingState:
        state = load(path)
        assert state.session
        del state.session["loaders"]
        return state

    monkeypatch.setattr(TrainingState, "load", of_an_earlier_version)
    with pytest.raises(DataError, match="was saved by an earlier version of ddp_train, without"):
        begun()


def test_a_data_loader_to_score_keeps_its_samples(tmp_path: Path) -> None:
    with session_on(World(), str(tmp_path)) as run:
        loaders = {
            "all": DataLoader(data(), batch_size=9, shuffle=True),
            "some": DataLoader(data(), batch_size=9, sampler=[4, 2]),
            "whole batches": DataLoader(data(), batch_size=9, drop_last=True),
        }
        seen = {
            name: [numbers.tolist() for _, numbers in run.test_loader(loader)]
            for name, loader in loaders.items()
        }
    assert [len(batch) for batch in seen["all"]] == [9, 9, 5]
    assert seen["some"] == [[4, 2]] and [len(batch) for batch in seen["whole batches"]] == [9, 9]
