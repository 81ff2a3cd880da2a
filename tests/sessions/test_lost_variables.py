"""Variables that losses depend on and no checkpoint holds, and epochs that are computed as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.sessions import training_loader
from ddp_train.sessions.carried_names import LoopCode
from ddp_train.sessions.lost_variables import LOST
from ddp_train.sessions.run import Run
from tests.sessions.loops import net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on

BODY = """
hidden = None
rate = 0.1 * epoch
target = model(inputs) + 1
for x, y in loader:
    hidden = cell(x, hidden)
    losses = rate * (hidden - target[y]).square()
    run.mean(losses).backward()
    total += losses.sum().item()
"""


def test_names_that_losses_use_are_found() -> None:
    code = "for epoch in run.epochs(3):\n" + indent(dedent(BODY), "    ")
    around = LoopCode(code, 1 + code.splitlines().index("    for x, y in loader:"), {"run"})
    loop = around.loop_names()
    assert loop is not None
    assert loop.carried == {"hidden"}
    assert around.epoch_names(around.head).made_from("model".__eq__) == {"target"}
    assert {"cell", "rate", "target"} <= loop.used


class Pool:
    """Earlier rows, of which each step uses some."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def mixed(self, inputs: Tensor) -> Tensor:
        self.rows.append(inputs[:1].detach())
        return inputs + torch.cat(self.rows).mean(0)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def begun(run: Run, **saved: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer and a loader of four batches an epoch. saved: for run.resume."""
    model = run.wrap(net())
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer, **saved)
    return model, optimizer, loader


def with_hidden(run: Run, whole: bool) -> nn.Module:
    torch.manual_seed(0)
    cell = run.wrap(nn.GRUCell(4, 3).double())
    optimizer = sgd(cell)
    loader = run.loader(rows(), global_batch_size=5, shuffle=False)
    run.resume(cell=cell, optimizer=optimizer)
    for _ in run.epochs(3, whole=whole):
        hidden = torch.zeros(1, 3).double()
        for x, y in loader:
            optimizer.zero_grad()
            hidden = cell(x, hidden.mean(0).expand(len(x), 3))
            run.mean((hidden.mean(1) - y).square()).backward()
            optimizer.step()
            hidden, _ = ddp_train.all_gather(hidden.detach())
    return cell


def with_targets(run: Run, whole: bool) -> nn.Module:
    model = run.wrap(net())
    optimizer = sgd(model)
    data = rows()
    loader = run.loader(range(len(data)), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer)
    inputs = data.tensors[0]
    for _ in run.epochs(3, whole=whole):
        with torch.no_grad():
            target = model(inputs) + inputs[:, :1]
        for i in loader:
            optimizer.zero_grad()
            run.mean((model(inputs[i]) - target[i]).square().squeeze(1)).backward()
            optimizer.step()
    return model


def with_teacher(run: Run, whole: bool) -> nn.Module:
    model, optimizer, loader = begun(run)
    for _ in run.epochs(3, whole=whole):
        teacher = copy.deepcopy(model)
        for x, y in loader:
            optimizer.zero_grad()
            aims = teacher(x).detach().squeeze(1) + y
            run.mean((model(x).squeeze(1) - aims).square()).backward()
            optimizer.step()
    return model


def with_pool(run: Run, whole: bool, saves_it: bool = False) -> nn.Module:
    pool = Pool()
    saved = {"pool": pool} if saves_it else {}
    model, optimizer, loader = begun(run, **saved)
    for _ in run.epochs(1, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            run.mean((model(pool.mixed(x)).squeeze(1) - y).square()).backward()
            optimizer.step()
    return model


def with_passes(run: Run, whole: bool) -> nn.Module:
    model, optimizer, loader = begun(run)
    for _ in run.epochs(2, whole=whole):
        for number in range(2):
            assert number < 2
            for x, y in loader:
                optimizer.zero_grad()
                run.mean((model(x).squeeze(1) - y).square()).backward()
                optimizer.step()
    return model


def with_alias(run: Run, whole: bool) -> nn.Module:
    """A buffer that run.resume got, under a name of its own."""
    kept = nn.Module()
    kept.register_buffer("noise", torch.zeros(4).double())
    model, optimizer, loader = begun(run, kept=kept)
    noise = kept.noise
    for _ in run.epochs(2, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            run.mean((model(x + noise).squeeze(1) - y).square()).backward()
            optimizer.step()
            noise.add_(0.1)
    return model


def with_nothing(run: Run, whole: bool) -> nn.Module:
    """What is for a log, counts by the epoch, and what run.resume got."""
    model, optimizer, loader = begun(run)
    total = 0.0
    for epoch in run.epochs(2, whole=whole):
        weight = 1 / (1 + epoch)
        parameters = list(model.parameters())
        for x, y in loader:
            optimizer.zero_grad()
            losses = weight * (model(x).squeeze(1) - y).square()
            run.mean(losses + 0 * parameters[0].square().sum()).backward()
            optimizer.step()
            total += losses.sum().item()
    return model


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (with_hidden, "hidden"),
        (with_targets, "target"),
        (with_teacher, "teacher"),
        (with_pool, "pool.rows"),
        (with_passes, "number"),
        (with_alias, ""),
        (with_nothing, ""),
    ],
)
def test_what_no_checkpoint_holds_is_told(
    loop: Callable[[Run, bool], nn.Module], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    for whole in (False, True):
        caplog.clear()
        with session_on(World()) as run:
            loop(run, whole)
        told = [record.getMessage() for record in caplog.records if record.msg == LOST]
        expected = [LOST % names] if names and not whole else []
        assert told == expected


def test_a_pool_that_is_saved_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with session_on(World()) as run:
        with_pool(run, whole=False, saves_it=True)
    assert LOST not in [record.msg for record in caplog.records]


def resumed(world: World, folder: Path) -> dict[str, tuple[Any, Any]]:
    """The weights of undisturbed loops, and of those that were interrupted inside of an epoch."""
    found = {}
    for loop in (with_hidden, with_targets, with_passes):
        with session_on(world) as run:
            calm = weights_of(model=loop(run, True))
        place = str(folder / loop.__name__)
        with session_on(world, place) as run:
            end_step = run._steps.end_step

            def end_and_leave(*arguments: Any, run: Run = run, end_step: Any = end_step) -> None:
                if run.step == 4:
                    run.save()
                end_step(*arguments)
                if run.step == 6:
                    raise Interrupted

            run._steps.end_step = end_and_leave  # type: ignore[method-assign]
            loop(run, True)
        with session_on(world, place) as run:
            again = weights_of(model=loop(run, True))
        found[loop.__name__] = calm, again
    return found


@pytest.mark.parametrize("processes", [1, 3])
def test_whole_epochs_resume_at_their_beginning(processes: int, tmp_path: Path) -> None:
    """Also where run.save was called in the middle of one."""
    for found in on_ranks(processes, resumed, tmp_path):
        for calm, again in found.values():
            torch.testing.assert_close(again, calm, rtol=0, atol=0)


def test_a_stop_says_which_epoch_is_begun_again(tmp_path: Path) -> None:
    """With save_every=2 that of the last checkpoint, and not the one that was stopped."""
    for stopped_at, resumes_at in ((1, 0), (3, 2)):
        with session_on(World(), str(tmp_path / str(stopped_at))) as run:
            _, _, loader = begun(run)
            steps = run._steps
            for epoch in run.epochs(4, whole=True, save_every=2):
                for _ in loader:
                    if epoch == stopped_at:
                        raise Interrupted
        assert steps.saved_epoch == resumes_at


def batches_of_three_epochs(folder: Path, save_every: int, leave_at: int | None) -> list[Any]:
    """The batches of whole epochs, up to a step after which both loops are left."""
    seen: list[Any] = []
    with session_on(World(), str(folder)) as run:
        model, optimizer, loader = begun(run)
        for epoch in run.epochs(3, whole=True, save_every=save_every):
            for x, y in loader:
                optimizer.zero_grad()
                run.mean((model(x).squeeze(1) - y).square()).backward()
                optimizer.step()
                seen.append([epoch, y.tolist()])
                if run.step + 1 == leave_at and leave_at % 4:
                    break
            if run.step == leave_at:
                break
    return [seen, weights_of(model=model)]


@pytest.mark.parametrize(
    ("save_every", "leave_at", "resumes_at", "is_noted"),
    [(1, 6, 4, True), (1, 2, 0, True), (2, 6, 0, True), (1, 8, 8, False)],
)
def test_a_break_out_of_whole_epochs_resumes_at_the_beginning_of_one(
    save_every: int,
    leave_at: int,
    resumes_at: int,
    is_noted: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    calm, expected = batches_of_three_epochs(tmp_path / "calm", save_every, None)
    assert len(calm) == 12
    capfd.readouterr()
    first, _ = batches_of_three_epochs(tmp_path / "left", save_every, leave_at)
    note = f"left inside of epoch {leave_at // 4} after"
    assert first == calm[:leave_at] and (note in capfd.readouterr().err) is is_noted
    again, weights = batches_of_three_epochs(tmp_path / "left", save_every, None)
    assert again == calm[resumes_at:]
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_the_length_of_a_resumed_epoch_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = []
    for _ in range(2):
        with session_on(World(), str(tmp_path)) as run:
            model = run.wrap(net())
            loader = run.loader(rows(), global_batch_size=6)
            run.resume(model=model)
            for _ in run.epochs(1):
                lengths.append(len(loader))
                for x, y in loader:
                    run.mean((model(x).squeeze(1) - y).square()).backward()
                    if run.step == 1:
                        run.save()
                    if run.step == 2:
                        raise Interrupted
    assert lengths == [4, 2]
    told = [record.getMessage() for record in caplog.records]
    assert told.count(training_loader.LENGTH_LEFT % (2, 4)) == 1
