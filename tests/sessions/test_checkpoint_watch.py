"""What models and optimizers change and no checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.sessions.watches import checkpoint_watch
from ddp_train.sessions.watches.checkpoint_watch import ADDED
from tests.sessions.loops import net, rows
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

CHANGED = (
    "optimizer.count, optimizer.seen['mean'] changed during training but is in no checkpoint, so a"
    " resumed run loses the change. Keep it in the state_dict of an object that run.resume gets"
)


class Preconditioned(SGD):
    """Gradients divided by the mean inputs of a layer, which a hook on it sees."""

    def __init__(self, model: nn.Module, layer: nn.Linear) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.model = model
        self.layers = [layer]
        self.weights = list(model.parameters())
        self.count = 0
        self.seen: dict[str, Tensor] = {"mean": layer.weight.new_ones(4)}
        layer.register_forward_pre_hook(self.see)

    def see(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows, _ = ddp_train.all_gather(inputs[0].detach())
        self.seen["mean"] = 0.9 * self.seen["mean"] + 0.1 * rows.mean(0).square()

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for layer in self.layers:
            layer.weight.grad.div_(1 + self.seen["mean"])
        super().step(closure)


class Saved(Preconditioned):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mine": {"count": self.count, **self.seen}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mine = state_dict.pop("mine")
        self.count = mine.pop("count")
        self.seen = mine
        super().load_state_dict(state_dict)


def messages_of_watch() -> list[str]:
    """The list of what the watch will tell."""
    messages: list[str] = []
    checkpoint_watch.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
    return messages


def told(world: World, kind: type[Preconditioned]) -> list[str]:
    messages = messages_of_watch()
    with session_on(world) as run:
        layers = net()
        model = run.wrap(layers)
        optimizer = kind(model, layers[0])
        loader = run.loader(rows(), global_batch_size=6)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                run.mean((model(x).squeeze(1) - y).square()).backward()
                optimizer.step()
    return messages


@pytest.mark.parametrize(("kind", "messages"), [(Saved, []), (Preconditioned, [CHANGED])])
def test_an_optimizer_with_a_hook_is_told_by_what_it_saves(
    kind: type[Preconditioned], messages: list[str]
) -> None:
    leader, *_ = on_ranks(3, told, kind)
    assert leader == messages


class Late(nn.Module):
    """A model whose attributes are set at several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.is_frozen = False
        self.temperature = 0.0
        self.count = 0
        self.outputs: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.outputs = self.layers(inputs).squeeze(1)
        return self.outputs


def told_by_epochs(world: World, save_every: int) -> list[tuple[int, str]]:
    """What is told of a loop of four epochs, with the epochs that had begun by then."""
    messages = messages_of_watch()
    told: list[tuple[int, str]] = []
    with session_on(world) as run:
        late = Late()
        model = run.wrap(late)
        optimizer = SGD(model.parameters(), lr=0.1)
        loader = run.loader(rows(), global_batch_size=6)
        run.resume(model=model, optimizer=optimizer)
        for epoch in run.epochs(4, save_every=save_every):
            told += [(epoch, text) for text in messages]
            messages.clear()
            late.temperature = float(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                run.mean((model(x) - y).square()).backward()
                optimizer.step()
                late.count += epoch == 2
            if epoch > 0:
                late.is_frozen = True
    return told + [(4, text) for text in messages]


@pytest.mark.parametrize("save_every", [1, 4])
def test_an_attribute_that_changes_late_is_told_in_its_epoch(save_every: int) -> None:
    """Not one that the beginning of each epoch sets, and the outputs of a pass."""
    leader, *_ = on_ranks(3, told_by_epochs, save_every)
    assert [(epoch, text.partition(" changed")[0]) for epoch, text in leader] == [
        (2, "model.is_frozen"),
        (3, "model.count"),
    ]


def told_of_added(world: World) -> list[str]:
    """What is told of buffers that the loop adds where a task ends."""
    messages = messages_of_watch()
    with session_on(world) as run:
        model = run.wrap(net())
        model.register_buffer("scale", torch.ones(1))
        assert "scale" in model.state_dict()
        optimizer = SGD(model.parameters(), lr=0.1)
        loader = run.loader(rows(), global_batch_size=6)
        run.resume(model=model, optimizer=optimizer)
        for epoch in run.epochs(4):
            for x, y in loader:
                optimizer.zero_grad()
                run.mean((model(x).squeeze(1) - y).square()).backward()
                optimizer.step()
            if epoch > 0:
                model.register_buffer("anchor", model[0].weight.detach().clone())
    return messages


def test_a_buffer_that_the_loop_adds_is_told_once() -> None:
    leader, *_ = on_ranks(3, told_of_added)
    assert leader == [ADDED % "anchor"]
