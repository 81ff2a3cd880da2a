"""`strategy=ordered`: 1, 2, 4 and 8 processes end with the same bits."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.checkpoints.training_state import STEPPER, TrainingState
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.rng import StepSeed
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, evaluate, fit
from ddp_train.errors import NonFiniteLossError
from ddp_train.options.custom import CustomModelConfig
from ddp_train.parallel.ordered.reduction import OrderedReduction, Tree
from ddp_train.tasks.task import ModelWithTask, Task
from tests.support.commands import checkpoints, run, weights
from tests.support.jobs import config_of, job_of, table
from tests.support.ranks import on_ranks

STEPS = 21
SAMPLES = 101  # 48 + 48 + 5: the last batch leaves three of eight shards without a sample
MODELS: dict[str, dict[str, Any]] = {
    "convolutions": {"name": "cnn", "channels": 4, "dropout": 0.2},
    "batch norm": {"name": "cnn", "channels": 4, "dropout": 0.2, "norm": "batch"},
    "perceptron": {"name": "mlp", "hidden": 16, "dropout": 0.2},
}


def job_with(world: World, model: str, strategy: str, precision: str) -> Job:
    config = config_of(
        world,
        model=MODELS[model],
        data={"name": "digits", "limit": SAMPLES, "augment": True},
        strategy={"name": strategy},
        train={"global_batch_size": 48, "epochs": 7, "max_steps": STEPS, "max_grad_norm": 1.0},
        optimizer={"name": "adamw", "lr": 0.01},
        schedule={"name": "cosine", "warmup_steps": 3},
        tuning={"precision": precision},
    )
    return job_of(config, world)


def state_of(job: Job) -> dict[str, Any]:
    """All that a step changes."""
    tensors = {f"model.{name}": tensor for name, tensor in job.module.model.state_dict().items()}
    for number, state in job.stepper.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
    return tensors


def digest(tensors: dict[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name, tensor in tensors.items():
        content.update(
            name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return content.hexdigest()


def trained_bits(world: World, *arguments: str) -> tuple[str, float, Any, float]:
    """sha256 of weights and optimizer state, the mean loss, the score, and how far the weights
    moved."""
    job = job_with(world, *arguments)
    start = nn.utils.parameters_to_vector(job.module.parameters()).detach().clone()
    fit(job)
    moved = (nn.utils.parameters_to_vector(job.module.parameters()) - start).norm().item()
    return digest(state_of(job)), job.stepper.mean_loss(), evaluate(job.evaluation), moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("convolutions", "fp32"),
        pytest.param("batch norm", "fp32", marks=pytest.mark.slow),
        pytest.param("convolutions", "fp64", marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("perceptron", "bf16", marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param(
            "perceptron", "fp16", marks=[pytest.mark.slow, pytest.mark.nightly]
        ),  # with a loss scaler
    ],
)
def test_1_2_4_and_8_processes_end_with_the_same_bits(model: str, precision: str) -> None:
    ((reference, loss, score, moved),) = on_ranks(1, trained_bits, model, "ordered", precision)
    assert moved > 0.1, "nothing was learnt: the comparison would be idle"
    for ranks in (2, 4, 8):
        for result in on_ranks(
            ranks, trained_bits, model, "ordered", precision, timeout_seconds=110
        ):
            assert result == (reference, loss, score, moved), ranks


@pytest.mark.slow
def test_torchs_own_reduction_does_not() -> None:
    """So that the test above can fail: without dropout, whose draws differ by rank there, rounding
    alone is left."""
    digests = [on_ranks(ranks, no_dropout_bits, "ddp")[0] for ranks in (1, 2)]
    assert digests[0] != digests[1]
    digests = [on_ranks(ranks, no_dropout_bits, "ordered")[0] for ranks in (1, 2)]
    assert digests[0] == digests[1]


def no_dropout_bits(world: World, strategy: str) -> str:
    config = config_of(
        world,
        model={"name": "cnn", "channels": 4},
        data={"name": "digits", "limit": SAMPLES},
        strategy={"name": strategy},
        train={"global_batch_size": 48, "epochs": 2},
    )
    job = job_of(config, world)
    fit(job)
    return digest(state_of(job))


def test_it_is_the_gradient_of_the_mean_loss() -> None:
    """Against one process with the whole batch in one pass, in double precision."""
    world = World()
    sources = (table(29), table(10))
    weights = []
    for strategy in ("ordered", "single"):
        config = config_of(
            world,
            strategy={"name": strategy},
            model={"name": "mlp", "hidden": 8},
            train={"global_batch_size": 8, "epochs": 3},
            tuning={"precision": "fp64"},
        )
        job = job_of(config, world, sources)
        fit(job)
        weights.append(nn.utils.parameters_to_vector(job.module.parameters()).detach())
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leaves", [1, 2, 4, 8, 16])
def test_the_tree_adds_neighbours_and_keeps_few_tensors(leaves: int) -> None:
    values = (
        torch.randn(leaves, 50, generator=torch.Generator().manual_seed(leaves))
        .double()
        .exp()
        .float()
    )
    level = list(values)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    tree = Tree()
    for value in values:
        tree.add(value.clone())
        assert len(tree.sums) <= leaves.bit_length()
    assert torch.equal(tree.total(), level[0])


@pytest.mark.parametrize("samples", [48, 5, 1])
def test_shards_are_the_same_for_every_world(samples: int) -> None:
    dealt = []
    for world_size in (1, 2, 4, 8):
        plans = [
            BatchPlan(samples, 48, 1, 1, 0, rank, world_size, virtual_shards=8)
            for rank in range(world_size)
        ]
        micro_batches = [list(plan.micro_batches()) for plan in plans]
        assert all(
            [micro_batch.is_last for micro_batch in of_rank]
            == [False] * (8 // world_size - 1) + [True]
            for of_rank in micro_batches
        )
        dealt.append(
            [
                (s.shard_index, s.indices[: s.num_real].tolist(), s.scale)
                for of_rank in micro_batches
                for s in of_rank
            ]
        )
    assert all(shards == dealt[0] for shards in dealt)
    assert [part for part, _, _ in dealt[0]] == list(range(8))
    assert sorted(number for _, indices, _ in dealt[0] for number in indices) == list(
        range(samples)
    )
    assert {scale for _, indices, scale in dealt[0] if indices} == {1 / samples}


class Odd(nn.Module):
    """A model with a parameter that only some shards use, one that none uses, and buffers of
    several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.full((2,), 0.1))
        self.register_buffer("constant", torch.full((3,), 0.1))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf]))
        self.register_buffer("largest", torch.tensor(-torch.inf))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        self.running.lerp_(inputs.mean(0), 0.5)
        self.largest.copy_(torch.maximum(self.largest, inputs.max()))
        return inputs * self.always + (self.sometimes if inputs[0, 0] > 2 else 0)


class SumOfOutputs(Task):
    units_are_samples = True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return model(batch).sum(), len(batch)


def odd_step(world: World, counts: list[int]) -> tuple[Any, ...]:
    """One step over four shards; those with count 0 are stand-ins."""
    model = Odd()
    if world.rank:  # what rank 0 has must win
        nn.init.zeros_(model.always)
    strategy = OrderedReduction("cpu", seed=0, virtual_shards=4)
    module = strategy.place(ModelWithTask(model, SumOfOutputs(), "cpu", None))
    wrapped = strategy.wrap(module)
    each = 4 // world.size
    for part in range(world.rank * each, (world.rank + 1) * each):
        micro_batch = MicroBatch(
            0,
            0,
            np.array([part]),
            counts[part],
            float(counts[part] > 0),
            part % each == each - 1,
            part,
        )
        with strategy.sync_gradients(micro_batch):
            loss, _ = wrapped(torch.full((1, 2), part + 1.0))
            loss.backward(torch.tensor(micro_batch.scale))
            draw = torch.rand(1).item()
    gradients = [
        None if p.grad is None else p.grad.tolist()
        for p in (model.always, model.sometimes, model.never)
    ]
    assert model.mask.tolist() == [0.0, -torch.inf, torch.inf]
    assert model.largest == torch.arange(1.0, 5)[torch.tensor(counts) > 0].mean(), (
        "the mean over the shards"
    )
    return gradients, model.seen.item(), model.running.tolist(), model.constant.tolist(), draw


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "always", "sometimes", "mean"),
    [
        ([1, 1, 1, 1], 10.0, 2.0, 2.5),
        (
            [1, 1, 1, 0],
            6.0,
            1.0,
            2.0,
        ),  # a stand-in adds nothing, neither to gradients nor to statistics
        ([1, 1, 0, 0], 3.0, None, 1.5),
    ],
)
def test_unused_parameters_buffers_and_stand_ins(
    counts: list[int], always: float, sometimes: float | None, mean: float
) -> None:
    for ranks in (1, 2, 4):
        results = on_ranks(ranks, odd_step, counts)
        for gradients, seen, running, constant, _ in results:
            assert gradients == [[always] * 2, None if sometimes is None else [sometimes] * 2, None]
            assert seen == 1
            assert running == pytest.approx([0.05 + mean / 2] * 2)
            assert constant == torch.full((3,), 0.1).tolist()
        StepSeed(0, 3, "cpu")(0)
        assert results[-1][-1] == torch.rand(1).item(), (
            "the last shard's draws, whichever rank computes it"
        )


class Shy(nn.Module):
    """Its smallest parameter takes no part in a shard that is spoilt: it cannot tell of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + (self.offset if inputs.isfinite().all() else 0)


def test_a_bad_loss_is_seen_though_a_parameter_did_not_take_part() -> None:
    world = World()
    source = table(16)
    config = config_of(
        world, strategy={"name": "ordered"}, train={"global_batch_size": 8, "epochs": 1}
    )
    config.model = CustomModelConfig(target=f"{__name__}.Shy")
    job = job_of(config, world, (source, source))
    source.inputs[job.plan.global_batch(0)[-1]] = float("nan")
    with pytest.raises(NonFiniteLossError, match="step 0: "):
        fit(job)
    assert all(parameter.isfinite().all() for parameter in job.module.parameters())


@pytest.mark.slow
def test_stopped_and_resumed_on_another_number_of_processes(tmp_path: Path) -> None:
    words = [
        "model=cnn",
        "model.channels=4",
        "model.norm=batch",
        "model.dropout=0.1",
        "optimizer=adamw",
        "schedule=constant",
    ]
    words += ["data.limit=200", "strategy=ordered", "train.epochs=4"]
    for name, nproc, more in (
        ("whole", 1, ""),
        ("parts", 2, "train.max_steps=5"),
        ("parts", 4, "train.max_steps=null"),
    ):
        done = run(
            *words, f"run_dir={tmp_path / name}", f"launch.nproc_per_node={nproc}", *more.split()
        )
        assert done.returncode == 0, done.stderr
    assert (
        checkpoints(tmp_path / "whole")[-1]
        == checkpoints(tmp_path / "parts")[-1]
        == "step_00000012"
    )
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    one, other = (
        TrainingState.load(tmp_path / name / "checkpoints/step_00000012")
        for name in ("whole", "parts")
    )
    assert saved(one.objects[STEPPER]["optimizer"]) == saved(other.objects[STEPPER]["optimizer"])


def saved(values: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.save(values, content)
    return content.getvalue()
