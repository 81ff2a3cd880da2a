"""Optimizers and schedules against torch's own; the optimizer step; what a NaN on one rank does to
all."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import ArraySource
from ddp_train.data.finite import non_finite_samples
from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit, train
from ddp_train.errors import NonFiniteLossError
from ddp_train.kernels.split_fused import in_parts
from ddp_train.optim import nan_guard
from ddp_train.optim.config import AdadeltaConfig, AdamConfig, AdamWConfig, RmspropConfig, SgdConfig
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck, NonFiniteCheck
from ddp_train.optim.schedules.config import (
    ConstantConfig,
    CosineConfig,
    OneCycleConfig,
    PolynomialConfig,
    StepConfig,
)
from ddp_train.optim.stepper import Stepper
from ddp_train.tasks import mean_loss
from ddp_train.tasks.mean_loss import Mean, RunningLoss
from tests.optim.test_large_batch import Calls
from tests.support.jobs import config_of, constant, factor_of, job_of, optimizer_of, table
from tests.support.ranks import on_ranks

STEPS = 60


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (ConstantConfig(), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        (StepConfig(step_size=7, gamma=0.5), lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
        (CosineConfig(), lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        (
            CosineConfig(final_factor=0.1),
            lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.1),
        ),
        (PolynomialConfig(power=2.0), lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0)),
        (OneCycleConfig(), lambda o: lr_scheduler.OneCycleLR(o, 1.0, STEPS)),
        (
            OneCycleConfig(pct_start=0.5, div_factor=5, final_div_factor=10),
            lambda o: lr_scheduler.OneCycleLR(
                o, 1.0, STEPS, pct_start=0.5, div_factor=5, final_div_factor=10
            ),
        ),
    ],
)
def test_a_schedule_is_torchs_own(config: Any, theirs: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = theirs(optimizer)
    ours = factor_of(config, STEPS, 10)
    for step in range(STEPS):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "config",
    [
        c(warmup_steps=10)
        for c in (ConstantConfig, StepConfig, CosineConfig, PolynomialConfig, OneCycleConfig)
    ],
)
def test_warm_up_is_linear_and_the_schedule_runs_after_it(config: Any) -> None:
    ours = factor_of(config, STEPS, 10)
    assert [ours(step) for step in range(10)] == pytest.approx(
        [(step + 1) / 11 for step in range(10)]
    )
    without = factor_of(type(config)(), STEPS - 10, 10)
    assert [ours(step) for step in range(10, STEPS)] == [
        without(step) for step in range(STEPS - 10)
    ]


@pytest.mark.parametrize(
    "config",
    [CosineConfig(), PolynomialConfig(power=0.9), OneCycleConfig(), StepConfig(), ConstantConfig()],
)
def test_steps_behind_the_end_have_a_rate_too(config: Any) -> None:
    """A rehearsal of captured steps may be longer than what is left of the plan."""
    ours = factor_of(config, STEPS, 10)
    assert all(
        isinstance(ours(STEPS + more), float) and ours(STEPS + more) >= 0 for more in range(1, 12)
    )


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        SgdConfig(nesterov=True, weight_decay=0.1),
        SgdConfig(momentum=0.0),
        AdamConfig(),
        AdamWConfig(),
    ],
)
def test_an_update_in_parts_has_the_bits_of_the_whole(
    config: Any, tensor_rate: bool, stopped: bool
) -> None:
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Linear(70, 100)
        )
        optimizer = optimizer_of(model.parameters(), config, "fused", recorded)
        for step in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if tensor_rate:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.5 / (step + 1))
            if stopped and step == 3:
                optimizer.found_inf = torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]
            with (
                Calls() as calls,
                mock.patch.object(torch.Tensor, "__repr__", side_effect=AssertionError("read")),
            ):
                optimizer.step()
            assert not recorded or "aten._local_scalar_dense.default" not in calls.seen, (
                "nothing is read"
            )
        moments = [
            value for state in optimizer.state_dict()["state"].values() for value in state.values()
        ]
        results.append([*(p.detach() for p in model.parameters()), *moments])
    assert len(results[0]) == len(results[1]) >= 4
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_parameters_of_two_types_are_left_to_torch() -> None:
    parameters = [
        nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.float32, torch.bfloat16)
    ]
    assert type(optimizer_of(parameters, SgdConfig(), "fused", captured=True)) is torch.optim.SGD


@pytest.mark.parametrize("config", [SgdConfig(), AdamConfig()])
def test_moments_of_another_memory_format_are_taken_over(config: Any) -> None:
    """torch's fused kernels refuse moments whose strides are not those of the weights."""
    steppers = []
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 8, 3).to(memory_format=layout)  # pyright: ignore[reportCallIssue]
        optimizer = optimizer_of(layer.parameters(), config, "foreach")
        steppers.append(
            Stepper(optimizer, constant(optimizer), torch.amp.GradScaler(enabled=False))
        )

    def step(stepper: Stepper, seed: int) -> None:
        for parameter in stepper.parameters:
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.grad = torch.empty_like(parameter).copy_(drawn)
        stepper.step()

    first, going_on, whole = steppers
    step(first, 1)
    step(whole, 1)
    step(whole, 2)
    for parameter, trained in zip(going_on.parameters, first.parameters, strict=True):
        parameter.data.copy_(trained)
    going_on.load_state(copy.deepcopy(first.state()))
    step(going_on, 2)
    for parameter, expected in zip(going_on.parameters, whole.parameters, strict=True):
        assert torch.equal(parameter, expected)
        moments = [
            value
            for value in going_on.optimizer.state[parameter].values()
            if value.shape == parameter.shape
        ]
        assert moments and all(moment.stride() == parameter.stride() for moment in moments)


def test_resumed_stepper_has_the_moments_of_the_checkpoint_alone() -> None:
    """Learning rate and decay are those of the config that resumes."""
    steppers = []
    for config in (SgdConfig(lr=0.1, weight_decay=0.5), SgdConfig(lr=0.2, weight_decay=0.01)):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = optimizer_of([parameter], config, "foreach")
        steppers.append(
            Stepper(optimizer, constant(optimizer), torch.amp.GradScaler(enabled=False))
        )
    saved, resumed = steppers
    saved.parameters[0].grad = torch.ones(3)
    saved.step()

    resumed.load_state(copy.deepcopy(saved.state()))
    resumed.continue_from(1)

    (group,) = resumed.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.2, 0.01)
    (moments,) = resumed.optimizer.state.values()
    (expected,) = saved.optimizer.state.values()
    assert torch.equal(moments["momentum_buffer"], expected["momentum_buffer"])


def test_the_page_clips_the_gradients_of_the_mean() -> None:
    """The hook of docs/guides/optimizers.md, where units are not samples."""
    page = (Path(__file__).parents[2] / "docs/guides/optimizers.md").read_text()
    (code,) = re.findall(r"```python\n(# clip\.py.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    stepper = Stepper(optimizer, constant(optimizer), torch.amp.GradScaler(enabled=False))
    job = SimpleNamespace(
        model=layer,
        optimizer=optimizer,
        observe=stepper.observers.append,
        stop_observing=stepper.observers.remove,
    )
    four_samples = MicroBatch(0, 0, np.arange(4), 4, scale=1 / 4, is_last=True)

    with names["ClipValue"](job, "", World(), value=0.15):
        loss = layer(torch.tensor([[1.0, 20.0]])).sum()
        stepper.backward(loss, torch.tensor(10.0, dtype=torch.float64), four_samples)
        stepper.step()

    assert layer.weight.tolist() == [pytest.approx([-0.1, -0.15])]


def test_parts_share_memory_and_fill_a_launch() -> None:
    large = torch.zeros(640, 1000)
    small = torch.zeros(7)
    turned = torch.zeros(50, 40).T
    (parts, others), origin = in_parts(
        [[large, small, turned], [large.clone(), small.clone(), turned.clone()]]
    )
    assert [origin.count(index) for index in range(3)] == [32, 1, 1] and len(parts) == len(
        others
    ) <= 36
    parts[31].fill_(1.0)
    assert large.sum() == parts[31].numel() and parts[33] is turned
    assert len(in_parts([[torch.zeros(1500, 1500), small]])[1]) == 2, "enough for the GPU as it is"


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize(
    "config",
    [
        SgdConfig(nesterov=True, weight_decay=0.1),
        AdamConfig(),
        AdamWConfig(),
        AdadeltaConfig(),
        RmspropConfig(momentum=0.5),
    ],
)
def test_optimizers_update_as_torchs_plain_loops_do(config: Any, implementation: str) -> None:
    if implementation == "fused" and config.name in ("adadelta", "rmsprop"):
        pytest.skip(f"torch has no fused {config.name}; config.check refuses it")
    weights = {}
    for kind in ("loop", implementation):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
        optimizer = optimizer_of(model.parameters(), config, kind)
        for step in range(5):
            model(torch.full((3, 5), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[kind] = torch.cat(
            [parameter.detach().flatten() for parameter in model.parameters()]
        )
    torch.testing.assert_close(weights["loop"], weights[implementation], rtol=1e-5, atol=1e-6)
    assert optimizer.defaults["fused" if implementation == "fused" else "foreach"] == (
        implementation != "loop"
    )


def poisoned_run(
    world: World, kind: str, accumulation: int, extra: dict[str, Any]
) -> tuple[Any, ...]:
    """Trains on a table where one sample spoils the loss. Returns the error, the step, and whether
    weights moved."""
    good = table(96)
    bad = good.inputs.clone()
    poisoned = 40
    bad[poisoned] = {"nan": math.nan, "inf": math.inf}[kind]
    source = ArraySource(bad, good.targets)
    train = {"global_batch_size": 24, "accumulation_steps": accumulation, "epochs": 1}
    train |= {key: value for key, value in extra.items() if key != "strategy"}
    strategy = {"name": extra.get("strategy", "ddp")}
    config = config_of(world, model={"name": "mlp", "hidden": 4}, train=train, strategy=strategy)
    job = job_of(config, world, (source, good))
    before: list[torch.Tensor] = []

    class Watch:
        def due(self, job: Any) -> int:
            return job.step + 1

        def act(self, job: Any) -> None:
            before[:] = [parameter.detach().clone() for parameter in job.module.parameters()]

    Watch().act(job)
    job.hooks = [Watch()]
    try:
        fit(job)
    except NonFiniteLossError as error:
        moved = any(
            not torch.equal(a, b) for a, b in zip(before, job.module.parameters(), strict=True)
        )
        step = next(s for s in range(4) if poisoned in job.plan.global_batch(s))
        guilty = None
        for rank in range(world.size):
            micro_batches = [
                p
                for p in type(job.plan)(**{**vars_of(job.plan), "rank": rank}).micro_batches()
                if p.step == step
            ]
            if any(
                poisoned in micro_batch.indices[: micro_batch.num_real]
                for micro_batch in micro_batches
            ):
                guilty = rank
        return str(error), error.rank, job.step, moved, step, guilty
    return ("no error",)


def vars_of(plan: Any) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "accumulation", "extra"),
    [
        ("nan", 1, {}),
        ("nan", 4, {}),
        ("inf", 1, {}),
        ("nan", 2, {"max_grad_norm": 1.0}),
        ("nan", 1, {"strategy": "ordered"}),
        ("inf", 1, {"strategy": "ordered", "max_grad_norm": 1.0}),
    ],
)
def test_bad_loss_on_one_rank_stops_all_and_names_the_rank(
    kind: str, accumulation: int, extra: dict
) -> None:
    for ranks in (
        1,
        4 if "strategy" in extra else 3,
    ):  # virtual shards are dealt out to a power of two
        for result in on_ranks(ranks, poisoned_run, kind, accumulation, extra):
            message, rank, steps_done, moved, step, guilty = result
            assert rank == guilty and steps_done == step and not moved
            assert f"step {step}: the loss is not finite on rank {guilty}" in message


def run_past_a_bad_loss(world: World) -> tuple[int, int, bool, list[float]]:
    good = table(96)
    bad = good.inputs.clone()
    bad[40] = math.nan
    train = {"global_batch_size": 24, "epochs": 2, "on_non_finite": "skip", "log_every_steps": 1}
    config = config_of(
        world, model={"name": "mlp", "hidden": 4}, train=train, schedule={"name": "constant"}
    )
    job = job_of(config, world, (ArraySource(bad, good.targets), good))
    before = [p.detach().clone() for p in job.module.parameters()]
    moved = []
    means = []

    class Watch:
        def due(self, job: Any) -> int:
            return job.step + 1

        def act(self, job: Any) -> None:
            moved.append(
                any(
                    not torch.equal(a, b)
                    for a, b in zip(before, job.module.parameters(), strict=True)
                )
            )
            before[:] = [parameter.detach().clone() for parameter in job.module.parameters()]
            means.append(job.stepper.mean_loss().value)

    job.hooks = [Watch()]
    fit(job)
    bad_steps = [step for step in range(8) if 40 in job.plan.global_batch(step)]
    assert [step for step in range(8) if not moved[step]] == bad_steps, (
        "those steps, and no others, are left out"
    )
    return (
        job.step,
        len(bad_steps),
        all(map(torch.isfinite, torch.cat([b.flatten() for b in before]))),
        means,
    )


def test_a_bad_loss_can_be_skipped_on_all_ranks_alike() -> None:
    for ranks in (1, 3):
        results = on_ranks(ranks, run_past_a_bad_loss)
        for steps, bad_steps, finite, means in results:
            assert (steps, bad_steps, finite) == (8, 2, True)
            assert sum(map(math.isnan, means)) == 2
        assert str([r[3] for r in results[1:]]) == str([results[0][3]] * (ranks - 1)), (
            "the same numbers on all ranks"
        )


def skip_all_of_an_epoch(world: World) -> tuple[str, int, int]:
    """The first step of the second epoch is good: steps in a row are counted, not all."""
    train = {"global_batch_size": 24, "epochs": 3, "on_non_finite": "skip"}
    job = job_of(config_of(world, model={"name": "mlp"}, train=train), world, (table(96), table(8)))
    sum_of_losses = job.module.task.sum_of_losses

    def bad_but_once(outputs: Any, targets: Any) -> Any:
        losses = sum_of_losses(outputs, targets)
        return losses if job.step == 3 else losses * math.nan

    job.module.task.sum_of_losses = bad_but_once
    with pytest.raises(NonFiniteLossError) as raised:
        fit(job)
    return str(raised.value), job.step, job.stepper.check_finite.skipped


def test_an_epoch_of_skipped_steps_ends_the_run() -> None:
    for said, step, skipped in on_ranks(3, skip_all_of_an_epoch):
        assert (step, skipped) == (7, 7)
        assert "step 7: the loss is not finite" in said
        assert "the last 4 steps were all skipped (train.on_non_finite=skip)" in said


def test_weights_that_are_not_finite_are_never_saved() -> None:
    """The gradient of sqrt at 0 is infinite while the loss is finite: the last step of a run may
    spoil the weights."""
    world = World()
    config = config_of(
        world, strategy={"name": "single"}, model={"name": "mlp"}, train={"global_batch_size": 8}
    )
    job = job_of(config, world, (table(16), table(16)))
    job.stepper.check()
    with torch.no_grad():
        next(iter(job.module.parameters()))[0, 0] = math.nan
    with pytest.raises(
        NonFiniteLossError, match="after step 0 the weights or their norm are not finite"
    ):
        job.stepper.check()


def test_bad_loss_without_a_bad_gradient_is_seen() -> None:
    """x + nan has the gradient of x: the loss itself must poison the exchange."""
    world = World()
    config = config_of(
        world, strategy={"name": "single"}, model={"name": "mlp"}, train={"global_batch_size": 8}
    )
    job = job_of(config, world, (table(16), table(16)))
    job.module.task.sum_of_losses = lambda outputs, targets: outputs.sum() + math.nan
    with pytest.raises(NonFiniteLossError):
        fit(job)


@pytest.mark.parametrize(("optimizer", "clip"), [("sgd", None), ("adamw", None), ("sgd", 1.0)])
def test_device_keeps_a_bad_loss_out_of_the_weights(optimizer: str, clip: float | None) -> None:
    """As on GPUs; torch's fused optimizers on the CPU obey the same flag."""
    bad = table(96)
    bad.inputs[40] = math.nan
    config = config_of(
        World(),
        strategy={"name": "single"},
        model={"name": "mlp", "hidden": 4},
        train={"global_batch_size": 24, "epochs": 1, "max_grad_norm": clip},
        optimizer={"name": optimizer},
        tuning={"optimizer": "fused"},
    )
    job = job_of(config, World(), (bad, table(24)))
    step = next(step for step in range(4) if 40 in job.plan.global_batch(step))
    stepper: Any = job.stepper
    stepper.check_finite = DeviceNonFiniteCheck(stepper.optimizer, stepper.losses)
    batches = iter(job.batches)
    train(job, batches, until=step)
    stepper.check_finite.check_losses(step)
    before = [parameter.detach().clone() for parameter in stepper.parameters]
    train(job, batches, until=4)
    assert job.step == 4, "nobody waited"
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.parameters, strict=True))
    for look in (stepper.mean_loss, stepper.check):
        with pytest.raises(
            NonFiniteLossError,
            match=f"step {step}: the loss is not finite on rank 0; samples of this rank: .*40",
        ) as caught:
            look()
        assert caught.value.step == step, "and not the one that was done last"
        assert caught.value.remedy.startswith("look for NaN in the inputs") == (step == 0), (
            "nothing was learned yet"
        )


def test_sample_with_nan_is_named_among_many() -> None:
    inputs = torch.ones(60, 1)
    inputs[47] = math.nan
    source = ArraySource(inputs, torch.ones(60, 1))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "initial_lr": 1.0}])
    for culprit, found in ((47, "47"), (None, "finite: 0, 1, ")):
        losses = RunningLoss()
        check = NonFiniteCheck(optimizer, losses)
        check.non_finite_samples = partial(non_finite_samples, source, False)
        numbers = np.arange(48) if culprit else np.arange(40)
        losses.add(math.nan, 48, MicroBatch(0, 3, numbers, 48, 1.0, is_last=True))
        weight.grad = torch.full((1,), math.nan)
        with pytest.raises(NonFiniteLossError) as caught:
            check.allows(3, None)
        detail = str(caught.value)
        if culprit:
            assert detail.endswith(
                "of the 48 samples of this rank these have NaN or infinite data: 47"
            )
            assert caught.value.remedy == "correct those samples, or leave them out"
        else:
            assert found in detail and detail.endswith("and 20 more, all in the log of this rank")


@pytest.mark.parametrize(
    ("bad", "mixes", "found"),
    [
        (
            (11, 12, 14),
            True,
            "of the 4 samples of this rank these have NaN or infinite data: 12, 14",
        ),
        ((11,), True, "the sample that is mixed into the first of them is not: 11"),
        ((11,), False, "the data of the 4 samples of this rank are finite: 12, 13, 14, 15"),
    ],
)
def test_sample_before_is_named_if_it_alone_is_the_cause(
    bad: tuple[int, ...], mixes: bool, found: str
) -> None:
    inputs = torch.ones(60, 1)
    inputs[list(bad)] = math.nan
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "initial_lr": 1.0}])
    losses = RunningLoss()
    check = NonFiniteCheck(optimizer, losses)
    source = ArraySource(inputs, torch.ones(60, 1))
    check.non_finite_samples = partial(non_finite_samples, source, mixes)
    numbers = np.arange(12, 16)
    losses.add(
        math.nan, 4, MicroBatch(0, 3, numbers, 4, 1.0, is_last=True, sample_before=numbers[0] - 1)
    )
    weight.grad = torch.full((1,), math.nan)
    with pytest.raises(NonFiniteLossError) as caught:
        check.allows(3, None)
    assert str(caught.value).endswith(found)


def test_skipped_first_step_leaves_no_garbage_in_the_momentum() -> None:
    """torch's fused SGD would leave it as the memory was."""
    weight = torch.nn.Parameter(torch.ones(70_000))
    optimizer = optimizer_of([weight], SgdConfig(lr=0.1, momentum=0.9), "fused")
    # as a GradScaler sets it
    weight.grad = torch.full_like(weight, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert (weight == 1).all() and not optimizer.state[weight]["momentum_buffer"].any()
    weight.grad = torch.ones_like(weight)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.9))


def test_clipping_comes_after_accumulation_and_is_torchs() -> None:
    world = World()
    sources = (table(48), table(10))
    results = []
    for accumulation in (1, 4):
        train = {
            "global_batch_size": 48,
            "accumulation_steps": accumulation,
            "epochs": 1,
            "max_grad_norm": 0.01,
        }
        config = config_of(
            world,
            strategy={"name": "single"},
            model={"name": "mlp"},
            train=train,
            optimizer={"name": "sgd", "momentum": 0.0, "lr": 1.0},
            tuning={"precision": "fp64"},
        )
        job = job_of(config, world, sources)
        start = torch.cat(
            [parameter.detach().flatten().clone() for parameter in job.module.parameters()]
        )
        fit(job)
        moved = (
            torch.cat([parameter.detach().flatten() for parameter in job.module.parameters()])
            - start
        )
        results.append(moved)
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3), (
            "lr 1 moves by the clipped norm"
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_dropout_is_keyed_by_seed_step_and_rank() -> None:
    def drawn(rank: int, seed: int) -> list[np.ndarray]:
        from ddp_train.data.rng import StepSeed

        seed_step = StepSeed(seed, rank, "cpu")
        draws = []
        for step in (0, 1, 0):
            seed_step(step)
            draws.append(torch.rand(8).numpy())
        return draws

    a = drawn(0, 0)
    assert (a[0] == a[2]).all() and (a[0] != a[1]).any()
    assert (a[0] != drawn(1, 0)[0]).any() and (a[0] != drawn(0, 1)[0]).any()


def micro_batch(count: int) -> MicroBatch:
    return MicroBatch(
        epoch=0, step=0, indices=np.arange(max(count, 1)), num_real=count, scale=1.0, is_last=True
    )


def test_losses_of_scalars_and_replicas_add_up() -> None:
    losses = RunningLoss()
    losses.add(3.0, 2, micro_batch(2))  # as on the CPU
    losses.add(torch.tensor([1.0, 2.0, 4.0, 5.0]), 8, micro_batch(8))  # DataParallel on four GPUs
    losses.add(
        torch.tensor([6.0, 7.0, 8.0]), 5, micro_batch(5)
    )  # and a short batch, which fills three of them
    losses.add(torch.tensor(100.0), 0, micro_batch(0))  # a stand-in does not count
    assert losses.mean("cpu") == Mean(36, 15)


def test_losses_on_a_device_are_summed_in_few_kernels() -> None:
    losses = RunningLoss()
    calls = Calls()
    for number in range(100):
        losses.add(torch.tensor(float(number)), 4, micro_batch(4))
    with calls:
        assert losses.mean("cpu") == Mean(4950, 400)
    assert calls.seen.total() - calls.seen["aten.view.default"] < 20, "not some for each loss"


def look_at_losses(world: World) -> list[tuple[bool, Any, int, int]]:
    """On rank 1 the loss of step 1 is bad, or none is."""
    found = []
    for scaled, bad in itertools.product((False, True), (False, True)):
        optimizer = torch.optim.SGD(
            [{"params": [nn.Parameter(torch.zeros(1))], "initial_lr": 1.0}], fused=True
        )
        losses = RunningLoss()
        check = DeviceNonFiniteCheck(optimizer, losses, scaled)
        for step in range(3):
            value = math.nan if bad and world.rank == 1 and step == 1 else float(step)
            losses.add(
                torch.tensor(value), 2, MicroBatch(0, step, np.arange(2), 2, 1.0, is_last=True)
            )
        check.steps_skipped.fill_(2 * bad)  # as the device does, all steps from the bad one on
        said = ""
        exchange = mock.Mock(wraps=from_all_ranks)
        in_mean = mock.patch.object(mean_loss, "from_all_ranks", exchange)
        with in_mean, mock.patch.object(nan_guard, "from_all_ranks", exchange):
            try:
                said = losses.mean("cpu", [check.to_exchange(3)])
                exchanges = exchange.call_count
            except NonFiniteLossError as error:
                said = f"{error.step} {error.rank}"
                exchanges = 0
        found.append((bad, said, exchanges, len(losses.passes)))
    return found


def test_bad_losses_on_a_device_show_in_the_exchange_of_losses() -> None:
    for found in on_ranks(3, look_at_losses):
        good = (False, Mean(9, 18), 1, 0)
        bad = (True, "1 1", 0, 3)
        assert found == [good, bad, good, bad], "the losses are kept where one was bad"


class Gated(nn.Module):
    """The bias of the gate is the smallest parameter, and its gradient is zero: the gate lets
    nothing through."""

    def __init__(self, bad_rank: int, bad_call: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)
        self.head = nn.Linear(8, 10)
        nn.init.constant_(self.gate.bias, -100.0)
        self.bad_rank = bad_rank
        self.bad_call = bad_call
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        outputs = self.head(rows) + torch.relu(self.gate(rows))
        is_bad = self.calls == self.bad_call and torch.distributed.get_rank() == self.bad_rank
        return outputs * math.nan if is_bad else outputs


def run_past_a_closed_gate(world: World, on_device: bool, skip: bool) -> tuple[Any, ...]:
    train = {"global_batch_size": 24, "epochs": 1, "on_non_finite": "skip" if skip else "stop"}
    model = {
        "_target_": f"{__name__}.Gated",
        "bad_rank": 1,
        "bad_call": 3,
    }
    tuning = {"optimizer": "fused"} if on_device else {}
    source = ArraySource(
        torch.randn(96, 8, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 10
    )
    config = config_of(
        world, model=model, train=train, tuning=tuning, data={"_target_": f"{__name__}.Gated"}
    )
    job = job_of(config, world, (source, source))
    stepper: Any = job.stepper
    if on_device:
        stepper.check_finite = DeviceNonFiniteCheck(stepper.optimizer, stepper.losses)
    try:
        fit(job)
        stepper.mean_loss()
    except NonFiniteLossError as error:
        said: Any = error.rank, error.step
    else:
        said = "trained"
    return said, job.step, all(bool(parameter.isfinite().all()) for parameter in stepper.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_device", "skip", "expected"),
    [
        (False, False, ((1, 2), 2, True)),
        (False, True, ("trained", 4, True)),
        (True, False, ((1, 2), 4, True)),
    ],
)
def test_a_layer_that_gives_no_gradient_hides_no_bad_loss(
    on_device: bool, skip: bool, expected: Any
) -> None:
    """A ReLU that lets nothing through gives zero for a gradient that is NaN."""
    assert on_ranks(3, run_past_a_closed_gate, on_device, skip) == [expected] * 3
