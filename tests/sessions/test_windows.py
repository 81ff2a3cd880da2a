"""Gradients that add up over batches with different numbers of tokens, against plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import UsageError
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

TEXTS = 33
"""In batches of 8: the fifth of an epoch has one, and most processes have none."""
BATCH = 8
WINDOW = 3
"""Batches of an update; windows go over the end of an epoch."""
EPOCHS = 3
WORDS = 11
NAN_STEP = 7
"""A step whose loss is not finite on one process: the GradScalers of all leave out the update of
its window."""


def texts() -> TensorDataset:
    """Words [n, 9], of which the first 1 to 9 count: the more the later in the data."""
    drawn = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (TEXTS, 9), generator=drawn)
    lengths = 1 + torch.arange(TEXTS) * 9 // TEXTS
    return TensorDataset(words, torch.arange(9) < lengths[:, None])


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS)
    ).double()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.5)


def losses_of(model: nn.Module, words: Tensor, mask: Tensor) -> Tensor:
    """The losses of all words that count; the next word is to be told."""
    logits = model(words)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), words.roll(-1, 1).flatten(), reduction="none"
    )
    return losses.view(words.shape) * mask


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def train(run: Run, epochs: int, scaled: bool, by_samples: bool) -> dict[str, Tensor]:
    model = run.wrap(new_model())
    optimizer = new_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    loader = run.loader(texts(), global_batch_size=BATCH)
    run.resume(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.epochs(epochs, save_every=EPOCHS):
        for words, mask in loader:
            losses = losses_of(model, words, mask)
            if scaled and run.step == NAN_STEP and run.rank == run.processes - 1:
                losses = losses * math.inf
            if by_samples:
                loss = run.mean(losses.sum(1), accumulate=optimizer)
            else:
                loss = run.mean(losses, over=mask, accumulate=optimizer)
            scaler.scale(loss).backward()
            if (run.step + 1) % WINDOW == 0:
                scaler.unscale_(optimizer)
                clip(model)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=not scaled)
    return dict(model.state_dict())


def by_hand(scaled: bool, by_samples: bool) -> dict[str, Tensor]:
    model = new_model()
    optimizer = new_optimizer(model)
    words, mask = texts().tensors
    step = 0
    total = torch.zeros((), dtype=torch.float64)
    units = 0
    is_finite = True
    for epoch in range(EPOCHS):
        for share in torch.as_tensor(epoch_order(0, epoch, TEXTS)).split(BATCH):
            total = total + losses_of(model, words[share], mask[share]).sum()
            units += len(share) if by_samples else int(mask[share].sum())
            is_finite = is_finite and not (scaled and step == NAN_STEP)
            step += 1
            if step % WINDOW == 0:
                (total / units).backward()
                clip(model)
                if is_finite:
                    optimizer.step()
                optimizer.zero_grad()
                total, units, is_finite = torch.zeros((), dtype=torch.float64), 0, True
    return dict(model.state_dict())


def train_on(world: World, scaled: bool, by_samples: bool) -> dict[str, Tensor]:
    with session_on(world) as run:
        return train(run, EPOCHS, scaled, by_samples)


@pytest.mark.parametrize(
    "processes",
    [
        1,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
@pytest.mark.parametrize(("scaled", "by_samples"), [(False, False), (True, False), (False, True)])
def test_a_window_has_the_gradient_of_one_mean(
    processes: int, scaled: bool, by_samples: bool
) -> None:
    expected = by_hand(scaled, by_samples)
    for found in on_ranks(processes, train_on, scaled, by_samples):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def resume_on(world: World, folder: str) -> dict[str, Tensor]:
    for epochs in range(1, EPOCHS):  # 5 batches in each: windows are open
        with session_on(world, folder) as run:
            train(run, epochs, False, False)
    with session_on(world, folder) as run:
        return train(run, EPOCHS, False, False)


@pytest.mark.slow
def test_a_window_outlives_a_checkpoint(tmp_path: Path) -> None:
    expected = by_hand(False, False)
    for found in on_ranks(3, resume_on, str(tmp_path)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def steps_of(run: Run, *, named: bool = True) -> Any:
    model = run.wrap(new_model())
    optimizer = new_optimizer(model)
    loader = run.loader(texts(), global_batch_size=BATCH)
    run.resume(model=model, **({"optimizer": optimizer} if named else {}))
    for _ in run.epochs(1):
        for words, mask in loader:
            yield optimizer, losses_of(model, words, mask), mask


def test_two_losses_of_one_window_are_refused() -> None:
    with session_on(World(0, 1, 0, 1)) as run:
        steps = steps_of(run)
        optimizer, losses, mask = next(steps)
        one = run.mean(losses, over=mask, accumulate=optimizer)
        other = run.mean(losses.square(), over=2, accumulate=optimizer)
        with pytest.raises(UsageError, match="takes one loss in a step"):
            (one + other).backward()


def test_an_optimizer_that_is_not_resumed_has_no_window() -> None:
    with session_on(World(0, 1, 0, 1)) as run:
        steps = steps_of(run, named=False)
        optimizer, losses, mask = next(steps)
        with pytest.raises(UsageError, match="did not get"):
            run.mean(losses, over=mask, accumulate=optimizer)


def test_a_mean_that_goes_nowhere_is_no_part_of_a_window() -> None:
    with session_on(World(0, 1, 0, 1)) as run:
        steps = steps_of(run)
        optimizer, losses, mask = next(steps)
        with torch.no_grad():
            run.mean(losses, over=mask, accumulate=optimizer)
        run.mean(losses, over=mask, accumulate=optimizer)
        loss = run.mean(losses, over=mask, accumulate=optimizer)
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses.sum() / mask.sum())
