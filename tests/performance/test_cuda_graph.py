"""What a recorded step does around its recording, played on the CPU; tests/end_to_end/test_gpu.py
has real ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, train
from ddp_train.engine.rehearsal import rehearse
from ddp_train.errors import LaunchError
from ddp_train.hardware import Hardware
from ddp_train.options.registry import OPTIONS
from ddp_train.performance.cuda_graph import WARM_UP_STEPS, GraphedStepper
from ddp_train.resilience.failure import failure_from
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tensor_tree import map_tensors, tensors
from tests.support.jobs import config_of, job_of, table
from tests.support.ranks import on_ranks

HARNESS = "harness"
"""The module of functions that a model is given here: in this one lists change."""
recorded: list[int] = []
replayed: list[int] = []


def record(self: Any, data: Any) -> None:
    """As the real one, but for the GPU: what would be recorded is played at each replay."""
    recorded.append(self.steps_done)
    place = map_tensors(torch.clone, data)
    self.batch = list(tensors(place))
    self.shapes = [tensor.shape for tensor in self.batch]
    self.scale = torch.zeros(())
    self.loss = torch.zeros(())
    self.units = None

    def replay() -> None:
        replayed.append(self.steps_done)
        loss, units = self.wrapped(place)
        self.count(units, self.scale, is_last=True)
        torch.autograd.backward((loss,), (loss.detach() * 0 + self.scale,))
        self.update()
        self.loss.copy_(loss.detach())

    self.graph = SimpleNamespace(replay=replay, reset=replayed.clear)


@contextlib.contextmanager
def played() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "Stream"))
        for module in ("assembly.job", "performance.cuda_graph"):
            stack.enter_context(mock.patch(f"ddp_train.{module}.on_stream", contextlib.nullcontext))
        stack.enter_context(mock.patch.object(GraphedStepper, "_capture", record))
        yield


@pytest.fixture(autouse=True)
def no_gpu() -> Iterator[None]:
    recorded.clear(), replayed.clear()
    with played():
        yield


def job(
    graph: bool, samples: int, optimizer: str = "sgd", source: ArraySource | None = None
) -> Job:
    config = config_of(
        World(),
        Hardware(cpus=1, gpus=1),
        strategy={"name": "single"},
        model={"name": "mlp", "hidden": 8},
        train={"global_batch_size": 8, "epochs": 8},
        optimizer={"name": optimizer},
        schedule={"name": "cosine", "warmup_steps": 3},
        tuning={
            "cuda_graph": graph,
            "precision": "fp32",
            "optimizer": "fused" if OPTIONS["optimizer"][optimizer].has_fused else "foreach",
        },
    )
    sources = (source or table(samples), table(8))
    return job_of(config, World(), sources, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb"])
@pytest.mark.parametrize("samples", [40, 44])
def test_whole_batches_are_replayed_and_others_are_not(samples: int, optimizer: str) -> None:
    results = []
    for graph in (False, True):
        made = job(graph, samples, optimizer)
        train(made, iter(made.batches), until=made.plan.steps)
        weights = torch.cat([p.detach().flatten() for p in made.stepper.parameters])
        results.append(
            (
                weights,
                made.stepper.mean_loss().value,
                made.stepper.steps_done,
                made.stepper.last_learning_rate,
            )
        )
    plan = made.plan
    whole = [step for step in range(made.plan.steps) if made.plan.is_full(step)]
    assert (
        recorded == [whole[WARM_UP_STEPS]]
        and replayed == whole[WARM_UP_STEPS:]
        and len(replayed) > 20
    )
    assert len(whole) < plan.steps or samples == 40
    # On the CPU, a rate in a tensor has fewer digits than a number.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def count(model: Any, *_: Any) -> None:
    model.calls.add_(model.training)


count.__module__ = HARNESS


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_a_rehearsal_leaves_all_as_it_was(optimizer: str) -> None:
    results = []
    for rehearsed in (False, True):
        made = job(True, 40, optimizer)
        made.module.model.register_buffer("calls", torch.zeros(()))
        made.module.model.register_forward_hook(count)
        recorded.clear(), replayed.clear()
        if rehearsed:
            before = [one.clone() for one in made.module.state_dict().values()]
            rehearse(made)
            assert (
                all(map(torch.equal, before, made.module.state_dict().values()))
                and len(recorded) == 1
            )
            assert made.step == made.stepper.steps_done == 0 and not made.stepper.losses.passes
        train(made, iter(made.batches), until=made.plan.steps)
        assert replayed == list(range(0 if rehearsed else WARM_UP_STEPS, made.plan.steps))
        weights = torch.cat([one.detach().flatten() for one in made.module.state_dict().values()])
        results.append((weights, made.stepper.mean_loss().value))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def times_of_a_rehearsal(world: World) -> tuple[float, float]:
    """When its own part was over, and when it might begin to train. Rank 1 takes longer."""
    steps = GraphedStepper.rehearse
    done = []

    def later(self: GraphedStepper, *given: Any) -> None:
        steps(self, *given)
        time.sleep(1 if world.rank == 1 else 0)
        done.append(time.time())

    with played(), mock.patch.object(GraphedStepper, "rehearse", later):
        rehearse(job(True, 40))
    return done[0], time.time()


@pytest.mark.slow
def test_ranks_begin_to_train_when_all_have_rehearsed() -> None:
    found = on_ranks(3, times_of_a_rehearsal)
    assert found[1][0] - found[0][0] > 0.5, "one was late"
    assert min(began for _, began in found) >= max(done for done, _ in found)


@pytest.mark.parametrize("ready", [False, True])
def test_what_a_rehearsal_cannot_undo_ends_it(ready: bool) -> None:
    """A model that its first batch initialises, as ActNorm. A cache that is filled then is no
    state."""

    def initialise(model: Any, _: Any) -> None:
        model.ready = True
        model.cache = 1

    initialise.__module__ = HARNESS
    made = job(True, 40)
    model: Any = made.module.model
    model.ready = ready
    model.cache = None
    model.register_forward_pre_hook(initialise)
    if ready:
        expected = ""
    else:
        expected = r"forward pass changes model\.ready, which tuning\.rehearse=true cannot undo"
    with pytest.raises(LaunchError, match=expected) if expected else contextlib.nullcontext():
        rehearse(made)


def test_the_twelfth_batch_may_be_a_short_one() -> None:
    made = job(True, 8 * WARM_UP_STEPS + 4)
    train(made, iter(made.batches), until=20)
    assert recorded == [WARM_UP_STEPS + 1]


def test_a_recording_is_gone_when_its_stepper_is_closed() -> None:
    made = job(True, 40)
    train(made, iter(made.batches), until=20)
    stepper: Any = made.stepper
    assert len(replayed) == 20 - WARM_UP_STEPS and stepper.graph
    for _ in range(2):
        stepper.close()
        assert replayed == [] and stepper.graph is None, (
            "the graph is reset, even if something else holds it"
        )


def test_what_cannot_be_recorded_is_told_with_the_remedy() -> None:
    made = job(True, 40)
    refusal = RuntimeError("operation not permitted when stream is capturing\nand a stack")
    with (
        mock.patch.object(GraphedStepper, "_capture", side_effect=refusal),
        pytest.raises(LaunchError) as caught,
    ):
        train(made, iter(made.batches), until=20)
    assert str(caught.value).endswith(
        "as a CUDA graph: operation not permitted when stream is capturing"
    )
    assert caught.value.remedy == "use tuning.cuda_graph=false" and made.step == WARM_UP_STEPS


def broken_off(*_: Any) -> None:
    """As `torch.cuda.graph` does when its body fails, and ending the recording fails as well."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    "fails",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        broken_off,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_want_of_memory_is_not_a_step_that_cannot_be_recorded(fails: Any) -> None:
    made = job(True, 40)
    with (
        mock.patch.object(GraphedStepper, "_capture", side_effect=fails),
        pytest.raises(RuntimeError) as caught,
    ):
        train(made, iter(made.batches), until=20)
    assert failure_from(caught.value, 0, RankStatus(), Path("log"), "").kind == "oom"
