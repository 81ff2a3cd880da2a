"""What models and optimizers change and no checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.sessions import checkpoint_watch
from tests.sessions.loops import net, rows
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

CHANGED = (
    "optimizer.count, optimizer.seen['mean'] changed during training but is in no checkpoint, so a"
    " resumed run starts it again; keep it in an object that run.resume gets, in what its"
    " state_dict returns"
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


def told(world: World, kind: type[Preconditioned]) -> list[str]:
    messages: list[str] = []
    checkpoint_watch.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
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
