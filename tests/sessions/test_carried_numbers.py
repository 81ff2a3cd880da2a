"""Numbers that a loop carries from step to step, each process by its own samples."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.sessions.watches.carried_names import LoopCode
from ddp_train.sessions.watches.carried_numbers import CARRIED
from ddp_train.sessions.watches.lost_variables import LOST_OVER_EPOCHS
from tests.sessions.loops import net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import told_by

BODIES = {
    "a baseline": (
        """
        losses = -model(x) * (y - baseline)
        total += y.sum().item()
        run.mean(losses).backward()
        opt.step()
        baseline = 0.9 * baseline + 0.1 * y.mean().item()
        """,
        ["baseline"],
    ),
    "weights of groups": (
        """
        losses = (model(x) - y).square()
        run.mean(losses * q[g]).backward()
        with torch.no_grad():
            for group in range(4):
                q[group] *= losses[g == group].mean().exp()
            q /= q.sum()
        history.append(losses.sum().item())
        """,
        ["q"],
    ),
    "in place": (
        """
        run.mean((model(x) - centre).square()).backward()
        centre.mul_(0.9).add_(0.1 * x.mean(0))
        state.sum.data[0] = 3
        """,
        ["centre"],
    ),
    "what decides": (
        """
        loss = run.mean(model(x))
        if loss.item() > 3 * self.typical:
            continue
        self.typical = 0.9 * self.typical + 0.1 * loss.item()
        loss.backward()
        """,
        ["self.typical"],
    ),
    "a factor": (
        """
        loss = run.mean(model(x)) + multiplier * run.mean(cost(x))
        loss.backward()
        multiplier += 0.5 * cost(x).mean().item()
        """,
        ["multiplier"],
    ),
    "a log": (
        """
        opt.zero_grad()
        losses = model(x)
        run.mean(losses).backward()
        opt.step()
        total += losses.sum().item()
        if total > best:
            best = total
        meter.update(losses)
        run.log("loss", losses)
        """,
        [],
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_names_that_losses_depend_on_are_found(kind: str) -> None:
    body, expected = BODIES[kind]
    code = f"""
for epoch in run.epochs(3):
    total = 0.0
    for x, y in loader:
{indent(dedent(body).strip(), " " * 8)}
    print(total)
"""
    assert carried(code, 4, "run") == expected
    assert carried(code, 4, "session") in (None, expected)


def test_code_that_cannot_be_read_has_no_names() -> None:
    assert carried("for x in", 1, "run") is None
    assert carried("x = 3", 1, "run") is None


def carried(code: str, line: int, run_name: str) -> list[str] | None:
    loop = LoopCode(code, line, {run_name}).loop_names()
    return None if loop is None else sorted(loop.carried)


class Trainer:
    """A loop in a method, with a threshold that it moves."""

    def __init__(self, run: Any, of_all: bool) -> None:
        self.run = run
        self.of_all = of_all
        self.threshold = 0.1
        self.weights = torch.ones(2).double()
        """Of the classes: as many as a process has samples."""
        self.temperature = 1.0
        self.seen = 0.0

    def mean_of(self, values: Tensor) -> float:
        if self.of_all:
            return self.run.sum(values.sum().item()) / self.run.sum(len(values))
        return values.mean().item() if len(values) else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("threshold", "weights", "temperature")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def train(self) -> Any:
        model = self.run.wrap(net())
        optimizer = sgd(model)
        loader = self.run.loader(rows(), global_batch_size=6)
        self.run.resume(model=model, optimizer=optimizer, trainer=self)
        for _ in self.run.epochs(2, whole=True):
            largest = torch.zeros(1).double()
            for inputs, labels in loader:
                losses = (model(inputs).squeeze(1) / self.temperature - labels).square()
                kept = losses * (losses > self.threshold)
                optimizer.zero_grad()
                self.run.mean(kept * self.weights[labels.long()]).backward()
                optimizer.step()
                self.seen += losses.sum().item()
                self.threshold = 0.5 * self.threshold + 0.5 * self.mean_of(losses.detach())
                self.weights[1] *= 1 + self.mean_of(losses.detach())
                largest = losses.detach()
            self.temperature += self.mean_of(largest)
        return weights_of(model=model)


def after_a_warm_up(run: Any, batch_size: int) -> None:
    """A radius of this process's samples, from the second epoch on."""
    model = run.wrap(net())
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=batch_size)
    run.resume(model=model, optimizer=optimizer)
    radius = 0.0
    for epoch in run.epochs(5, whole=True):
        for inputs, labels in loader:
            optimizer.zero_grad()
            losses = (model(inputs).squeeze(1) - labels).square() - radius
            run.mean(losses * losses).backward()
            optimizer.step()
            if epoch > 0 and len(losses):
                radius = losses.detach().mean().item()


@pytest.mark.parametrize("batch_size", [6, 12])
def test_a_number_that_begins_to_differ_later_is_told_once(batch_size: int) -> None:
    """Also where an epoch has fewer steps than are looked at."""
    assert on_ranks(3, told_late, batch_size) == [
        [LOST_OVER_EPOCHS % "radius", CARRIED % "radius"],
        [],
        [],
    ]


def told(world: World, of_all: bool) -> tuple[list[str], Any]:
    return told_by(world, lambda run: Trainer(run, of_all).train())


def told_late(world: World, batch_size: int) -> list[str]:
    messages, _ = told_by(world, lambda run: after_a_warm_up(run, batch_size))
    return messages


def test_a_number_of_own_samples_is_told_once() -> None:
    messages = [messages for messages, _ in on_ranks(3, told, False)]
    assert messages == [[CARRIED % "self.temperature, self.threshold, self.weights"], [], []]
    assert on_ranks(1, told, False)[0][0] == []


def test_a_number_of_all_samples_is_exact_and_not_told() -> None:
    ((_, expected),) = on_ranks(1, told, True)
    for size in (3, 4):
        for messages, weights in on_ranks(size, told, True):
            assert messages == []
            torch.testing.assert_close(weights, expected)
