"""What a loop changes before the first batch of an epoch, and a resumed run would change again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from ddp_train.distributed.world import World
from ddp_train.sessions.watches import epoch_beginning
from ddp_train.sessions.watches.epoch_beginning import DONE_AGAIN, WAS_DONE_AGAIN
from tests.sessions.loops import net, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on


class Pool:
    """Rows that are played, and the number of the epoch."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0, 4)
        self.epoch = 0

    def grow(self) -> None:
        self.rows = torch.cat([self.rows, torch.ones(2, 4)])

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        self.epoch = state["epoch"]


class Loop:
    """A loop of four epochs. begin: what it does at the beginning of each."""

    def __init__(self, begin: Callable[[Loop, int], object], whole: bool = False) -> None:
        self.begin = begin
        self.whole = whole

    def run(self, world: World, folder: str | None = None, leave_at: int = -1) -> list[str]:
        """Returns what is told. leave_at: the step after whose checkpoint the process is lost."""
        told: list[str] = []
        epoch_beginning.log.warning = lambda text, *names: told.append(text % names)  # type: ignore[method-assign]
        with session_on(world, folder) as run:
            self.model = run.wrap(net())
            self.teacher: Any = nn.Sequential(net(seed=1), nn.BatchNorm1d(1))
            self.optimizer = sgd(self.model)
            self.scheduler = StepLR(self.optimizer, 1, 0.9)
            self.pool = Pool()
            loader = run.loader(rows(), global_batch_size=10)
            run.resume(
                model=self.model,
                teacher=self.teacher,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                pool=self.pool,
            )
            for epoch in run.epochs(4, whole=self.whole):
                self.begin(self, epoch)
                for x, y in loader:
                    self.optimizer.zero_grad()
                    run.mean((self.model(x).squeeze(1) - y).square()).backward()
                    self.optimizer.step()
                    if run.step == leave_at:
                        run.save()
                    if run.step == leave_at + 1 > 0:
                        raise Interrupted
                self.pool.grow()
        return told


def step_by_epoch(loop: Loop, epoch: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.scheduler.step(epoch)


def set_rate(loop: Loop, epoch: int) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)


def lower_rate(loop: Loop, _: int) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.9


def fill_once(loop: Loop, epoch: int) -> None:
    loop.pool.epoch = epoch
    if not len(loop.pool.rows):
        loop.pool.grow()


def halve(weights: Tensor) -> None:
    with torch.no_grad():
        weights.mul_(0.5)


BEGINNINGS: list[tuple[Callable[[Loop, int], object], str]] = [
    (lambda loop, _: loop.pool.grow(), "pool"),
    (lambda loop, _: loop.scheduler.step(), "scheduler"),
    (lambda loop, _: loop.teacher[0].load_state_dict(loop.model.state_dict()), "teacher"),
    (lambda loop, _: halve(next(loop.model.parameters())), "model"),
    (lambda loop, _: loop.optimizer.state.clear(), "optimizer"),
    (step_by_epoch, ""),
    (set_rate, ""),
    (fill_once, ""),
]


def told_of_beginnings(world: World) -> list[list[str]]:
    told = [Loop(begin).run(world) for begin, _ in BEGINNINGS]
    begin, _ = BEGINNINGS[0]
    return [*told, Loop(begin, whole=True).run(world)]


def test_what_is_done_again_in_a_resumed_epoch_is_told_once() -> None:
    leader, *others = on_ranks(3, told_of_beginnings)
    assert leader == [*([DONE_AGAIN % name] if name else [] for _, name in BEGINNINGS), []]
    assert others == [[[]] * len(leader)] * 2


def told_by_resumed(world: World, folder: Path) -> list[list[str]]:
    """What is told of loops that were lost inside of their second epoch, and go on there."""
    found = []
    for number, begin in enumerate((lower_rate, set_rate, step_by_epoch, fill_once)):
        Loop(begin).run(world, str(folder / str(number)), leave_at=2)
        found.append(Loop(begin).run(world, str(folder / str(number))))
    return found


def test_what_was_done_again_in_a_resumed_epoch_is_told(tmp_path: Path) -> None:
    leader, *_ = on_ranks(3, told_by_resumed, tmp_path)
    assert leader == [[WAS_DONE_AGAIN % "optimizer"], [], [], []]
