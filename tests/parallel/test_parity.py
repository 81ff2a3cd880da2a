"""The parity ladder: the same run on 1, 2, 3 and 4 processes, with and without accumulation, and in
plain PyTorch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ddp_train.assembly.plan import build_plan
from ddp_train.assembly.strategy import build_strategy
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, train
from ddp_train.errors import ConfigError
from ddp_train.parallel.naming_ddp import BUCKET_MB
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.task import ModelWithTask
from tests.support.jobs import config_of, job_of, largest_difference, table, trained
from tests.support.ranks import on_ranks

STEPS = 20
SAMPLES = 101  # a prime: 48 + 48 + 5, and the last batch splits unevenly over 2, 3 and 4 processes


def ladder_run(
    world: World, precision: str, accumulation: int, model: str = "cnn"
) -> dict[str, Tensor]:
    config = config_of(
        world,
        model={"name": model},
        data={"name": "digits", "limit": SAMPLES},
        train={
            "global_batch_size": 48,
            "accumulation_steps": accumulation,
            "epochs": 7,
            "max_steps": STEPS,
            "max_grad_norm": 1.0,
        },
        optimizer={"name": "sgd", "lr": 0.02},
        schedule={"name": "cosine", "warmup_steps": 3},
        tuning={"precision": precision},
    )
    return trained(world, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp64", 1e-10), pytest.param("fp32", 1e-5, marks=[pytest.mark.slow, pytest.mark.nightly])],
)
def test_weights_agree_on_1_to_4_ranks_and_with_accumulation(
    precision: str, tolerance: float
) -> None:
    (reference,) = on_ranks(1, ladder_run, precision, 1)
    assert largest_difference(reference, ladder_run_untrained()) > 1e-3, (
        "nothing was learnt: the comparison would be idle"
    )
    for ranks, accumulation in itertools.product((1, 2, 3, 4), (1, 4)):
        results = on_ranks(ranks, ladder_run, precision, accumulation)
        for result in results[1:]:
            assert largest_difference(results[0], result) == 0, "ranks of one run differ"
        assert largest_difference(reference, results[0]) < tolerance, (ranks, accumulation)


def ladder_run_untrained() -> dict[str, Tensor]:
    world = World()
    config = config_of(
        world,
        model={"name": "cnn"},
        data={"name": "digits", "limit": SAMPLES},
        strategy={"name": "single"},
    )
    return dict(job_of(config, world).module.model.state_dict())


def tail_run(world: World, samples: int, accumulation: int) -> dict[str, Tensor]:
    """Batches of 12 whose last one holds fewer samples than there are processes."""
    sources = (table(samples), table(30, seed=2))
    train = {"global_batch_size": 12, "accumulation_steps": accumulation, "epochs": 5}
    config = config_of(
        world, model={"name": "mlp", "hidden": 8}, train=train, tuning={"precision": "fp64"}
    )
    return trained(world, config, sources)


@pytest.mark.slow
@pytest.mark.parametrize(
    "samples",
    [26, 5, 2, *(pytest.param(number, marks=pytest.mark.nightly) for number in (25, 27, 12))],
)
def test_a_last_batch_smaller_than_the_world_is_weighted(samples: int) -> None:
    (reference,) = on_ranks(1, tail_run, samples, 1)
    for accumulation in (1, 4):
        result = on_ranks(3, tail_run, samples, accumulation)[0]
        assert largest_difference(reference, result) < 1e-10


def plan_of(world: World, accumulation: int) -> list[tuple[int, list[int]]]:
    """The step and the samples of each micro-batch of one process: arithmetic, for which no process
    is needed."""
    train = {"global_batch_size": 48, "accumulation_steps": accumulation, "epochs": 4}
    config = config_of(world, data={"name": "digits", "limit": SAMPLES}, train=train)
    plan = build_plan(config, world, SAMPLES)
    return [
        (micro_batch.step, micro_batch.indices[: micro_batch.num_real].tolist())
        for micro_batch in plan.micro_batches()
    ]


def test_global_batches_are_the_same_for_every_world() -> None:
    sequences = []
    for ranks, accumulation in itertools.product((1, 2, 3, 4), (1, 4)):
        of_rank = [plan_of(World(rank, ranks, rank, ranks), accumulation) for rank in range(ranks)]
        steps = max(step for micro_batches in of_rank for step, _ in micro_batches) + 1
        batches = [
            sorted(
                number
                for micro_batches in of_rank
                for s, indices in micro_batches
                if s == step
                for number in indices
            )
            for step in range(steps)
        ]
        sequences.append(batches)
        for epoch in range(4):
            seen = sorted(
                number for batch in batches[epoch * 3 : epoch * 3 + 3] for number in batch
            )
            assert seen == list(range(SAMPLES)), "each sample once per epoch"
    assert all(sequence == sequences[0] for sequence in sequences)
    first_batches = [tuple(sequences[0][epoch * 3]) for epoch in range(4)]
    assert len(set(first_batches)) == 4, "epochs differ from each other"


def by_hand(world: World, steps: int) -> dict[str, Tensor]:
    """DDP as the PyTorch tutorial writes it: mean loss, backward, step. Only the samples are
    ours."""
    config = config_of(world, **BY_HAND)
    job = job_of(config, world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(job.module.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in itertools.islice(iter(job.batches), steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


BY_HAND = {
    "data": {"name": "digits", "limit": 480},
    "train": {"global_batch_size": 96, "epochs": 5, "max_steps": STEPS},
    "schedule": {"name": "constant"},
}


def by_us(world: World) -> dict[str, Tensor]:
    # Not `deterministic`: that settles the buckets before the first step, see
    # strategy.warm_up_ddp_buckets.
    return trained(world, config_of(world, **BY_HAND, deterministic=False))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bit_for_bit_what_hand_written_ddp_computes(ranks: int) -> None:
    assert largest_difference(on_ranks(ranks, by_us)[0], on_ranks(ranks, by_hand, STEPS)[0]) == 0


def score_of(world: World, limit: int, batch_size: int) -> dict:
    config = config_of(
        world,
        model={"name": "cnn", "norm": "batch"},
        data={"name": "digits", "limit": limit},
        train={"evaluate_batch_size": batch_size},
    )
    return evaluate(job_of(config, world).evaluation).as_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "batch_size"), [(364, 50), (1, 200), pytest.param(101, 7, marks=pytest.mark.nightly)]
)
def test_evaluation_has_the_same_bits_on_any_number_of_ranks(limit: int, batch_size: int) -> None:
    (reference,) = on_ranks(1, score_of, limit, batch_size)
    assert reference["samples"] == limit
    for ranks in (2, 3, 4):
        for result in on_ranks(ranks, score_of, limit, batch_size):
            assert result == reference


def buffers_around_an_evaluation(world: World, broadcast_buffers: bool) -> tuple[dict, dict, dict]:
    """Before it, in it, after it."""
    config = config_of(
        world,
        model={"name": "cnn", "norm": "batch"},
        data={"name": "digits", "limit": SAMPLES},
        train={
            "epochs": 1,
            "evaluate_batch_size": SAMPLES // 3,
        },  # a batch for each rank to look at the buffers in
        strategy={"name": "ddp", "broadcast_buffers": broadcast_buffers},
    )
    job = job_of(config, world)
    train(job, iter(job.batches), until=job.plan.epoch_end(0))

    def buffers() -> dict:
        return {name: buffer.clone() for name, buffer in job.module.model.named_buffers()}

    before = buffers()
    within = {}
    job.module.model.register_forward_hook(lambda *_: within.update(buffers()))
    score = evaluate(job.evaluation)
    assert score and score.samples == SAMPLES
    return before, within, buffers()


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_batch_norm_is_averaged_for_an_evaluation_alone(
    broadcast_buffers: bool,
) -> None:
    results = on_ranks(3, buffers_around_an_evaluation, broadcast_buffers)
    for name in results[0][1]:
        local = torch.stack([before[name].double() for before, _, _ in results])
        for before, within, after in results:
            assert torch.equal(after[name], before[name]), (
                "training does not know that it was looked at"
            )
            if name.endswith("num_batches_tracked"):
                assert within[name] == local[0]
            else:
                assert local.std(0).max() > 0, "ranks saw different samples"
                torch.testing.assert_close(
                    within[name].double(), local.mean(0), rtol=1e-6, atol=1e-7
                )


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def graphs_and_gradient(
    world: World,
    bucket_cap_mb: float | None = 1.0,
    buckets: str = "default",
    step_flops: Sequence[int | None] = (None, None, None),
    **options: Any,
) -> tuple[int, Tensor]:
    """How many graphs torch's compiler makes of a model whose layers have gradients of 1 MiB each.
    step_flops: what each rank counts."""
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = True  # as a process finds it
    sections = {
        "strategy": {"name": "ddp", "bucket_cap_mb": bucket_cap_mb, **options},
        "tuning": {"buckets": buckets},
    }
    config = config_of(world, **sections)
    torch.manual_seed(0)
    strategy = build_strategy(config, world, "cpu")
    module = strategy.place(ModelWithTask(Layers(), Classification(), "cpu", None))
    counted = CompileCounterWithBackend("aot_eager")
    module.compile(backend=counted)
    with mock.patch.dict(BUCKET_MB, large=1):
        wrapped = strategy.wrap(module, lambda: step_flops[world.rank])
    rows = torch.arange(world.rank, 12, world.size)
    images = torch.linspace(-1, 1, 12 * 512).view(12, 512)[rows]
    wrapped((images, rows % 10))[0].div(12 / world.size).backward()
    gradient = module.model.layers[0].weight.grad
    assert gradient is not None
    return counted.frame_count, gradient


def graphs_and_gradients(world: World, cases: list[dict[str, Any]]) -> list[tuple[int, Tensor]]:
    return [graphs_and_gradient(world, **case) for case in cases]


class Waits(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if self.training and dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        return super().forward(input)


class LooksAtValues(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.sum() > 0 else -input)


def said_by_flops(world: World) -> list[str]:
    """Of an MLP of ours, of models that wait for all ranks or look at values, and of batches that
    are cut by tokens."""
    train = {"global_batch_size": 1204, "accumulation_steps": 2}
    sections = {"train": train, "model": {"name": "mlp", "layers": 1}, "strategy": {"name": "ddp"}}
    config = config_of(world, **sections, tuning={"buckets": "by_flops"})
    by_tokens = {"_target_": "a.B", "batch_by": "tokens"}
    cut = config_of(world, **sections, tuning={"buckets": "by_flops"}, data=by_tokens)
    own = [
        ModelWithTask(model, Classification(), "cpu", None)
        for model in (Waits(6, 3), LooksAtValues(6, 3))
    ]
    source = table(2400)
    vars(source)["lengths"] = [1] * len(source)
    said: list[str] = []
    log = logging.getLogger("ddp_train.parallel.compiler_graphs")
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        for job in (config, None), *((config, module) for module in own), (cut, own[0]):
            with mock.patch.dict(BUCKET_MB, large=0):
                job_of(job[0], world, (source, table(12)), module=job[1])
    finally:
        log.removeHandler(handler)
    return said


@pytest.mark.slow
def test_buckets_by_flops_count_a_step_and_what_is_sent() -> None:
    """A third of the global batch's 1,204 samples. Inputs want no gradient, which saves a third of
    the first layer."""
    weights = 6 * 128, 128 * 3
    per_byte = (4 * weights[0] + 6 * weights[1]) * 1204 / 3 / (4 / 3 * 4 * (sum(weights) + 128 + 3))
    of_linear = 4 * 18 * 1204 / 3 / (4 / 3 * 4 * 21)
    numbers = [
        f"{per_byte:,.0f} operations",
        f"{of_linear:,.0f} operations",
    ]
    expected = [
        f"tuning.buckets=by_flops: large, with {number} for each byte that is sent"
        for number in numbers
    ]
    unknown = "large, since the operations for each byte that is sent are not known"
    expected += [f"tuning.buckets=by_flops: {unknown}"] * 2
    assert on_ranks(3, said_by_flops) == [expected] * 3


def compressed(world: World, **cap: Any) -> Tensor | str:
    """A gradient that PowerSGD exchanged, of a model of 3 MiB, or what it refused."""
    config = config_of(world, strategy={"name": "ddp", "comm_hook": "powersgd", **cap})
    torch.manual_seed(0)
    strategy = build_strategy(config, world, "cpu")
    module = strategy.place(ModelWithTask(Layers(), Classification(), "cpu", None))
    try:
        wrapped = strategy.wrap(module)
    except ConfigError as error:
        return error.problems[0]
    batch = torch.linspace(-1, 1, 4 * 512).view(4, 512).roll(world.rank, 1), torch.arange(4)
    for _ in range(12):  # the first ten are exchanged whole
        wrapped.zero_grad()
        wrapped(batch)[0].backward()
    gradient = module.model.layers[0].weight.grad
    assert gradient is not None
    return gradient


def compressed_and_refused(world: World) -> list[Tensor | str]:
    refused = [
        compressed(world, bucket_cap_mb=1.0),
        compressed(world, bucket_cap_mb_list=[1.0, 4.0]),
    ]
    return [compressed(world), *refused, compressed(world, bucket_cap_mb_list=[])]


@pytest.mark.slow
def test_powersgd_over_gloo_has_all_gradients_in_one_bucket() -> None:
    """torch's hook hangs with several, or mixes them up; that nobody asks for any is the
    default."""
    found = on_ranks(3, compressed_and_refused)
    (first, *refused, again), *others = found
    assert torch.linalg.matrix_rank(first) == 1, "compressed"
    assert all(torch.equal(first, gradient) for gradient, *_ in others)
    # An empty list asks for no sizes. Two runs alike differ by 4.5e-8 of 0.086 on some processors.
    torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-6)
    refused += [problem for _, *problems, _ in others for problem in problems]
    assert len(refused) == 6 and all(
        "over gloo all gradients must be in one bucket" in each for each in refused
    )


@pytest.mark.slow
@pytest.mark.timeout(240)  # 25 models are compiled
def test_only_an_exchange_cuts_a_compiled_model() -> None:
    """One graph for each bucket, which they exchange beside the backward pass; not with
    tuning.buckets=one, nor with buckets that are smaller than the compiler allows."""
    counts = ((10**15, None, 1), (1, 10**15, 10**15), (None, 10**15, 10**15))
    by_flops = [
        {"bucket_cap_mb": None, "buckets": "by_flops", "step_flops": one} for one in counts
    ]  # rank 0's counts
    in_ddp = [{"find_unused_parameters": True}, {"static_graph": True}, {"comm_hook": "fp16"}]
    (one_process,) = on_ranks(1, graphs_and_gradients, [{}, *in_ddp])
    assert [graphs for graphs, _ in one_process] == [1, 1, 1, 1]
    for rank in on_ranks(
        3,
        graphs_and_gradients,
        [
            {},
            *({"bucket_cap_mb": size} for size in (0.5, 9)),
            {"bucket_cap_mb": None, "buckets": "one"},
            *by_flops,
        ],
        timeout_seconds=150.0,
    ):
        (many, _), (tiny, _), (single, _), (one, _), (long_steps, _), (short, _), (unknown, _) = (
            rank
        )
        assert many == short == unknown > 1 == tiny == single == one == long_steps
        for _, gradient in rank:
            torch.testing.assert_close(gradient, one_process[0][1])
