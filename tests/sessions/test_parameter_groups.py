"""Groups of parameters that come in another order when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.sessions.parameter_groups import problem_of, reordered
from ddp_train.sessions.run import Run
from tests.sessions.test_gradients import net, rows
from tests.support.session_ranks import session_on

ALONE = World(0, 1, 0, 1)


def optimizer_of(model: Any, turned: bool, by_name: bool = False) -> torch.optim.Optimizer:
    """Weights decay, biases do not. turned: in the other order, as are the parameters."""
    named = list(model.named_parameters())
    if turned:
        named.reverse()
    groups = []
    for kind, decay in (("weight", 0.1), ("bias", 0.0)):
        chosen = [(name, part) for name, part in named if name.endswith(kind)]
        params: list[Any] = chosen if by_name else [part for _, part in chosen]
        groups.append({"params": params, "weight_decay": decay, "lr": 0.1 + decay})
    if turned:
        groups.reverse()
    return torch.optim.AdamW(groups)


def names_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(part)] for part in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("by_name", [False, True])
def test_moments_and_options_follow_their_names(by_name: bool) -> None:
    model = net()
    optimizer = optimizer_of(model, turned=False, by_name=by_name)
    model(rows().tensors[0]).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    turned = optimizer_of(model, turned=True, by_name=by_name)
    before, now = names_in(model, optimizer), names_in(model, turned)
    turned.load_state_dict(reordered(optimizer.state_dict(), before, now))
    for parameter in model.parameters():
        torch.testing.assert_close(turned.state[parameter], optimizer.state[parameter])
    assert [group["lr"] for group in turned.param_groups] == [0.1, 0.7]
    if by_name:
        assert [group["param_names"] for group in turned.param_groups] == now


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ([["b"], ["c", "a"]], ""),
        ([["a", "b", "c"]], "the parameters are divided into other groups"),
        ([["a", "d"], ["b"]], "it had c where it has d now"),
        ([["a", ""], ["b"]], "it had c where it has  now"),
    ],
)
def test_only_the_order_may_differ(now: list[list[str]], problem: str) -> None:
    assert problem_of([["a", "c"], ["b"]], now) == problem


def train(run: Run, epochs: int, turned: bool, scheduled: bool) -> nn.Module:
    model = run.wrap(net())
    optimizer = optimizer_of(model, turned)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if scheduled:
        objects["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = run.loader(rows(), global_batch_size=8)
    run.resume(**objects)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            optimizer.zero_grad()
            run.mean(losses).backward()
            optimizer.step()
    return model.module


def test_a_run_resumes_with_groups_in_another_order(tmp_path: Path) -> None:
    with session_on(ALONE) as run:
        expected = train(run, 2, turned=False, scheduled=False)
    for epochs, turned in ((1, False), (2, True)):
        with session_on(ALONE, str(tmp_path)) as run:
            found = train(run, epochs, turned, scheduled=False)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_rates_by_place_are_not_taken_for_other_groups(tmp_path: Path) -> None:
    with session_on(ALONE, str(tmp_path)) as run:
        train(run, 1, turned=False, scheduled=True)
    with (
        pytest.raises(
            DataError, match="in another order, and scheduler has a learning rate for each"
        ),
        session_on(ALONE, str(tmp_path)) as run,
    ):
        train(run, 2, turned=True, scheduled=True)
