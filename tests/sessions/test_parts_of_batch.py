"""Loops that go through a batch in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.world import World
from ddp_train.sessions.open_step import check_one_for_each_sample
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.watches import first_step
from ddp_train.sessions.watches.parts_of_batch import PARTS
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

INPUTS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double()
BATCH = 12
"""The second batch has 8 samples: of three processes two have 3 and one has 2."""


def losses_of(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square()[:, 0]


def one_by_one(run: Run, model: nn.Module, _: Optimizer, batch: Tensor) -> None:
    for part in batch.split(1):
        run.mean(losses_of(model, part), over=len(part)).backward()


def at_once(run: Run, model: nn.Module, _: Optimizer, batch: Tensor) -> None:
    run.mean(losses_of(model, batch)).backward()


def added_up(run: Run, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    for part in batch.tensor_split(4):
        losses = losses_of(model, part)
        run.mean(losses, over=len(part), accumulate=optimizer).backward()


def by_kind(run: Run, model: nn.Module, _: Optimizer, batch: Tensor) -> None:
    losses = losses_of(model, batch)
    is_even = torch.arange(len(batch)) % 2 == 0
    of_even = run.mean(losses[is_even], over=is_even)
    (of_even + run.mean(losses[~is_even], over=~is_even)).backward()


def divided(run: Run, model: nn.Module, _: Optimizer, batch: Tensor) -> None:
    for part in batch.split(2):
        loss = run.mean(losses_of(model, part), over=len(part))
        (loss / 2).backward()


def by_tokens(run: Run, model: nn.Module, _: Optimizer, batch: Tensor) -> None:
    for _ in range(2):
        losses = model(batch).expand(-1, 2).square()
        run.mean(losses, over=losses.numel()).backward()


Step = Callable[[Run, nn.Module, Optimizer, Tensor], None]


def trained(world: World, step: Step, samples: int = 20) -> tuple[list[str], Tensor]:
    """The warnings of a loop, and its weights."""
    messages: list[str] = []
    first_step.log.warning = messages.append  # type: ignore[method-assign]
    torch.manual_seed(0)
    with session_on(world) as run:
        model = run.wrap(nn.Linear(3, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = list(INPUTS[:samples])
        loader = run.loader(data, global_batch_size=BATCH, shuffle=False)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                step(run, model, optimizer, batch)
                optimizer.step()
        return messages, model.weight.detach().clone()


@pytest.mark.parametrize("ranks", [1, 3])
def test_means_over_parts_of_a_batch_are_warned_of(ranks: int) -> None:
    told = [messages for messages, _ in on_ranks(ranks, trained, one_by_one, 12)]
    expected = PARTS % (BATCH // ranks)
    assert told == [[expected], *[[]] * (ranks - 1)]


@pytest.mark.parametrize("step", [by_kind, divided, by_tokens])
def test_other_means_over_units_are_not_warned_of(step: Any) -> None:
    assert [messages for messages, _ in on_ranks(3, trained, step, 12)] == [[], [], []]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_parts_may_be_accumulated(ranks: int) -> None:
    ((_, expected),) = on_ranks(1, trained, at_once)
    for messages, weight in on_ranks(ranks, trained, added_up):
        assert messages == []
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=0)


def refused(losses: Tensor) -> str:
    """The remedy for losses of another number than the batch has samples."""
    share = MicroBatch(0, 0, np.arange(6), num_real=6, scale=1.0, is_last=True)
    with pytest.raises(UsageError) as raised:
        check_one_for_each_sample(losses, share)
    return raised.value.remedy


def test_losses_of_one_part_are_refused_with_a_way_out() -> None:
    remedy = refused(torch.ones(1))
    assert "run.mean(torch.cat(losses))" in remedy
    assert "over=losses.numel()" not in remedy
    assert "over=losses.numel() if all count" in refused(torch.ones(6, 9))
