"""Several loops over `run.epochs` in one session: phases, tasks, early ends."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import UsageError
from tests.sessions.loops import net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

Weights = dict[str, torch.Tensor]
PHASES = (2, 4, 6)
"""Epochs of 4 steps in all by the end of each phase."""


class Loop:
    """A model that trains in several loops."""

    def __init__(self, run: Run, stops_at: int = 0) -> None:
        """stops_at: the step after which the run is saved, and interrupted behind the next."""
        random.seed(0)  # as a session does
        self.run = run
        self.stops_at = stops_at
        self.model = run.wrap(net())
        self.optimizer = sgd(self.model)
        self.data = rows()
        self.scale = 1.0
        self.loader = self.new_loader()
        run.resume(model=self.model, optimizer=self.optimizer)

    def new_loader(self) -> Iterator[torch.Tensor]:
        return self.run.loader(range(len(self.data)), global_batch_size=6)  # type: ignore[return-value]

    def draw(self) -> None:
        self.scale = random.random() + torch.rand(()).item()

    def train(self, loader: Iterator[torch.Tensor], most: int = 4) -> None:
        inputs, labels = self.data.tensors
        for done, i in enumerate(loader, 1):
            self.optimizer.zero_grad()
            losses = (self.model(inputs[i]).squeeze(1) - labels[i]).square()
            torch.rand(self.run.rank)
            self.run.mean(losses * self.scale).backward()
            self.optimizer.step()
            if self.stops_at and self.run.step == self.stops_at:
                self.run.save()
            if self.stops_at and self.run.step > self.stops_at:
                raise Interrupted
            if done == most:
                return


def phases(loop: Loop) -> None:
    """Each draws before it begins, and after; the second makes a loader for each epoch."""
    for phase, count in enumerate(PHASES):
        loop.draw()
        loader = loop.new_loader()
        for _ in loop.run.epochs(count):
            if phase == 1:
                loader = loop.new_loader()
            loop.train(loader)
    loop.draw()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter += loop.scale


def early_end(loop: Loop) -> None:
    for epoch in loop.run.epochs(6):
        if epoch >= 2:
            break
        loop.train(loop.loader)
    loop.draw()
    for _ in loop.run.epochs(6):
        loop.train(loop.loader)


def calm_and_resumed(
    world: World, folder: Path, train: Callable[[Loop], None], steps: list[int]
) -> list[Weights]:
    found = []
    with session_on(world) as run:
        loop = Loop(run)
        train(loop)
        found.append(weights_of(model=loop.model))
    for step in steps:
        place = str(folder / str(step))
        for stops_at in (step, 0):
            with session_on(world, place) as run:
                loop = Loop(run, stops_at)
                train(loop)
        found.append(weights_of(model=loop.model))
    return found


@pytest.mark.parametrize("train", [phases, early_end])
def test_loops_resume_with_their_draws(train: Callable[[Loop], None], tmp_path: Path) -> None:
    """The steps lie within the first, second and third loop, and at the end of an epoch."""
    found = on_ranks(3, calm_and_resumed, tmp_path, train, [2, 8, 10, 14, 18])
    for calm, *resumed in found:
        for weights in resumed:
            torch.testing.assert_close(weights, calm, rtol=0, atol=0)


class Patience:
    """Counts epochs, of which two are enough."""

    epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def notes_of_starts(world: World, folder: str, at_top: bool, counts: list[int]) -> list[str]:
    """What each start of a run writes that is left by `break`. counts: of epochs, of each."""
    notes = []
    for count in counts:
        written = io.StringIO()
        with contextlib.redirect_stderr(written), session_on(world, folder) as run:
            model = run.wrap(net())
            optimizer = sgd(model)
            patience = Patience()
            loader = run.loader(rows(), global_batch_size=6)
            run.resume(model=model, optimizer=optimizer, patience=patience)
            for _ in run.epochs(count):
                if at_top and patience.epochs >= 2:
                    break
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    run.mean((model(inputs).squeeze(1) - labels).square()).backward()
                    optimizer.step()
                patience.epochs += 1
                if not at_top and patience.epochs >= 2:
                    break
        notes.append(written.getvalue())
    return notes


@pytest.mark.parametrize(
    ("at_top", "counts", "told"),
    [
        (False, [6, 6, 6], [False, True, True]),
        (False, [6, 7, 7], [False, False, True]),
        (True, [6, 6, 7], [False, False, False]),
    ],
)
def test_a_run_that_was_left_at_the_end_of_an_epoch_says_that_it_trains_on(
    at_top: bool, counts: list[int], told: list[bool], tmp_path: Path
) -> None:
    leader, *others = on_ranks(3, notes_of_starts, str(tmp_path), at_top, counts)
    assert ["move the `break` to the top" in written for written in leader] == told
    assert not any("`break`" in written for notes in others for written in notes)


def same_count(loop: Loop) -> None:
    for _ in range(2):
        for _ in loop.run.epochs(2):
            loop.train(loop.loader)


def smaller_count(loop: Loop) -> None:
    for count in (4, 2):
        for _ in loop.run.epochs(count):
            loop.train(loop.loader)


def nested(loop: Loop) -> None:
    for _ in loop.run.epochs(2):
        for _ in loop.run.epochs(3):
            loop.train(loop.loader)


def left_inside(loop: Loop) -> None:
    for _ in loop.run.epochs(4):
        loop.train(loop.loader, most=2)
        break
    for _ in loop.run.epochs(4):
        loop.train(loop.loader)


def left_after(loop: Loop) -> None:
    for _ in loop.run.epochs(4):
        loop.train(loop.loader)
        break
    for _ in loop.run.epochs(4):
        loop.train(loop.loader)


REFUSALS = {
    same_count: "run.epochs(2) has no epoch left: earlier loops have done 2, and the count is that"
    " of the whole run\n  remedy: for 2 further epochs use run.epochs(4)",
    smaller_count: "run.epochs(2) has no epoch left: earlier loops have done 4",
    nested: "run.epochs(3) was called inside of another loop over run.epochs",
    left_inside: "run.epochs(4): an earlier loop over run.epochs was left inside of epoch 0,"
    " after 2 steps of it",
    left_after: "was left inside of epoch 0, after 4 steps of it",
}


def refusal_of(world: World, folder: str, train: Callable[[Loop], None]) -> str:
    with pytest.raises(UsageError) as error, session_on(world, folder) as run:
        train(Loop(run))
    return f"{error.value}\n  remedy: {error.value.remedy}"


def refusals(world: World, folder: Path) -> list[str]:
    """Errors of each loop, and of the one that a second start meets with a checkpoint."""
    found = [refusal_of(world, str(folder / one.__name__), one) for one in REFUSALS]
    found.append(refusal_of(world, str(folder / same_count.__name__), same_count))
    return found


def test_loops_that_would_train_nothing_or_twice_are_refused(tmp_path: Path) -> None:
    expected = [*REFUSALS.values(), REFUSALS[same_count]]
    for messages in on_ranks(3, refusals, tmp_path):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def forgetful(loop: Loop) -> None:
    """A `break` whose condition no resumed run meets."""
    for epoch in loop.run.epochs(6):
        if epoch == 2:
            break
        loop.train(loop.loader)
    for _ in loop.run.epochs(6):
        loop.train(loop.loader)


def resumed_in_another_loop(world: World, folder: str) -> str:
    with session_on(world, folder) as run:
        forgetful(Loop(run, stops_at=14))
    return refusal_of(world, folder, forgetful)


def test_a_run_that_resumes_in_another_loop_is_refused(tmp_path: Path) -> None:
    for message in on_ranks(3, resumed_in_another_loop, str(tmp_path)):
        assert "loop 2 of the script's `for ... in run.epochs(...)` loops, but the" in message
        assert "the resumed run is training in loop 1" in message
        assert "if a `break` ended loop 1, its condition must be true again" in message
