"""Several models in a session, several backward passes in a step, and what is called past them."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.errors import ModelError
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import Settings, UsageError
from ddp_train.sessions.steps import Steps
from tests.sessions import loops
from tests.sessions.loops import LOOPS, PlainRun, Weights
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

RESUMED = ("adversarial", "penalised", "in_parts", "unfrozen")
STEPS_BEFORE = 6
"""Two of the second epoch's four."""


class InterruptedRunError(Exception):
    """The end of a run in the middle of an epoch, after a checkpoint."""


@contextlib.contextmanager
def opened(world: World, folder: Path) -> Iterator[Run]:
    """The session of a process that is in a process group already."""
    settings = Settings(folder, 1, "cpu", 0, 2, 0, 600.0, 30.0)
    steps = Steps(settings, world, "cpu", RankStatus(), StopController())
    try:
        yield Run(steps)
        steps.end()
    except InterruptedRunError:
        pass
    finally:
        if steps.saving:
            steps.saving.checkpoints.finish()
        steps.close()


def interrupt(run: Run, after: int) -> None:
    """Save, and end the loop, after this number of steps."""
    steps = run._steps
    end_step = steps.end_step

    def end_and_leave(*arguments: Any, **keywords: Any) -> None:
        end_step(*arguments, **keywords)
        if steps.loop.position.step == after:
            steps.saving.save()
            raise InterruptedRunError

    steps.end_step = end_and_leave  # type: ignore[method-assign]


def trained(world: World, folder: Path) -> dict[str, Weights]:
    found = {}
    for name, loop in LOOPS.items():
        with opened(world, folder / name) as run:
            found[name] = loop(run)
    return found


def resumed(world: World, folder: Path) -> dict[str, Weights]:
    found = {}
    for name in RESUMED:
        with opened(world, folder / f"{name}_resumed") as run:
            interrupt(run, STEPS_BEFORE)
            LOOPS[name](run)
        with opened(world, folder / f"{name}_resumed") as run:
            found[name] = LOOPS[name](run)
    return found


def both(world: World, folder: Path) -> tuple[dict[str, Weights], dict[str, Weights]]:
    return trained(world, folder), resumed(world, folder)


def assert_as_by_hand(found: dict[str, Weights]) -> None:
    for name, loop in LOOPS.items():
        torch.testing.assert_close(found[name], loop(PlainRun()), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_several_models_are_exact_on_one_process(tmp_path: Path) -> None:
    assert_as_by_hand(trained(World(), tmp_path))


@pytest.mark.slow
def test_several_models_are_exact_on_three_processes(tmp_path: Path) -> None:
    for whole, again in on_ranks(3, both, tmp_path):
        assert_as_by_hand(whole)
        for name in RESUMED:
            torch.testing.assert_close(again[name], whole[name], rtol=0, atol=0)


@pytest.mark.nightly
def test_several_models_are_exact_on_four_processes(tmp_path: Path) -> None:
    for found in on_ranks(4, trained, tmp_path):
        assert_as_by_hand(found)


def step(run: Run, *models: nn.Module, optimizers: list[Any], loss: Callable[..., Any]) -> None:
    """Two steps of a loop whose losses are those of a function."""
    loader = run.loader(loops.rows(), global_batch_size=loops.BATCH)
    named = {f"model_{number}": model for number, model in enumerate(models)}
    named |= {f"optimizer_{number}": each for number, each in enumerate(optimizers)}
    run.resume(**named)
    for _ in run.epochs(1):
        for inputs, _ in loader:
            loss(inputs)
            for optimizer in optimizers:
                optimizer.step()


def a_loss_beside_the_mean(run: Run) -> None:
    models = [run.wrap(loops.net()) for _ in range(2)]

    def loss(inputs: Any) -> None:
        run.mean(models[0](inputs).squeeze(1)).backward()
        models[1](inputs).mean().backward()

    step(run, *models, optimizers=[loops.sgd(model) for model in models], loss=loss)


def a_model_without_wrap(run: Run) -> None:
    model = run.wrap(loops.net())
    other = loops.net()
    apart = loops.sgd(other)

    def loss(inputs: Any) -> None:
        run.mean(model(other(inputs) + inputs).squeeze(1)).backward()
        apart.step()

    step(run, model, optimizers=[loops.sgd(model)], loss=loss)


def a_parameter_without_wrap(run: Run) -> None:
    model = run.wrap(loops.net())
    optimizer = loops.sgd(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    run.resume(model=model, optimizer=optimizer)


def a_model_that_is_not_saved(run: Run) -> None:
    model = run.wrap(loops.net())
    run.wrap(TwoLayers())
    run.resume(model=model)


class TwoLayers(loops.TwoHeads):
    pass


MISTAKES = [
    (
        a_loss_beside_the_mean,
        "gradients of Sequential from a loss that was not computed by run.mean",
    ),
    (a_model_without_wrap, "trains a model that run.wrap did not get, so each process would"),
    (a_parameter_without_wrap, "has a parameter of shape [3] that is in no model of run.wrap"),
    (a_model_that_is_not_saved, "a model of run.wrap (TwoLayers) is not among its arguments"),
    (
        lambda run: run.wrap(loops.net(), find_unused=True),
        "find_unused is not an option of torch's",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_what_would_train_apart_is_refused(
    tmp_path: Path, mistake: Callable[[Run], None], message: str
) -> None:
    with (
        pytest.raises(UsageError) as refused,
        opened(World(), tmp_path) as run,
    ):
        mistake(run)
    assert message in str(refused.value)


def test_a_copy_may_be_trained_within_a_step(tmp_path: Path) -> None:
    with opened(World(), tmp_path) as run:
        model = run.wrap(loops.net())

        def loss(inputs: Any) -> None:
            learner = copy.deepcopy(model)
            quick = loops.sgd(learner)
            for _ in range(2):
                quick.zero_grad()
                learner(inputs).sum().backward()
                quick.step()
            run.mean((model(inputs) - learner(inputs).detach()).squeeze(1)).backward()

        step(run, model, optimizers=[loops.sgd(model)], loss=loss)
        assert run.step == 4


def test_attributes_are_those_of_the_users_model(tmp_path: Path) -> None:
    with opened(World(), tmp_path) as run:
        model: Any = run.wrap(TwoLayers())
        before = model.actor
        model.actor = nn.Linear(3, 2).double()
        model.scale = 3
        assert model.module.actor is model.actor is not before
        assert model.module.scale == 3
        del model.scale
        assert not hasattr(model.module, "scale")


def test_compiled_models_keep_their_names(tmp_path: Path) -> None:
    with opened(World(), tmp_path) as run:
        compiled: Any = torch.compile(loops.net(), backend="eager")
        model = run.wrap(compiled)
        assert list(model.state_dict()) == list(loops.net().state_dict())
        again = torch.compile(model, backend="eager")
        assert run.resume(model=again) == 0


def graphs_of(model: nn.Module, run: Run) -> int:
    """The graphs that torch.compile makes of a model which is trained, and scored in two ways."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=backend)
    for _ in run.epochs(2):
        for inputs, _ in run.loader(loops.rows(), global_batch_size=loops.BATCH):
            run.mean(compiled(inputs).squeeze(1)).backward()
        model.eval()
        with torch.no_grad():
            compiled(inputs)
            for inputs, _ in run.test_loader(loops.rows(), batch_size=12):
                compiled(inputs)
        model.train()
    return len(graphs)


def test_a_compiled_wrapper_is_compiled_no_more_often_than_its_model(tmp_path: Path) -> None:
    counts = []
    for wrapped_alone in (True, False):
        with opened(World(), tmp_path / str(wrapped_alone)) as run:
            model = run.wrap(loops.net())
            run.resume(model=model)
            counts.append(graphs_of(model if wrapped_alone else model.module, run))
    assert counts[0] == counts[1]


def converted(run: Any) -> Weights:
    """A model whose type changes and changes back; gradients for test batches, which one process
    of three lacks, before anything was trained."""
    model = run.wrap(loops.net())
    optimizer = loops.sgd(model)
    loader = run.loader(loops.rows(), global_batch_size=loops.BATCH)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        if isinstance(run, Run):
            for inputs, _ in run.test_loader(loops.rows(), batch_size=12):
                model(inputs).sum().backward()
        model.float().double()
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.mean((model(inputs).squeeze(1) - labels).square()).backward()
            optimizer.step()
    return loops.weights_of(model=model)


def error_of_a_part(world: World, folder: Path) -> str:
    """What a loss gets that leaves a part of the model out."""
    with pytest.raises(ModelError) as refused, opened(world, folder) as run:
        model = run.wrap(loops.TwoHeads())

        def loss(inputs: Any) -> None:
            run.mean(model(inputs)[0]).backward()

        step(run, model, optimizers=[loops.sgd(model)], loss=loss)
    return str(refused.value)


def converted_and_in_part(world: World, folder: Path) -> tuple[Weights, str]:
    with opened(world, folder / "converted") as run:
        weights = converted(run)
    return weights, error_of_a_part(world, folder / "part")


@pytest.mark.slow
def test_what_changes_after_the_wrap_is_seen(tmp_path: Path) -> None:
    for weights, error in on_ranks(3, converted_and_in_part, tmp_path):
        torch.testing.assert_close(weights, converted(PlainRun()), rtol=0, atol=1e-12)
        assert "the loss does not depend on 2 parameters: critic.weight, critic.bias" in error


class Greedy(nn.Module):
    """Its methods have names of torch's, as of layers in the forward-forward algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = loops.net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).squeeze(1)

    def train(self, inputs: Any, labels: Any = None) -> Any:  # type: ignore[override]
        if isinstance(inputs, bool):
            return super().train(inputs)
        return (self(inputs) - labels).square()

    def eval(self, inputs: Any = None) -> Any:  # type: ignore[override]
        return super().eval() if inputs is None else self(inputs)


def greedy(run: Any) -> tuple[Weights, list[bool]]:
    """The weights, and the modes of the model."""
    torch.manual_seed(0)
    model = run.wrap(Greedy())
    optimizer = loops.sgd(model)
    run.resume(model=model, optimizer=optimizer)
    loader = run.loader(loops.rows(), global_batch_size=loops.BATCH)
    modes = []
    for _ in run.epochs(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            run.mean(model.train(inputs, labels)).backward()
            optimizer.step()
        assert model.eval(loops.rows().tensors[0]).shape == (20,)
        modes += [model.training, model.eval().layers.training, model.train(True).layers.training]
    return loops.weights_of(model=model), modes


def greedy_of(world: World) -> tuple[Weights, list[bool]]:
    with session_on(world) as run:
        return greedy(run)


def test_methods_with_torchs_names_are_the_models_own() -> None:
    by_hand, _ = greedy(PlainRun())
    for weights, modes in on_ranks(3, greedy_of):
        torch.testing.assert_close(weights, by_hand, rtol=0, atol=1e-12)
        assert modes == [True, False, True] * 2


@pytest.mark.slow
def test_the_example_gives_one_loss_on_any_processes(tmp_path: Path) -> None:
    printed = []
    for processes in (1, 3):
        argv = [sys.executable, str(ROOT / "examples/gan.py"), str(tmp_path / str(processes))]
        more = {"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": str(processes)}
        done = zygote.run(argv, LIMIT_SECONDS, cwd=tmp_path, env=environment(more), text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert "epoch 1: loss" in printed[0]


class FailsOnce(torch.autograd.Function):
    """An identity whose first backward pass runs out of memory."""

    failures = 0

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        if not FailsOnce.failures:
            FailsOnce.failures += 1
            raise MemoryError
        return grad_outputs[0]


def pass_after_a_failure(world: World) -> torch.Tensor:
    with session_on(world) as run:
        model = run.wrap(loops.net(), find_unused_parameters=True)
        optimizer = loops.sgd(model)
        loader = run.loader(loops.rows(), global_batch_size=loops.SAMPLES)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for inputs, targets in loader:
                with contextlib.suppress(MemoryError):
                    run.mean(FailsOnce.apply(model(inputs)[:, 0] - targets) ** 2).backward()
                optimizer.zero_grad()
                run.mean((model(inputs)[:, 0] - targets) ** 2).backward()
                optimizer.step()
        return torch.cat([part.detach().flatten() for part in model.parameters()])


def test_pass_after_one_that_failed_is_exchanged() -> None:
    first, second = on_ranks(2, pass_after_a_failure)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def passes_before_training(world: World) -> tuple[int, float]:
    """The parameters that a loop over a wrapped list gives; and a sum after a pass of set-up."""
    total = 0.0
    with session_on(world) as run:
        model = run.wrap(loops.net())
        rates: Any = run.wrap(nn.ParameterList(torch.ones(1) for _ in range(3)))
        with torch.no_grad():
            model(loops.rows()[:4][0])
        run.resume(model=model, rates=rates)
        for _ in run.epochs(1):
            total = run.sum(1.0)
        return len(list(rates)), total


@pytest.mark.slow
def test_set_up_before_training_is_no_score(capfd: pytest.CaptureFixture[str]) -> None:
    assert on_ranks(3, passes_before_training) == [(3, 3.0)] * 3
    assert "the sum counts each of them" not in capfd.readouterr().err
