"""Draws by rank in the first step of a session."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ddp_train
from ddp_train import noise_like
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.distributed.world import World
from ddp_train.sessions.watches import first_epoch
from ddp_train.sessions.watches.first_step import SAME_ROWS, DrawsOfStep
from tests.sessions.loops import BATCH, net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on


@pytest.mark.parametrize(
    ("draw", "are_by_rank"),
    [
        (lambda: noise_like(torch.zeros(2, 3)), False),
        (lambda: torch.rand(1), True),
        (np.random.rand, True),
        (random.random, True),
        (lambda: list(DataLoader(rows(), batch_size=5)), False),
        (lambda: [next(iter(DataLoader(rows()))) for _ in range(9)], False),
        (lambda: list(DataLoader(rows(), batch_size=5, shuffle=True)), True),
        (lambda: [list(DataLoader(rows())), torch.rand(1)], True),
    ],
)
def test_draws_by_rank_are_told_from_keyed_noise(
    draw: Callable[[], object], are_by_rank: bool
) -> None:
    seed_step = StepSeed(0, 1, "cpu")
    draws = DrawsOfStep(seed_step)
    seed_step(4)
    draws.begin(4)
    with TrainingStep(share=MicroBatch(0, 4, np.arange(2), 2, 1.0, True)):
        draw()
    assert draws.are_by_rank() is are_by_rank


def test_torchs_loaders_have_their_method_back_after_steps_that_were_left() -> None:
    """A first step that was left by `break`, or by an error, never ends."""
    iterate = DataLoader.__iter__
    seed_step = StepSeed(0, 1, "cpu")
    draws = DrawsOfStep(seed_step)
    for _ in range(2):
        seed_step(4)
        draws.begin(4)
        list(DataLoader(rows()))
    assert not draws.are_by_rank()
    assert DataLoader.__iter__ is iterate


def test_an_error_in_the_first_step_leaves_torchs_loaders_alone() -> None:
    iterate = DataLoader.__iter__
    with pytest.raises(ZeroDivisionError), session_on(World(0, 2, 0, 2)) as run:
        run._steps.watches.first_step.begin(0)  # type: ignore[union-attr]
        raise ZeroDivisionError
    assert DataLoader.__iter__ is iterate


def scored_in_a_step(world: World) -> None:
    """A step that scores its own rows by a plain loader."""
    with session_on(world) as run:
        model = run.wrap(net())
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=BATCH)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for x, y in loader:
                with torch.no_grad():
                    scores = [model(part).sum() for part in DataLoader(x, batch_size=2)]
                run.log("scores", len(scores), over=1)
                optimizer.zero_grad()
                run.mean((model(x).squeeze(1) - y).square()).backward()
                optimizer.step()


def test_plain_loaders_in_a_step_are_no_draws(capfd: pytest.CaptureFixture[str]) -> None:
    on_ranks(3, scored_in_a_step)
    assert "draws its own random numbers" not in capfd.readouterr().err


def own_batches(world: World, kind: str) -> list[Any]:
    """What is said of a loop with batch norm, and its weights and statistics.

    kind: `same`: the batch is drawn alike on all processes; `alone`: without synchronised batch
        norm; `shared`: the loader gives it; `alike`: all rows of all batches are the same.
    """
    messages: list[str] = []
    first_epoch.log.warning = lambda text, *_: messages.append(text)  # type: ignore[method-assign]
    inputs, labels = rows().tensors
    with session_on(world) as run:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        model = run.wrap(net, sync_batch_norm=kind != "alone")
        optimizer = sgd(model)
        data = list(zip(inputs, labels, strict=True))
        if kind == "alike":
            data = [data[0]] * 20
        loader = run.loader(data, global_batch_size=10)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for x, y in loader:
                if kind in ("same", "alone"):
                    x, y = inputs[run.step : run.step + 5], labels[run.step : run.step + 5]
                optimizer.zero_grad()
                losses = (model(x).squeeze(1) - y).square()
                run.mean(losses, over=len(losses)).backward()
                optimizer.step()
        weights = weights_of(model=model)
    return [messages, weights]


@pytest.mark.parametrize(
    ("kind", "told"),
    [("same", [SAME_ROWS]), ("alone", []), ("shared", []), ("alike", [])],
)
def test_batch_norm_over_the_same_rows_is_told(kind: str, told: list[str]) -> None:
    """And the remedy is exact."""
    ((messages, expected),) = on_ranks(1, own_batches, kind)
    assert messages == []
    for size in (3, 4):
        of_ranks = on_ranks(size, own_batches, kind)
        assert [messages for messages, _ in of_ranks] == [told, *[[]] * (size - 1)]
        if not told:
            torch.testing.assert_close(of_ranks[0][1], expected)


def tossed(world: World, own: bool) -> Any:
    """Weights of a loop with one coin for all samples of a batch.

    own: it is drawn by a generator of the loop's own.
    """
    coins = random.Random(3)
    with session_on(world) as run:
        model = run.wrap(net())
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=BATCH)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for inputs, labels in loader:
                coin = coins.random()
                if not own:
                    coin = ddp_train.rand_like(torch.zeros(1), rows="shared").item()
                if coin < 0.5:
                    inputs = inputs.flip(1)
                optimizer.zero_grad()
                run.mean((model(inputs).squeeze(1) - labels).square()).backward()
                optimizer.step()
        return weights_of(model=model)


@pytest.mark.parametrize("own", [False, True])
def test_a_coin_for_all_rows_is_the_same_everywhere(own: bool) -> None:
    """As the note on draws by process has it. One process may be without a sample."""
    (expected,) = on_ranks(1, tossed, own)
    for size in (3, 4):
        for weights in on_ranks(size, tossed, own):
            torch.testing.assert_close(weights, expected)
