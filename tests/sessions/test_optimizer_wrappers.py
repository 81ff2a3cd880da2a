"""Optimizers around optimizers whose state is in no checkpoint, or is not found again there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.world import World
from ddp_train.sessions.watches import optimizer_wrappers
from ddp_train.sessions.watches.optimizer_wrappers import BY_ID, LOST
from tests.sessions.loops import net, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on


class Lookahead(Optimizer):
    """As its public version, which does not call Optimizer's __init__: slow weights in `state`,
    which state_dict names by their id()."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state = defaultdict(dict)
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for fast in group["params"]:
                slow = self.state[fast].setdefault("slow", fast.clone())
                slow.lerp_(fast, 0.5)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        slow = {id(weight): state for weight, state in self.state.items()}
        return {"fast": self.optimizer.state_dict(), "slow": slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])


class Warmup:
    """As "The Annotated Transformer" has it: no optimizer by its class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for group in self.inner.param_groups:
            group["lr"] = 0.01 * self.count
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Clipped:
    """A wrapper without a state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = list(optimizer.param_groups)
        self.largest = 1.0

    def step(self) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], self.largest)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Sharp(Optimizer):
    """As the public SAM, with torch's state_dict."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)


class Holder:
    """An object of the user's that saves a wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.wrapper.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wrapper.count = state["count"]


def told(world: World, make: Callable[[Optimizer], Any], saved: str) -> list[str]:
    """What is told of a loop whose steps are those of a wrapper.

    saved: `base`, `both` or `holder`, which run.resume gets.
    """
    messages: list[str] = []
    optimizer_wrappers.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
    with session_on(world) as run:
        model = run.wrap(net())
        base = sgd(model)
        around = make(base)
        objects = {"base": base}
        if saved == "both":
            objects["around"] = around
        if saved == "holder":
            objects["holder"] = Holder(around)  # type: ignore[assignment]
        loader = run.loader(rows(), global_batch_size=6)
        run.resume(model=model, **objects)
        for _ in run.epochs(3):
            for x, y in loader:
                around.zero_grad()
                losses: Tensor = (model(x).squeeze(1) - y).square()
                run.mean(losses).backward()
                around.step()
    return messages


CASES: list[tuple[Callable[[Optimizer], Any], str, list[str]]] = [
    (
        Lookahead,
        "base",
        [LOST % ("around (Lookahead)", "base", "Pass both objects", "around", "around")],
    ),
    (Lookahead, "both", [BY_ID % "around"]),
    (
        Warmup,
        "base",
        [
            LOST
            % (
                "around (Warmup)",
                "base",
                "Write state_dict and load_state_dict for Warmup, and pass both objects",
                "around",
                "around",
            )
        ],
    ),
    (Warmup, "holder", []),
    (Clipped, "base", []),
    (Sharp, "both", []),
]


def told_of_all(world: World) -> list[list[str]]:
    return [told(world, make, saved) for make, saved, _ in CASES]


def test_wrappers_whose_state_is_lost_are_told_once() -> None:
    leader, *_ = on_ranks(3, told_of_all)
    assert leader == [messages for _, _, messages in CASES]
