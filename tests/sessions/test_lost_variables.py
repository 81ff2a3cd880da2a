"""Variables that losses depend on and no checkpoint holds, and epochs that are computed as a whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.sessions import training_loader
from ddp_train.sessions.run import Run
from ddp_train.sessions.watches.carried_names import LoopCode
from ddp_train.sessions.watches.lost_variables import LOST, LOST_OVER_EPOCHS, MADE_AGAIN
from tests.sessions.loops import net, rows, sgd, weights_of
from tests.support.ranks import on_ranks
from tests.support.session_ranks import Interrupted, session_on, told_by

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


def with_own_gradients(run: Run, whole: bool) -> nn.Module:
    """Of which a loss of the first step is a part (as of GradNorm)."""
    model, optimizer, loader = begun(run)
    first = None
    for _ in run.epochs(2, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.mean((model(x).squeeze(1) - y).square())
            now = run.sum(loss.item()) / run.processes
            if first is None:
                first = now
            loss.backward()
            bias = model[2].bias
            aim = torch.tensor(now / first)
            bias.grad = torch.autograd.grad((bias - aim).square().sum(), bias)[0]
            optimizer.step()
    return model


def without_mean(run: Run, whole: bool) -> nn.Module:
    """Gradients of sums, by a factor that goes on from step to step."""
    model, optimizer, loader = begun(run)
    factor = 1.0
    for _ in run.epochs(2, whole=whole):
        for x, y in loader:
            losses = (model(x).squeeze(1) - y).square()
            weights = list(model.parameters())
            own = torch.autograd.grad(losses.sum(), weights)
            for weight, gradient in zip(weights, own, strict=True):
                weight.grad = factor * run.sum(gradient) / run.sum(len(x))
            optimizer.step()
            factor = 0.9 * factor
    return model


def with_own_counts(run: Run, whole: bool) -> nn.Module:
    """A count that is set anew in each step, and the index of a loop in it."""
    model, optimizer, loader = begun(run)
    for _ in run.epochs(2, whole=whole):
        for it, (x, y) in enumerate(loader):
            it = run.step
            optimizer.zero_grad()
            losses = (model(x).squeeze(1) - y).square()
            parts = [run.mean(losses * (1 + i)) for i in range(2)]
            for i in range(2):
                (parts[i] / (1 + it)).backward(retain_graph=True)
            optimizer.step()
    return model


def with_shown(run: Run, whole: bool) -> nn.Module:
    """A loss of some steps that others show."""
    model, optimizer, loader = begun(run)
    penalty = torch.zeros(1)
    for _ in run.epochs(2, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            if run.step % 2 == 0:
                penalty = run.mean(model(x).square().squeeze(1))
                penalty.backward()
            optimizer.step()
            print(f"{run.step}: {penalty.item()}")
    return model


class Detector:
    """A loop in a class, whose radius goes on from step to step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.radius = torch.zeros(1).double()
        self.total = 0.0

    def train(self, epochs: int, whole: bool) -> None:
        model, optimizer, loader = begun(self.run)
        for epoch in self.run.epochs(epochs, whole=whole):
            losses = torch.zeros(1)
            for x, y in loader:
                optimizer.zero_grad()
                losses = (model(x).squeeze(1) - y).square() - self.radius.square()
                self.run.mean(losses).backward()
                optimizer.step()
                self.total += losses.sum().item()
                if epoch > 0 and len(x):
                    self.radius.data[:] = losses.detach().median()
            print(epoch, losses.sum().item(), self.total)


def with_radius(run: Run, whole: bool, epochs: int = 3) -> None:
    Detector(run).train(epochs, whole)


def one_epoch(run: Run, model: Any, optimizer: Any, loader: Any, weight: float) -> float:
    """Train with a weight. Returns that of the next epoch."""
    loss = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = run.mean(weight * (model(x).squeeze(1) - y).square())
        loss.backward()
        optimizer.step()
    return 1 / (1 + run.sum(loss.item()) / run.processes)


def with_weight(run: Run, whole: bool, epochs: int = 3) -> None:
    """A weight of the loss that comes from the epoch before."""
    model, optimizer, loader = begun(run)
    weight = 1.0
    for _ in run.epochs(epochs, whole=whole):
        weight = one_epoch(run, model, optimizer, loader, weight)


def with_best(run: Run, whole: bool, epochs: int = 3) -> None:
    """A best score that acts on the loss, and one that is printed."""
    model, optimizer, loader = begun(run)
    best = printed = 1e9
    factor = 1.0
    for _ in run.epochs(epochs, whole=whole):
        score = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            losses = factor * (model(x).squeeze(1) - y).square()
            run.mean(losses).backward()
            optimizer.step()
            score += losses.sum().item()
        score = run.sum(score)
        if score < best:
            best = score
        else:
            factor = 0.5 * factor
        printed = min(printed, score)
        print(printed)


def with_old_targets(run: Run, whole: bool, epochs: int = 5) -> None:
    """Targets that every second epoch makes anew, and others that each does."""
    model, optimizer, _ = begun(run)
    inputs, y = rows().tensors
    loader = run.loader(range(len(y)), global_batch_size=6)
    old = y
    for epoch in run.epochs(epochs, whole=whole):
        if epoch % 2 == 0:
            old = model(inputs).detach().squeeze(1)
        if epoch % 2 == 0:
            new = y
        else:
            new = -y
        for number, i in enumerate(loader):
            if number == 0:
                first = 0.5 * new
            optimizer.zero_grad()
            losses = (model(inputs[i]).squeeze(1) - old[i] - new[i] - first[i]).square()
            run.mean(losses).backward()
            optimizer.step()


def with_memory(run: Run, whole: bool, epochs: int = 3) -> None:
    pool = Pool()
    model, optimizer, loader = begun(run)
    for _ in run.epochs(epochs, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            run.mean((model(pool.mixed(x)).squeeze(1) - y).square()).backward()
            optimizer.step()


class Anchor:
    """A penalty on the distance from weights that the model had (as of EWC)."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: w.detach().clone() for name, w in model.named_parameters()}

    def penalty(self, model: nn.Module) -> Tensor:
        distances = [
            (w - self.weights[name]).square().sum() for name, w in model.named_parameters()
        ]
        return torch.stack(distances).sum()


def with_anchor(run: Run, whole: bool, epochs: int = 5) -> None:
    """Made anew where a task ends."""
    model, optimizer, loader = begun(run)
    anchor = None
    for epoch in run.epochs(epochs, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.mean((model(x).squeeze(1) - y).square())
            if anchor is not None:
                loss = loss + anchor.penalty(model)
            loss.backward()
            optimizer.step()
        if epoch % 2 == 1:
            anchor = Anchor(model)


def with_attribute(run: Run, whole: bool, epochs: int = 5) -> None:
    """Set on the wrapped model."""
    model, optimizer, loader = begun(run)
    model.anchor = None
    for epoch in run.epochs(epochs, whole=whole):
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.mean((model(x).squeeze(1) - y).square())
            if model.anchor is not None:
                loss = loss + (model[0].weight - model.anchor["weight"]).square().sum()
            loss.backward()
            optimizer.step()
        if epoch % 2 == 1:
            model.anchor = {"weight": model[0].weight.detach().clone()}


def with_best_weights(run: Run, whole: bool, epochs: int = 5) -> None:
    """Those of the epoch with the best score, which are loaded at the end."""
    model, optimizer, loader = begun(run)
    scored = run.test_loader(rows(), batch_size=5)
    best = saved = 1e9
    best_weights = copy.deepcopy(model.state_dict())
    for _ in run.epochs(epochs, whole=whole):
        total = 0.0
        for phase in ["train", "validate"]:
            for x, y in loader if phase == "train" else scored:
                losses = (model(x).squeeze(1) - y).square()
                if phase == "train":
                    optimizer.zero_grad()
                    run.mean(losses).backward()
                    optimizer.step()
                else:
                    total += losses.sum().item()
        total = run.sum(total)
        if total < best:
            best = total
            best_weights = copy.deepcopy(model.state_dict())
        if total < saved and run.rank == 0:
            saved = total
            torch.save(model.state_dict(), io.BytesIO())
    model.load_state_dict(best_weights)


OVER_EPOCHS = [
    (with_radius, "self.radius"),
    (with_weight, "weight"),
    (with_best, "best, factor"),
    (with_old_targets, "old"),
    (with_memory, "pool.rows"),
    (with_anchor, "anchor"),
    (with_attribute, "model.anchor"),
    (with_best_weights, "best, best_weights, saved"),
    (with_own_gradients, "first"),
    (without_mean, "factor"),
]


def told_over_epochs(world: World, whole: bool) -> list[list[str]]:
    """What is told of each of these loops, but for what differs between the processes."""
    found = []
    for loop, _ in OVER_EPOCHS:
        messages, _ = told_by(world, partial(loop, whole=whole))
        found.append([text for text in messages if "in no checkpoint" in text])
    return found


@pytest.mark.parametrize("processes", [1, 3])
def test_what_goes_over_whole_epochs_is_told(processes: int) -> None:
    told, *others = on_ranks(processes, told_over_epochs, True)
    assert told == [[LOST_OVER_EPOCHS % names] for _, names in OVER_EPOCHS]
    assert others == [[[]] * len(OVER_EPOCHS)] * (processes - 1)


def trained_near(run: Run, model: Any, optimizer: Any, loader: Any, anchor: Anchor) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss = run.mean((model(x).squeeze(1) - y).square()) + anchor.penalty(model)
        loss.backward()
        optimizer.step()


def with_argument(run: Run) -> None:
    """Made where the later epochs call the loop over batches."""
    model, optimizer, loader = begun(run)
    for epoch in run.epochs(4):
        if epoch < 2:
            trained_on(run, model, optimizer, loader)
        else:
            trained_near(run, model, optimizer, loader, Anchor(model))


def in_a_branch(run: Run) -> None:
    model, optimizer, loader = begun(run)
    kept: dict[str, Anchor] = {}
    for epoch in run.epochs(4):
        if epoch == 1:
            trained_on(run, model, optimizer, loader)
        else:
            kept["anchor"] = Anchor(model)
            trained_near(run, model, optimizer, loader, kept["anchor"])


def told_in_epochs(world: World, loop: Callable[[Run], None]) -> list[str]:
    messages, _ = told_by(world, loop)
    return messages


def with_masks(run: Run) -> None:
    """A lottery ticket: pruned between two loops over epochs."""
    model, optimizer, loader = begun(run)
    masks: dict[str, Tensor] = {}
    for _ in run.epochs(2):
        trained_on(run, model, optimizer, loader)
    for name, weight in model.named_parameters():
        masks[name] = (weight.abs() > weight.abs().mean()).double()
    for _ in run.epochs(4):
        for x, y in loader:
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.mul_(masks[name])


def in_tasks(run: Run) -> None:
    model, optimizer, loader = begun(run)
    anchor: Any = None
    for task in range(2):
        for _ in run.epochs(2 * task + 2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = run.mean((model(x).squeeze(1) - y).square())
                if anchor is not None:
                    loss = loss + anchor.penalty(model)
                loss.backward()
                optimizer.step()
        anchor = Anchor(model)


def behind_resume(run: Run) -> None:
    """Beside what is made earlier, parameters, their number, and a tensor of a size."""
    model: Any = run.wrap(net())
    first = Anchor(model)
    optimizer = sgd(model)
    loader = run.loader(rows(), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer)
    anchor = Anchor(model)
    teacher = copy.deepcopy(model)
    model.width = 4
    steps = torch.ones(model.width, 1).double().cumsum(0).squeeze(1)
    parameters = list(model.parameters())
    scale = torch.ones(1) / sum(weight.numel() for weight in parameters)
    for _ in run.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            losses = (model(x * steps).squeeze(1) - y).square() - teacher(x).detach().squeeze(1)
            penalty = anchor.penalty(model) + first.penalty(model) + parameters[0].sum()
            loss = run.mean(losses) + scale.sum() * penalty
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("loop", "names"),
    [(with_masks, "masks"), (in_tasks, "anchor"), (behind_resume, "anchor, teacher")],
)
def test_what_a_resumed_run_makes_of_other_weights_is_told(
    loop: Callable[[Run], None], names: str
) -> None:
    assert on_ranks(3, told_in_epochs, loop) == [[MADE_AGAIN % names], [], []]


def aimed(run: Run, model: Any, optimizer: Any, inputs: Tensor, aims: Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        run.mean((model(inputs).squeeze(1) - aims).square()).backward()
        optimizer.step()


def within_a_step(run: Run) -> None:
    """Aims of the step alone, for updates in a loop within it."""
    model, optimizer, loader = begun(run)
    for _ in run.epochs(2):
        for x, _ in loader:
            aimed(run, model, optimizer, x, model(x).detach().squeeze(1) + 1)
            aims = model(x).detach().squeeze(1) + 1
            for _ in range(2):
                optimizer.zero_grad()
                run.mean((model(x).squeeze(1) - aims).square()).backward()
                optimizer.step()


def test_what_a_step_makes_for_loops_within_it_is_not_told() -> None:
    assert on_ranks(3, told_in_epochs, within_a_step) == [[], [], []]


@pytest.mark.parametrize(
    ("loop", "name"), [(with_argument, "anchor"), (in_a_branch, "kept['anchor']")]
)
def test_what_a_part_of_an_epoch_makes_is_told(loop: Callable[[Run], None], name: str) -> None:
    assert on_ranks(3, told_in_epochs, loop) == [[LOST % name], [], []]


def trained_on(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        run.mean((model(x).squeeze(1) - y).square()).backward()
        optimizer.step()


def with_loaders(run: Run) -> None:
    """A loader for each pair of epochs, in a dict of lists."""
    model, optimizer, _ = begun(run)
    loaders = {task: [run.loader(rows(), global_batch_size=6)] for task in range(2)}
    for epoch in run.epochs(4):
        trained_on(run, model, optimizer, loaders[epoch // 2][0])


def test_containers_of_loaders_are_not_told() -> None:
    assert on_ranks(3, told_in_epochs, with_loaders) == [[], [], []]


def test_what_epochs_set_after_their_steps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Without whole=True too."""
    for loop, names in (
        (with_weight, "weight"),
        (with_best, "best, factor"),
        (with_best_weights, "best, best_weights, saved"),
    ):
        caplog.clear()
        with session_on(World()) as run:
            loop(run, whole=False)
        assert [record.getMessage() for record in caplog.records] == [LOST_OVER_EPOCHS % names]


@pytest.mark.parametrize("loop", [with_radius, with_weight, with_best])
def test_nothing_goes_over_a_single_epoch(
    loop: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with session_on(World()) as run:
        loop(run, whole=True, epochs=1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (with_hidden, "hidden"),
        (with_targets, "target"),
        (with_teacher, "teacher"),
        (with_pool, "pool.rows"),
        (with_passes, "number"),
        (with_own_counts, ""),
        (with_shown, ""),
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
        told = [record.getMessage() for record in caplog.records]
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
            saving = run._steps.saving
            for epoch in run.epochs(4, whole=True, save_every=2):
                for _ in loader:
                    if epoch == stopped_at:
                        raise Interrupted
        assert saving
        assert saving.saved_epoch == resumes_at


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
    note = f"ended inside of epoch {leave_at // 4}, after"
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
