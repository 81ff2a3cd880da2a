"""Copies of a model that move along, and the statistics of batch norm that are taken anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, update_bn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ddp_train.distributed.world import World
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import UsageError
from tests.sessions import loops, moving_copies
from tests.sessions.loops import BATCH, Weights, rows, sgd
from tests.sessions.moving_copies import LOOPS, PlainRun, net
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

STEPS_BEFORE = 6
"""Two of the second epoch's four."""


def trained(world: World, names: tuple[str, ...]) -> dict[str, Weights]:
    found = {}
    for name in names:
        with session_on(world) as run:
            found[name] = moving_copies.LOOPS[name](run)
    return found


def resumed(world: World, folder: Path) -> dict[str, Weights]:
    """What the loops end with after an interruption in the middle of an epoch."""
    found = {}
    for name, loop in LOOPS.items():
        with session_on(world, str(folder / name)) as run:
            interrupt(run)
            loop(run)
        with session_on(world, str(folder / name)) as run:
            found[name] = loop(run)
    return found


def interrupt(run: Run) -> None:
    """End the loop after STEPS_BEFORE steps, which are saved."""
    end_step = run._steps.end_step

    def end_and_leave(*arguments: object, **keywords: object) -> None:
        end_step(*arguments, **keywords)  # type: ignore[arg-type]
        if run.step == STEPS_BEFORE:
            run._steps.saving.save()
            raise Interrupted

    run._steps.end_step = end_and_leave  # type: ignore[method-assign]


def whole_and_resumed(world: World, folder: Path) -> tuple[dict[str, Weights], dict[str, Weights]]:
    return trained(world, tuple(LOOPS)), resumed(world, folder)


def assert_as_by_hand(found: dict[str, Weights]) -> None:
    for name, weights in found.items():
        by_hand = moving_copies.LOOPS[name](PlainRun())
        torch.testing.assert_close(weights, by_hand, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_copies_are_exact_on_one_process() -> None:
    assert_as_by_hand(trained(World(), tuple(LOOPS)))


@pytest.mark.slow
def test_copies_are_exact_on_three_processes(tmp_path: Path) -> None:
    for whole, again in on_ranks(3, whole_and_resumed, tmp_path):
        assert_as_by_hand(whole)
        torch.testing.assert_close(again, whole, rtol=0, atol=0)


@pytest.mark.nightly
def test_copies_are_exact_on_four_processes() -> None:
    for found in on_ranks(4, trained, tuple(LOOPS)):
        assert_as_by_hand(found)


def compiled(world: World) -> Weights:
    with session_on(world) as run:
        return moving_copies.compiled(run)


@pytest.mark.nightly
def test_copies_of_compiled_models_are_exact() -> None:
    by_hand = moving_copies.averaged(PlainRun())
    for found in on_ranks(3, compiled, timeout_seconds=300):
        # A copy of a compiled model may be one itself, whose names say so.
        weights = {name.replace("._orig_mod", ""): value for name, value in found.items()}
        torch.testing.assert_close(weights, by_hand, rtol=0, atol=1e-12)


def drawn() -> DataLoader:
    """Its sampler's generator moves on with each pass."""
    data = rows()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, BATCH, sampler=sampler)


def with_a_sampler(run: Run, folder_is_old: bool = False) -> torch.Tensor:
    """Train, or resume what is trained, with statistics after each epoch and after the last."""
    model = run.wrap(net())
    average = AveragedModel(model)
    optimizer = sgd(model)
    loader = run.loader(drawn())
    run.resume(model=model, optimizer=optimizer, average=average)
    for _ in run.epochs(2):
        assert not folder_is_old
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.mean((model(inputs).squeeze(1) - labels).square()).backward()
            optimizer.step()
        average.update_parameters(model)
        run.update_bn(loader, average)
    run.update_bn(loader, average)
    return average.module[1].running_var


def test_a_sampler_draws_for_the_statistics_too(tmp_path: Path) -> None:
    model = net()
    average = AveragedModel(model)
    optimizer = sgd(model)
    loader = drawn()
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - labels).square().mean().backward()
            optimizer.step()
        average.update_parameters(model)
        update_bn(loader, average)
    update_bn(loader, average)
    with session_on(World(), str(tmp_path)) as run:
        found = with_a_sampler(run)
    with session_on(World(), str(tmp_path)) as run:
        again = with_a_sampler(run, folder_is_old=True)
    torch.testing.assert_close(found, average.module[1].running_var, rtol=0, atol=1e-12)
    torch.testing.assert_close(again, found, rtol=0, atol=0)


def inside_of_its_loop(run: Run) -> None:
    model = run.wrap(net())
    loader = run.loader(rows(), global_batch_size=BATCH)
    run.resume(model=model)
    for _ in run.epochs(1):
        for _ in loader:
            run.update_bn(loader, model)


def over_test_batches(run: Run) -> None:
    loader: Any = run.test_loader(rows(), batch_size=9)
    run.update_bn(loader, run.wrap(net()))


def by_torch(run: Run) -> None:
    update_bn(run.loader(rows(), global_batch_size=BATCH), run.wrap(net()))


MISTAKES = [
    (inside_of_its_loop, "run.update_bn was called inside of the loop over its loader"),
    (over_test_batches, "among the processes; a TestLoader does not"),
    (by_torch, "update_bn got a run.loader, whose batches are steps of training"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_what_would_be_no_statistics_is_refused(
    mistake: Callable[[Run], None], message: str
) -> None:
    with pytest.raises(UsageError) as refused, session_on(World()) as run:
        mistake(run)
    assert message in str(refused.value)


def refusals(world: World) -> list[str]:
    """What torch's update_bn gets of batches that processes do not share."""
    found = []
    with session_on(world) as run:
        plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        early = AveragedModel(plain)
        average = AveragedModel(run.wrap(plain))
        data = TensorDataset(torch.ones(9, 2))
        for loader, model in [
            (run.test_loader(data, batch_size=2), early),
            (DataLoader(data, 2), average),
        ]:
            with pytest.raises(UsageError) as refused:
                update_bn(loader, model)
            found.append(str(refused.value))
    return found


@pytest.mark.slow
def test_each_process_would_have_other_statistics() -> None:
    for of_test_batches, of_all in on_ranks(3, refusals):
        assert "whose batches differ between processes" in of_test_batches
        assert "batch norm is computed over all processes" in of_all


def test_a_loader_of_its_own_serves_within_a_step() -> None:
    """Modes, momenta and draws are as before."""
    with session_on(World()) as run:
        model = run.wrap(net())
        further = run.loader(rows(), global_batch_size=BATCH)
        average = AveragedModel(model)
        average.module[1].momentum = 0.3
        average.eval()

        loader = run.loader(rows(), global_batch_size=BATCH)
        run.resume(model=model)
        for _ in run.epochs(1):
            for _ in loader:
                before = torch.get_rng_state()
                run.update_bn(further, average)
                assert torch.equal(torch.get_rng_state(), before)
        assert run.step == 4
        assert average.module[1].momentum == 0.3
        assert not any(module.training for module in average.modules())


def with_statistics_of_its_own(
    world: World, folder: Path, is_interrupted: bool
) -> tuple[Weights, Weights]:
    """An average whose statistics are of this process's samples: at the end, and as it is scored."""
    scored: Weights = {}
    for attempt in range(1 + is_interrupted):
        with session_on(world, str(folder)) as run:
            model = run.wrap(net(), sync_batch_norm=False)
            average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
            optimizer = sgd(model)
            data = TensorDataset(*rows()[:18])
            loader = run.loader(data, global_batch_size=6)
            test_loader = run.test_loader(data, batch_size=6)
            run.resume(model=model, optimizer=optimizer, average=average)
            if is_interrupted and not attempt:
                interrupt(run)
            for _ in run.epochs(3):
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    run.mean((model(inputs).squeeze(1) - labels).square()).backward()
                    optimizer.step()
                    average.update_parameters(model)
                for _ in test_loader:
                    scored = loops.weights_of(average=average)
    return loops.weights_of(average=average), scored


def statistics_and_resumed(world: World, folder: Path) -> list[tuple[Weights, Weights]]:
    whole = with_statistics_of_its_own(world, folder / "whole", False)
    return [whole, with_statistics_of_its_own(world, folder / "again", True)]


@pytest.mark.slow
def test_statistics_of_each_process_are_its_own_in_an_average(tmp_path: Path) -> None:
    found = on_ranks(3, statistics_and_resumed, tmp_path)
    name = "average.module.1.running_mean"
    assert not torch.equal(found[0][0][0][name], found[1][0][0][name])
    for whole, again in found:
        torch.testing.assert_close(again, whole, rtol=0, atol=0)
        torch.testing.assert_close(whole[1], found[0][0][1], rtol=0, atol=0)


def freeze(layer: nn.Module) -> None:
    if isinstance(layer, nn.BatchNorm1d):
        layer.eval()


def decay_momentum(layer: nn.Module) -> None:
    if isinstance(layer, nn.BatchNorm1d):
        layer.momentum = 0.02


def found_by_class(world: World, change: Callable[[nn.Module], None]) -> Weights:
    """What a model ends with whose batch norms are changed after run.wrap, found by their class."""
    with session_on(world) as run:
        torch.manual_seed(0)
        model = run.wrap(
            nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
        )
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=BATCH)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            model.train()
            model.apply(change)
            for inputs, labels in loader:
                optimizer.zero_grad()
                run.mean((model(inputs)[:, 0] - labels).square()).backward()
                optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("change", [freeze, decay_momentum])
def test_layers_are_found_by_their_class(change: Callable[[nn.Module], None]) -> None:
    (expected,) = on_ranks(1, found_by_class, change)
    for state in on_ranks(3, found_by_class, change):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
