"""Gradients that a loop has added up when a session saves, stops or ends."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ddp_train
from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.training_step import shared_out
from ddp_train.distributed.world import World
from ddp_train.sessions.gradients import GradientWatch, as_saved, exchanged, put_back
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.wrapped import Wrapped
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment
from tests.support.ranks import on_ranks

EPOCHS = 5
"""Of 4 batches: 20 steps, of which every third one updates the weights."""
SCRIPT = """
import sys
import ddp_train
from tests.sessions.test_gradients import train
with ddp_train.session(sys.argv[1], device="cpu") as run:
    train(run, int(sys.argv[2]))
"""


def rows() -> TensorDataset:
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(run: Any, epochs: int, zeroes_first: bool = False) -> nn.Module:
    """zeroes_first: gradients are dropped before a window begins, not when it ends."""
    model = run.wrap(net())
    optimizer = optimizer_of(model)
    loader = run.loader(rows(), global_batch_size=8)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for inputs, labels in loader:
            if zeroes_first and run.step % 3 == 0:
                optimizer.zero_grad()
            losses = functional.cross_entropy(model(inputs), labels, reduction="none")
            run.mean(losses / 3).backward()
            if (run.step + 1) % 3 == 0:
                optimizer.step()
                if not zeroes_first:
                    optimizer.zero_grad()
    return model.module


def trained_by_hand() -> dict[str, torch.Tensor]:
    model = net()
    optimizer = optimizer_of(model)
    inputs, labels = rows().tensors
    step = 0
    for epoch in range(EPOCHS):
        for share in torch.as_tensor(epoch_order(0, epoch, 32)).split(8):
            (functional.cross_entropy(model(inputs[share]), labels[share]) / 3).backward()
            step += 1
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return dict(model.state_dict())


def assert_same(model: nn.Module) -> None:
    torch.testing.assert_close(dict(model.state_dict()), trained_by_hand(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("zeroes_first", [False, True])
@pytest.mark.slow
def test_half_added_gradients_outlive_a_checkpoint(tmp_path: Path, zeroes_first: bool) -> None:
    for epochs in (1, 2, EPOCHS):
        with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
            model = train(run, epochs, zeroes_first)
    assert_same(model)


def alone(folder: Path, epochs: int) -> nn.Module:
    with ddp_train.session(folder, processes=1, device="cpu") as run:
        return train(run, epochs)


@pytest.mark.slow
def test_half_added_gradients_resume_on_other_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone(tmp_path / "run", 1)
    more = {"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": "3"}
    argv = [sys.executable, str(script), str(tmp_path / "run"), "2"]
    done = zygote.run(argv, LIMIT_SECONDS, cwd=tmp_path, env=environment(more), text=True)
    assert done.returncode == 0, done.stderr
    assert_same(alone(tmp_path / "run", EPOCHS))


@pytest.mark.slow
def test_a_break_between_two_updates_is_saved(tmp_path: Path) -> None:
    for leaves in (True, False):
        with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
            model = run.wrap(net())
            optimizer = optimizer_of(model)
            loader = run.loader(rows(), global_batch_size=8)
            first = run.resume(model=model, optimizer=optimizer)
            assert first == (0 if leaves else 2)
            for _ in run.epochs(EPOCHS):
                for inputs, labels in loader:
                    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
                    run.mean(losses / 3).backward()
                    if (run.step + 1) % 3 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    if leaves and run.step == 1:
                        break
                else:
                    continue
                break
    assert_same(model.module)


def test_a_resumed_epoch_has_the_batches_that_are_left(tmp_path: Path) -> None:
    """So that `if (i + 1) % 3 == 0 or i + 1 == len(loader)` is right there too."""
    lengths = []
    for leaves in (True, False):
        with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
            model = run.wrap(net())
            optimizer = optimizer_of(model)
            loader = run.loader(rows(), global_batch_size=8)
            run.resume(model=model, optimizer=optimizer)
            lengths.append(len(loader))
            for _ in run.epochs(2):
                lengths.append(len(loader))
                for inputs, labels in loader:
                    losses = functional.cross_entropy(model(inputs), labels, reduction="none")
                    run.mean(losses).backward()
                    optimizer.step()
                    if leaves and run.step == 2:
                        break
                if leaves:
                    break
    assert lengths == [4, 4, 4, 1, 4]


def backward(watch: GradientWatch, model: nn.Module) -> None:
    watch.see_loss()
    watch.see_backward()
    model(torch.ones(1, 2)).sum().backward()


def test_used_gradients_that_the_loop_drops_are_not_saved() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = GradientWatch()
    backward(watch, model)
    assert set(watch.wanted(model.named_parameters())) == {"weight", "bias"}, "half added"
    watch.see_step(optimizer)
    assert set(watch.wanted(model.named_parameters())) == {"weight", "bias"}, (
        "the loop may go on adding"
    )
    optimizer.zero_grad()
    backward(watch, model)
    watch.see_step(optimizer)
    assert not watch.wanted(model.named_parameters())
    backward(watch, model)
    watch.see_step(optimizer)
    assert set(watch.wanted(model.named_parameters())) == {"weight", "bias"}, "it did add"


def test_gradients_of_one_optimizer_alone_are_saved() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    often = torch.optim.SGD(model["one"].parameters(), lr=0.1)
    watch = GradientWatch()
    wanted: dict[str, torch.Tensor] = {}
    for _ in range(2):
        for part in model.values():
            backward(watch, part)
        watch.see_step(often)
        wanted = watch.wanted(model.named_parameters())
        often.zero_grad()
    assert set(wanted) == {"other.weight", "other.bias"}


def exchange_own_gradients(world: World) -> dict[str, Any]:
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("all", "some", "none")})
    for parameter in model["all"].parameters():
        parameter.grad = torch.full_like(parameter, world.rank)
    if world.rank == 2:
        weight = model.get_parameter("some.weight")
        weight.grad = torch.full_like(weight, 6.0)
    names = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = exchanged(model, names)
    live = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(gradients[name] is live[name] for name in live)
    return {name: gradient.item() for name, gradient in gradients.items()}


@pytest.mark.slow
def test_gradients_that_no_step_has_exchanged_become_their_mean() -> None:
    means = {"all.weight": 1.0, "all.bias": 1.0, "some.weight": 2.0}
    assert on_ranks(3, exchange_own_gradients) == [means] * 3


def test_a_parameter_without_a_gradient_stays_without() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    put_back(model, {"bias": torch.ones(2)})
    assert model.weight.grad is None
    assert model.bias.grad is not None


def test_sparse_gradients_are_in_a_checkpoint_that_is_checked_unread(tmp_path: Path) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1, 3, 1])).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    torch.save({"weight": as_saved(gradient)}, tmp_path / "saved.pt")
    torch.load(tmp_path / "saved.pt", weights_only=True, map_location="meta", mmap=True)
    model.weight.grad = None
    put_back(model, torch.load(tmp_path / "saved.pt", weights_only=True))
    assert model.weight.grad is not None and model.weight.grad.is_sparse
    assert torch.equal(model.weight.grad.to_dense(), gradient.to_dense())


def train_by_closure(run: Any, epochs: int) -> nn.Module:
    model = run.wrap(net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    loader = run.loader(rows(), global_batch_size=32, shuffle=False)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for batch in loader:

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
                loss = run.mean(losses)
                loss.backward()
                return loss

            optimizer.step(closure)
    return model.module


def test_a_closure_steps_by_the_mean_loss(tmp_path: Path) -> None:
    """LBFGS calls it several times in a step."""
    inputs, labels = rows().tensors
    by_hand = net()
    optimizer = torch.optim.LBFGS(by_hand.parameters(), max_iter=4)

    def closure_by_hand() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(by_hand(inputs), labels)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure_by_hand)
    for epochs in (1, 2):
        with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
            model = train_by_closure(run, epochs)
    torch.testing.assert_close(
        dict(model.state_dict()), dict(by_hand.state_dict()), rtol=0, atol=1e-9
    )


def test_a_loop_without_an_optimizer_saves_between_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ddp_train.session(run_dir, processes=1, device="cpu", keep=9) as run:
        model = run.wrap(net())
        loader = run.loader(rows(), global_batch_size=8)
        run.resume(model=model)
        for _ in run.epochs(1):
            for inputs, labels in loader:
                run.save()
                losses = functional.cross_entropy(model(inputs), labels, reduction="none")
                run.mean(losses).backward()
                with torch.no_grad():
                    for weight in model.parameters():
                        assert weight.grad is not None
                        weight -= 0.1 * weight.grad
                model.zero_grad()
    assert len([*(run_dir / "checkpoints").glob("step_*")]) == 4


def test_averages_of_weights_copy_the_model_alone() -> None:
    wrapped = Wrapped(net(), "cpu", 1, True, {})
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    average.update_parameters(wrapped)
    assert type(average.module) is nn.Sequential
    again = copy.deepcopy(wrapped)
    torch.testing.assert_close(dict(again.state_dict()), dict(wrapped.state_dict()))
    assert again[0].weight is not wrapped.module[0].weight  # type: ignore[index]


def copy_on_ranks(world: World) -> list[str]:
    wrapped = Wrapped(net(), "cpu", world.size, True, {})
    copied = copy.deepcopy(wrapped)
    pickled = pickle.loads(pickle.dumps(wrapped))
    wrapped.release()
    return [type(copied).__name__, type(pickled).__name__]


@pytest.mark.slow
def test_a_model_over_processes_can_be_copied() -> None:
    assert on_ranks(3, copy_on_ranks) == [["Sequential", "Sequential"]] * 3


def update_statistics(world: World) -> str:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = torch.optim.swa_utils.AveragedModel(plain)
    wrapped = Wrapped(plain, "cpu", world.size, True, {})
    after = torch.optim.swa_utils.AveragedModel(wrapped)
    batches = [torch.ones(3, 2)] * (1 + world.rank)
    with shared_out():
        torch.optim.swa_utils.update_bn(batches, before)
        with pytest.raises(UsageError) as refused:
            torch.optim.swa_utils.update_bn(batches, after)
    wrapped.release()
    return str(refused.value)


@pytest.mark.slow
def test_statistics_of_test_batches_are_refused() -> None:
    for message in on_ranks(2, update_statistics):
        assert "batch norm in train mode got a batch of run.test_loader" in message


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.seen = 0
        self.cache: torch.Tensor | None = None
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.cache = torch.ones(2)
        self.unsaved += 1
        return self.layer(inputs)


def test_state_that_no_checkpoint_has_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ddp_train.session(tmp_path, processes=1, device="cpu") as run:
        model = run.wrap(Stateful())
        optimizer = optimizer_of(model)
        loader = run.loader(rows(), global_batch_size=8)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for inputs, labels in loader:
                losses = functional.cross_entropy(model(inputs), labels, reduction="none")
                run.mean(losses).backward()
                optimizer.step()
    error = capfd.readouterr().err
    assert error.count("model.seen, model.unsaved changed during training but is in no check") == 1
