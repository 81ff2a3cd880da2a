"""Passes of a loop over `range(run.step, ...)` that are no steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches import loop_passes
from ddp_train.sessions.watches.loop_passes import OTHER_PASSES, counts_from_steps
from tests.sessions.loops import net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

PASSES = 12
LEFT_AT = 3
"""The step at which a run is saved and interrupted."""


class Training:
    """Two loaders of a session, and what does a step on a batch of one of them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = run.wrap(net())
        self.optimizer = sgd(self.model)
        self.loaders = [run.loader(rows(), global_batch_size=6, repeat=True) for _ in range(2)]
        run.resume(model=self.model, optimizer=self.optimizer)
        self.is_left = False
        """The run is saved and interrupted at a step."""

    def update(self, which: int, batch: Any) -> None:
        x, y = batch
        if self.is_left and self.run.step == LEFT_AT + 1:
            raise Interrupted
        self.optimizer.zero_grad()
        losses = (self.model(x).squeeze(1) - y).square()
        self.run.mean(losses, of=self.loaders[which]).backward()
        self.optimizer.step()
        if self.is_left and self.run.step == LEFT_AT:
            self.run.save()


def by_turns(run: Run, training: Training) -> None:
    iterators = [iter(loader) for loader in training.loaders]
    for step in range(run.step, PASSES):
        training.update(step % 2, next(iterators[step % 2]))


def by_turns_of_their_own(run: Run, training: Training) -> None:
    turns = itertools.cycle(enumerate([iter(loader) for loader in training.loaders]))
    for _, (which, batches) in zip(range(run.step, PASSES), turns, strict=False):
        training.update(which, next(batches))


def in_an_inner_loop(run: Run, training: Training) -> None:
    iterators = [iter(loader) for loader in training.loaders]
    for _ in range(run.step, PASSES // 2):
        for which, batches in enumerate(iterators):
            training.update(which, next(batches))


def taken_ahead(run: Run, training: Training) -> None:
    first, second = (iter(loader) for loader in training.loaders)
    batch = next(first)
    for _ in range(run.step, PASSES // 2):
        training.update(0, batch)
        training.update(1, next(second))
        batch = next(first)


def two_passes_a_step(run: Run, training: Training) -> None:
    iterators = [iter(loader) for loader in training.loaders]
    for step in range(2 * run.step, PASSES):
        training.update(step % 2, next(iterators[step % 2]))


Loop = Callable[[Run, Training], None]
SILENT = (in_an_inner_loop, two_passes_a_step)
"""Loops that a resumed run ends as an undisturbed one."""


def told_and_weights(
    world: World, loop: Loop, folder: str | None = None, is_left: bool = False
) -> tuple[list[str], Any]:
    told: list[str] = []
    loop_passes.log.warning = lambda text, *names: told.append(text % names)  # type: ignore[method-assign]
    with session_on(world, folder) as run:
        training = Training(run)
        training.is_left = is_left
        for _ in run.epochs(1):
            loop(run, training)
    return told, weights_of(model=training.model)


def told_of(world: World) -> dict[str, list[str]]:
    loops = (by_turns, by_turns_of_their_own, *SILENT, taken_ahead)
    return {loop.__name__: told_and_weights(world, loop)[0] for loop in loops}


@pytest.mark.timeout(60)
def test_passes_that_are_no_steps_are_named() -> None:
    told, *of_others = on_ranks(3, told_of)
    assert told.pop("by_turns") == [OTHER_PASSES % ("step", "step")]
    assert told.pop("by_turns_of_their_own") == [OTHER_PASSES % ("_", "_")]
    assert set(map(tuple, told.values())) == {()}
    assert not any(any(of_one.values()) for of_one in of_others)


def resumed(world: World, folder: str) -> list[bool]:
    """Whether a run that was interrupted ends as an undisturbed one."""
    found = []
    for loop in SILENT:
        own = f"{folder}/{loop.__name__}"
        _, undisturbed = told_and_weights(world, loop)
        told_and_weights(world, loop, own, is_left=True)
        _, weights = told_and_weights(world, loop, own)
        found.append(all(weights[name].equal(undisturbed[name]) for name in undisturbed))
    return found


@pytest.mark.timeout(60)
def test_loaders_in_an_inner_loop_go_on_right(tmp_path: Path) -> None:
    assert on_ranks(3, resumed, str(tmp_path)) == [[True, True]] * 3


def test_only_the_body_of_a_loop_counts() -> None:
    code = "for step, x in zip(range(run.step, 9), loader):\n    train(x)\n"
    assert counts_from_steps(code, 2, {"run"}) == {"step", "x"}
    assert not counts_from_steps(code, 1, {"run"})
    assert not counts_from_steps(code, 2, {"other"})
