"""Generators of random numbers that a loop draws from, and no checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches import loop_generators
from ddp_train.sessions.watches.loop_generators import LOST
from tests.sessions.loops import net, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

RNG = np.random.RandomState(0)


class Environment:
    """It draws by generators of its own, and may save them."""

    def __init__(self) -> None:
        self.rngs = {"start": random.Random(0)}
        self.noise = np.random.default_rng(0)

    def play(self) -> None:
        self.rngs["start"].random()
        self.noise.random()

    def state_dict(self) -> dict[str, Any]:
        return {"start": list(self.rngs["start"].getstate()[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def trained(
    run: Run, begin: Callable[[], object], step: Callable[[], object], data: Any, **saved: Any
) -> None:
    model = run.wrap(net())
    optimizer = sgd(model)
    size = None if isinstance(data, DataLoader) else 6
    loader = run.loader(data, global_batch_size=size)
    run.resume(model=model, optimizer=optimizer, **saved)
    for _ in run.epochs(3):
        begin()
        for x, y in loader:
            step()
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()


def nothing() -> None: ...


def with_global(run: Run) -> None:
    trained(run, nothing, RNG.random, rows())


def with_local(run: Run) -> None:
    draws = torch.Generator().manual_seed(1)
    trained(run, lambda: torch.rand(1, generator=draws), nothing, rows())


def with_object(run: Run) -> None:
    environment = Environment()
    trained(run, environment.play, nothing, rows())


def with_saved_object(run: Run) -> None:
    environment = Environment()
    trained(run, environment.play, nothing, rows(), environment=environment)


class Kept:
    """It saves a generator that it does not hold, but for its place in the words."""

    def state_dict(self) -> dict[str, Any]:
        return {"words": torch.as_tensor(RNG.get_state()[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def with_kept(run: Run) -> None:
    trained(run, nothing, RNG.random, rows(), kept=Kept())


def with_sampler(run: Run) -> None:
    """A sampler's own generator, which goes on where it was after a resume."""
    draws = torch.Generator().manual_seed(1)
    data = rows()
    trained(
        run, nothing, nothing, DataLoader(data, 6, sampler=RandomSampler(data, generator=draws))
    )


def with_seeds(run: Run) -> None:
    draws = torch.Generator()

    def draw() -> None:
        draws.manual_seed(run.step + 1)
        torch.rand(1, generator=draws)
        np.random.default_rng(run.step).random()
        np.random.rand()
        random.random()
        torch.rand(1)

    trained(run, nothing, draw, rows())


def with_system(run: Run) -> None:
    """The operating system's random numbers, which have no state."""
    draws = random.SystemRandom()
    trained(run, nothing, draws.random, rows())


LOOPS: list[tuple[Callable[[Run], None], list[str]]] = [
    (with_global, ["RNG"]),
    (with_local, ["draws"]),
    (with_object, ["environment.rngs['start'], environment.noise"]),
    (with_saved_object, ["saved['environment'].noise"]),
    (with_kept, []),
    (with_sampler, []),
    (with_seeds, []),
    (with_system, []),
]


def told(world: World) -> list[list[str]]:
    found = []
    for loop, _ in LOOPS:
        messages: list[str] = []
        loop_generators.log.warning = lambda text, *names, to=messages: to.append(text % names)  # type: ignore[method-assign]
        with session_on(world) as run:
            loop(run)
        found.append(messages)
    return found


def test_generators_that_move_and_are_not_saved_are_told_once() -> None:
    leader, *others = on_ranks(3, told)
    assert leader == [[LOST % name for name in names] for _, names in LOOPS]
    assert others == [[[]] * len(LOOPS)] * 2
