"""LARS and LAMB against their papers; parameters that do not decay; rates and warm-up that follow
the batch."""

from __future__ import annotations

import collections
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50

from ddp_train.assembly.plan import warmup_steps
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit, train
from ddp_train.errors import ConfigError
from ddp_train.optim.lars_lamb.config import LambConfig, LarsConfig
from ddp_train.optim.lars_lamb.optimizers import Lamb, Lars
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import OptimizerConfig
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from ddp_train.tasks.mean_loss import RunningLoss
from tests.support.jobs import (
    config_of,
    job_of,
    largest_difference,
    learning_rates,
    optimizer_of,
    table,
    trained,
)
from tests.support.ranks import on_ranks

CALLS = {"lars": 30, "lamb": 55}
"""Of operators in a step of ResNet-50, 161 parameters. timm, with loops over them, calls 1,295 and
2,215."""
RATES = [0.1, 0.2, 0.4, 0.4, 0.3, 0.05]
OPTIMIZERS = [name for name in OPTIONS["optimizer"] if name != "custom"]


def lars_of_the_paper(
    weights: list[Tensor],
    gradients: list[Tensor | None],
    kept: list[dict],
    rate: float,
    group: dict[str, Any],
) -> None:
    """Algorithm 1 of arXiv:1708.03888, parameter by parameter."""
    for w, g, state in zip(weights, gradients, kept, strict=True):
        if g is None:
            continue
        decay = group["weight_decay"]
        local = 1.0
        if group["layer_adaptation"] and w.norm() > 0 and g.norm() > 0:
            local = (
                group["trust_coefficient"] * w.norm() / (g.norm() + decay * w.norm() + group["eps"])
            )
        v = group["momentum"] * state.get("v", torch.zeros_like(w)) + rate * local * (g + decay * w)
        state["v"] = v
        w -= v


def lamb_of_the_paper(
    weights: list[Tensor],
    gradients: list[Tensor | None],
    kept: list[dict],
    rate: float,
    group: dict[str, Any],
) -> None:
    """Algorithm 2 of arXiv:1904.00962v5, parameter by parameter."""
    beta1, beta2 = group["betas"]
    for w, g, state in zip(weights, gradients, kept, strict=True):
        t = state["t"] = state.get("t", 0) + 1
        if g is None:
            continue
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
        update = (
            m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
            + group["weight_decay"] * w
        )
        trust = 1.0
        if group["layer_adaptation"] and w.norm() > 0 and update.norm() > 0:
            trust = min((w.norm() / update.norm()).item(), group["max_trust_ratio"] or math.inf)
        w -= rate * trust * update


PAPERS = [
    (Lars, lars_of_the_paper, {"momentum": 0.9, "trust_coefficient": 0.02, "eps": 1e-3}),
    (Lars, lars_of_the_paper, {}),
    (Lamb, lamb_of_the_paper, {"eps": 1e-3, "betas": (0.8, 0.95)}),
    (Lamb, lamb_of_the_paper, {"max_trust_ratio": 0.7}),
]


def layers() -> list[list[Tensor]]:
    """Three groups of float64 parameters: an image filter in channels_last, a layer of zeros,
    vectors, a scalar."""
    torch.manual_seed(0)
    shapes = [[(5, 4), (3, 2), (4, 3, 3, 3), (2, 2), (3, 4)], [(4,), (7,), ()], [(6, 5), (2, 3, 4)]]
    made = [[torch.randn(shape, dtype=torch.float64) for shape in group] for group in shapes]
    made[0][1].zero_()
    made[0][2] = made[0][2].to(memory_format=torch.channels_last)
    return made


def gradients_of(weights: list[list[Tensor]]) -> Iterator[list[list[Tensor | None]]]:
    """One set for each rate: with layers that have none, zeros, strides of their own, and very
    different lengths."""
    for step in range(len(RATES)):
        made: list[list[Tensor | None]] = [
            [torch.randn_like(w) * 10.0**-i for i, w in enumerate(g)] for g in weights
        ]
        made[0][0] = torch.randn(4, 5, dtype=torch.float64).t()  # not contiguous
        made[0][3] = torch.zeros(2, 2, dtype=torch.float64)
        made[0][4] = None if step % 2 else made[0][4]
        made[1][0] = None if step == 0 else made[1][0]  # the first of its group
        yield made


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("lr_kind", ["number", "tensor"])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("cls", "paper", "more"), PAPERS)
def test_the_update_is_the_papers(
    cls: Any, paper: Any, more: dict, foreach: bool, lr_kind: str, flag: bool
) -> None:
    expected = layers()
    parameters = [[nn.Parameter(w.clone()) for w in group] for group in expected]
    kept: list[list[dict]] = [[{} for _ in group] for group in expected]
    plain = {"weight_decay": 0.0, "layer_adaptation": False}
    own: list[dict[str, Any]] = [{}, plain, {"weight_decay": 0.3}]
    rate = torch.zeros((), dtype=torch.float64) if lr_kind == "tensor" else 0.0
    groups = [{"params": group, **options} for group, options in zip(parameters, own, strict=True)]
    optimizer = cls(groups, lr=rate, weight_decay=0.01, foreach=foreach, **more)
    if flag:  # that could stop it, and does not
        optimizer.found_inf = torch.zeros(())
    for value, gradients in zip(RATES, gradients_of(expected), strict=True):
        for group, given, weights, of_group, states in zip(
            optimizer.param_groups, gradients, expected, parameters, kept, strict=True
        ):
            for parameter, gradient in zip(of_group, given, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            if isinstance(rate, Tensor):
                rate.fill_(value)  # as before the replay of a graph: the optimizer is not told
            else:
                group["lr"] = value
            paper(weights, given, states, value, group)
        optimizer.step()
        for parameter, gradient in zip(
            itertools.chain(*parameters), itertools.chain(*gradients), strict=True
        ):
            assert gradient is None or torch.equal(parameter.grad, gradient), (
                "gradients stay as they are"
            )
    for ours, theirs in zip(itertools.chain(*parameters), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cls", [Lars, Lamb])
@pytest.mark.parametrize("flag", [False, True])
def test_parameters_of_two_types_are_updated_each_as_its_own(cls: Any, flag: bool) -> None:
    apart = [
        [nn.Parameter(torch.full((3, 4), 0.5, dtype=kind))]
        for kind in (torch.float32, torch.bfloat16)
    ]
    together = [nn.Parameter(parameter.detach().clone()) for (parameter,) in apart]
    optimizers = [cls(group, lr=0.1) for group in [*apart, together]]
    for optimizer in optimizers:
        optimizer.found_inf = torch.zeros(()) if flag else None
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    assert all(torch.equal(one, other) for (one,), other in zip(apart, together, strict=True))
    assert not torch.equal(together[0], torch.full((3, 4), 0.5))


@pytest.mark.parametrize("flag", [False, True])
def test_lars_without_momentum_keeps_nothing(flag: bool) -> None:
    kept, without = (
        Lars([nn.Parameter(torch.ones(3, 4))], lr=0.1, momentum=value) for value in (1e-30, 0.0)
    )
    for optimizer in (kept, without):
        for _ in range(3):
            optimizer.found_inf = torch.zeros(()) if flag else None
            optimizer.param_groups[0]["params"][0].grad = torch.full((3, 4), 0.25)
            optimizer.step()
    one, other = (optimizer.param_groups[0]["params"][0] for optimizer in (kept, without))
    assert torch.equal(one, other) and not torch.equal(one, torch.ones(3, 4))
    assert without.state_dict()["state"] == {}


@pytest.mark.parametrize("cls", [Lars, Lamb])
def test_a_gradient_that_is_not_a_number_reaches_the_weights(cls: Any) -> None:
    """A trust ratio of 1 in its place would hide it from the checks."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    cls([parameter], lr=0.1).step()
    assert parameter.isnan().all()


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("cls", [Lars, Lamb])
def test_a_flag_on_the_device_leaves_weights_and_moments_alone(cls: Any, foreach: bool) -> None:
    """A step that it leaves out never was, whatever the gradients: the steps around it are those of
    a run without."""
    ends = []
    for stopped in ((), (0, 2, 3)):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4))]
        optimizer = cls(
            [{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1, foreach=foreach
        )
        optimizer.found_inf = torch.zeros(())
        seen = 0
        for step in range(6):
            if step not in (0, 2, 3) or stopped:
                for parameter in parameters:
                    parameter.grad = torch.full_like(
                        parameter, math.nan if step in stopped else 0.1 * seen + 0.1
                    )
                seen += step not in stopped
                optimizer.found_inf.fill_(step in stopped)
                optimizer.step()
        ends.append(
            [
                *parameters,
                *(value for state in optimizer.state.values() for value in state.values()),
            ]
        )
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize("cls", [Lars, Lamb])
def test_a_grad_scaler_leaves_steps_out(cls: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = cls([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True):
        before = parameter.detach().clone()
        scaler.scale(parameter.sum() * (math.inf if bad else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        parameter.grad = None
        assert torch.equal(parameter, before) == bad
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(optimizer)


@pytest.mark.parametrize("name", ["lars", "lamb", "sgd"])
def test_the_guard_of_devices_needs_no_wait(name: str) -> None:
    """Played on the CPU: a NaN sets the flag, and the weights stay from then on."""
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = optimizer_of(
        [parameter], OPTIONS["optimizer"][name](), "fused" if name == "sgd" else "foreach"
    )
    optimizer.param_groups[0]["initial_lr"] = 0.1
    guard = DeviceNonFiniteCheck(optimizer, RunningLoss())
    for step, gradient in enumerate((1.0, math.nan, 1.0)):
        before = parameter.detach().clone()
        parameter.grad = torch.full_like(parameter, gradient)
        assert guard.allows(step, None)
        optimizer.step()
        assert torch.equal(parameter, before) == (step > 0)
    assert guard.steps_skipped == 2


class Calls(TorchDispatchMode):
    """Counts the operators that are called, views included; the work inside one call is not
    seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [LarsConfig(), LambConfig(), LambConfig(max_trust_ratio=10.0)])
@pytest.mark.parametrize("lr_kind", ["number", "tensor"])
@pytest.mark.parametrize("flag", [False, True])
def test_a_step_has_few_calls_and_reads_nothing(
    config: OptimizerConfig, lr_kind: str, flag: bool
) -> None:
    """On the meta device, where no tensor has a value: reading one fails."""
    with torch.device("meta"):
        model = resnet50()
        rate = torch.tensor(0.1) if lr_kind == "tensor" else 0.1
        found_inf = torch.zeros(()) if flag else None
    library = torch.library.Library(
        "aten", "IMPL", "Meta"
    )  # torch has no such kernel; it would do nothing
    library.impl("_fused_sgd_", lambda *given, **named: None)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = optimizer_of(model.parameters(), config, "foreach")
    optimizer.found_inf = found_inf
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()  # makes the state
    with Calls() as calls:
        optimizer.step()
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 161
    assert 0 < sum(calls.seen.values()) <= CALLS[config.name], calls.seen
    with pytest.raises(RuntimeError, match="meta"):  # what the test relies on
        torch.ones((), device="meta").item()


def run_of(name: str, **more: Any) -> Any:
    """A job of 8 steps on a table, whose rate does not depend on where it ends."""
    train = {"global_batch_size": 24, "epochs": 2}
    config = config_of(
        World(),
        strategy={"name": "single"},
        model={"name": "mlp", "hidden": 4},
        train=train,
        schedule={"name": "constant"},
        optimizer={"name": name, **more},
    )
    return job_of(config, World(), (table(96), table(12)))


@pytest.mark.parametrize("name", ["lars", "lamb", "muon"])
@pytest.mark.parametrize("decay_norm_and_bias", [True, False])
def test_a_run_that_is_resumed_ends_in_the_same_bits(name: str, decay_norm_and_bias: bool) -> None:
    whole, first, second = (run_of(name, decay_norm_and_bias=decay_norm_and_bias) for _ in range(3))
    fit(whole)
    train(first, iter(first.batches), until=3)
    content = io.BytesIO()
    torch.save({"model": first.module.state_dict(), **first.stepper.state()}, content)
    content.seek(0)
    saved = torch.load(content, weights_only=True)
    second.module.load_state_dict(saved["model"])
    second.stepper.load_state(saved)
    second.stepper.continue_from(3)
    second.step = 3
    rest = iter(second.batches)
    for _ in range(3):  # those of the steps that are done
        next(rest)
    train(second, rest, until=8)
    for one, other in zip(whole.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_and_biases_decay_or_not(name: str) -> None:
    """Without gradients, what moves is what decays."""
    for decay in (False, True):
        net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 3))
        before = [parameter.detach().clone().fill_(0.5) for parameter in net.parameters()]
        for parameter, start in zip(net.parameters(), before, strict=True):
            parameter.data.copy_(start)
            parameter.grad = torch.zeros_like(parameter)
        config = OPTIONS["optimizer"][name](weight_decay=0.1, decay_norm_and_bias=decay)
        optimizer_of(net.parameters(), config, "foreach").step()
        moved = [
            not torch.equal(p, start) for p, start in zip(net.parameters(), before, strict=True)
        ]
        assert moved == [decay or start.ndim > 1 for start in before]


def test_lars_and_lamb_alone_spare_norms_and_biases_by_default() -> None:
    outside = {name for name in OPTIMIZERS if not OPTIONS["optimizer"][name]().decay_norm_and_bias}
    assert outside == {"lars", "lamb"}
    vectors = optimizer_of([nn.Parameter(torch.ones(3))], LarsConfig(), "foreach")
    assert len(vectors.param_groups) == 1 and not vectors.param_groups[0]["layer_adaptation"]


@pytest.mark.parametrize(
    ("scaling", "rate", "shown"),
    [
        ("none", 0.1, "lr 0.1, "),
        ("linear", 0.3, "lr 0.3 = 0.1 x 24 / 8, "),
        ("sqrt", 0.1 * math.sqrt(3), "lr 0.173205 = 0.1 x sqrt(24 / 8), "),
    ],
)
def test_the_rate_follows_the_global_batch(scaling: str, rate: float, shown: str) -> None:
    """On any number of processes, with any accumulation: it is the batch of an optimizer step that
    counts."""
    base = {"lr_base_batch": 8} if scaling != "none" else {}
    for processes, accumulation in ((1, 1), (1, 4), (3, 2)):
        config = config_of(
            World(0, processes, 0, processes),
            model={"name": "mlp"},
            train={"global_batch_size": 24, "accumulation_steps": accumulation, "epochs": 1},
            optimizer={"name": "sgd", "lr": 0.1, "lr_scaling": scaling, **base},
        )
        asked = config.optimizer.lr
        config.strategy = OPTIONS["strategy"][
            "single"
        ]()  # a job of one process of them, without a group
        job = job_of(config, World(0, processes, 0, processes), (table(48), table(12)))
        assert job.stepper.base_lrs == pytest.approx([rate], rel=1e-15)
        assert plan_rows(PlanFacts(config, job.plan, job.module.task, job.stepper.base_lrs[0]))[
            "optimizer"
        ].startswith(f"sgd, {shown}")
        assert config.optimizer.lr == asked == 0.1, "what is frozen is what was asked for"


@pytest.mark.parametrize(
    ("epochs", "accumulation", "steps"), [(1.0, 1, 5), (1.0, 4, 5), (1.5, 1, 8), (0.01, 1, 0)]
)
def test_a_warm_up_in_epochs_is_counted_in_optimizer_steps(
    epochs: float, accumulation: int, steps: int
) -> None:
    """100 samples in batches of 24: five steps per epoch, of which the last is short."""
    config = config_of(
        World(),
        strategy={"name": "single"},
        model={"name": "mlp"},
        train={"global_batch_size": 24, "accumulation_steps": accumulation, "epochs": 3},
        schedule={"name": "constant", "warmup_epochs": epochs},
    )
    job = job_of(config, World(), (table(100), table(12)))
    rising = [(step + 1) / (steps + 1) for step in range(steps)]
    base_lr = job.stepper.base_lrs[0]
    assert learning_rates(job, 10) == pytest.approx(
        [base_lr * factor for factor in (*rising, *[1.0] * (10 - steps))]
    )
    assert warmup_steps(config.schedule, job.plan) == steps
    assert plan_rows(PlanFacts(config, job.plan, job.module.task, 1.0, warmup_steps=steps))[
        "optimizer"
    ].endswith(f"warm-up {steps} steps")


def test_a_warm_up_that_outlasts_the_run_is_refused() -> None:
    config = config_of(
        World(),
        strategy={"name": "single"},
        model={"name": "mlp"},
        train={"global_batch_size": 24, "epochs": 3, "max_steps": 6},
        schedule={"name": "constant", "warmup_epochs": 2.0},
    )
    with pytest.raises(
        ConfigError,
        match=r"schedule.warmup_epochs=2 \(8 steps\): the run ends before the warm-up does, after 6 steps",
    ):
        job_of(config, World(), (table(96), table(12)))


def weights_after(world: World, name: str, accumulation: int) -> dict[str, Tensor]:
    """In float64, after two epochs of which each ends with a short batch."""
    config = config_of(
        world,
        model={"name": "mlp", "hidden": 4},
        train={"global_batch_size": 24, "accumulation_steps": accumulation, "epochs": 2},
        optimizer={"name": name, "lr": 0.5, "lr_scaling": "sqrt", "lr_base_batch": 12},
        schedule={"name": "polynomial", "warmup_epochs": 0.5},
        tuning={"precision": "fp64"},
    )
    return trained(world, config, (table(100), table(12)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_three_processes_end_in_the_weights_of_one(name: str) -> None:
    (alone,) = on_ranks(1, weights_after, name, 4)
    for weights in on_ranks(3, weights_after, name, 2):
        assert largest_difference(alone, weights) < 1e-10


def accuracy_on_digits(world: World, optimizer: dict[str, Any]) -> float | None:
    config = config_of(
        world,
        train={"global_batch_size": 384, "epochs": 15},
        optimizer=optimizer,
        schedule={"name": "polynomial", "warmup_epochs": 2.0},
    )
    job = job_of(config, world)
    fit(job)
    score = evaluate(job.evaluation)
    return score and score.metrics["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "lars", "lr": 1.0, "trust_coefficient": 0.02},
        {"name": "lamb", "lr": 0.005, "lr_scaling": "sqrt", "lr_base_batch": 24},
    ],
)
def test_the_digits_are_learned_from_batches_of_384(optimizer: dict[str, Any]) -> None:
    """60 steps, four per epoch, some 3 s of training each where nothing else runs much."""
    for accuracy in on_ranks(2, accuracy_on_digits, optimizer):
        assert accuracy is not None and accuracy >= 0.95
