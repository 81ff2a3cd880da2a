"""Muon: against its definition, torch's own and AdamW; what it takes; the same on any number of
processes."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18, vit_b_16

from ddp_train.distributed.world import World
from ddp_train.engine.loop import train
from ddp_train.errors import ConfigError
from ddp_train.models.gpt.network import Gpt
from ddp_train.optim.muon import optimizer as muon
from ddp_train.optim.muon.config import MuonConfig
from ddp_train.optim.muon.optimizer import TOGETHER, Muon, hidden_matrices, orthogonalised
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from tests.support.jobs import config_of, job_of, largest_difference, table
from tests.support.ranks import on_ranks


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Six matrices of two shapes, one of them tall, a convolution, vectors, an embedding and an
    output layer."""
    torch.manual_seed(0)
    hidden = [nn.Linear(6, 6, dtype=dtype) for _ in range(TOGETHER + 1)]
    conv = nn.Conv2d(3, 4, 3, dtype=dtype)
    tall = nn.Linear(6, 9, dtype=dtype)
    return nn.Sequential(
        nn.Embedding(5, 6, dtype=dtype), *hidden, conv, tall, nn.Linear(9, 2, dtype=dtype)
    )


def with_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
            parameter.dtype
        )


def by_hand(matrix: Tensor, steps: int) -> Tensor:
    """Of its singular values alone: U p(p(...S)) V^T."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ vt


@pytest.mark.parametrize("shape", [(6, 6), (4, 27), (9, 5)])
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.randn(
        3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = orthogonalised(matrices, 5)
    for one, other in zip(found, matrices, strict=True):
        torch.testing.assert_close(one, by_hand(other, 5), rtol=0, atol=1e-10)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3, "close to orthogonal"
    assert not orthogonalised(torch.zeros(2, 3, 4), 5).any()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_the_definition_and_of_adamw(adjust: str, nesterov: bool) -> None:
    module = net()
    other = net()
    inside = hidden_matrices(module, dict(module.named_parameters()))
    groups = muon.apart({"params": list(module.parameters())}, inside.__contains__)
    arguments = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 0.003}
    optimizer = Muon(groups, nesterov=nesterov, adjust_lr=adjust, **arguments)
    pairs = list(zip(module.parameters(), other.parameters(), strict=True))
    rest = [theirs for ours, theirs in pairs if ours not in inside]
    adamw = torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.1)
    momenta = {theirs: torch.zeros_like(theirs) for ours, theirs in pairs if ours in inside}
    assert len(momenta) == TOGETHER + 3 and optimizer.orthogonalised_parameters == sum(
        one.numel() for one in momenta
    )
    for step in range(4):
        with_gradients(module, step), with_gradients(other, step)
        optimizer.step()
        adamw.step()
        with torch.no_grad():
            for weight, momentum in momenta.items():
                assert weight.grad is not None
                momentum.mul_(0.9).add_(weight.grad, alpha=0.1)
                update = 0.1 * weight.grad + 0.9 * momentum if nesterov else momentum
                rows, columns = weight.flatten(1).shape
                factor = math.sqrt(max(1, rows / columns))
                if adjust == "match_rms_adamw":
                    factor = 0.2 * math.sqrt(max(rows, columns))
                weight.mul_(1 - 0.02 * 0.1)
                weight.sub_(0.02 * factor * by_hand(update.flatten(1), 5).view_as(weight))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_flag_leaves_out_a_step(foreach: bool) -> None:
    """What fp16 and a loss that is not finite set on GPUs: the step before and the step after are
    as without it."""
    plain = net(torch.float32)
    flagged = net(torch.float32)
    one = Muon(plain.parameters(), weight_decay=0.1)
    other = Muon(flagged.parameters(), weight_decay=0.1, foreach=foreach)
    other.found_inf = torch.zeros(())
    for step in range(3):
        with_gradients(plain, step), with_gradients(flagged, step)
        one.step(), other.step()
    moments = [tensor.clone() for state in other.state.values() for tensor in state.values()]
    weights = [parameter.detach().clone() for parameter in flagged.parameters()]
    for parameter in flagged.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    other.found_inf.fill_(1)
    other.step()
    after = [tensor for state in other.state.values() for tensor in state.values()]
    assert all(map(torch.equal, moments, after)) and all(
        map(torch.equal, weights, flagged.parameters())
    )
    with_gradients(plain, 3), with_gradients(flagged, 3)
    other.found_inf.zero_()
    one.step(), other.step()
    assert largest_difference(plain.state_dict(), flagged.state_dict()) < 1e-5
    other.grad_scale = torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]  as GradScaler does
    with pytest.raises(RuntimeError, match="unscale_"):
        other.step()


def test_torchs_own_differs_by_bfloat16_alone() -> None:
    """torch.optim.Muon takes matrices of two dimensions, and orthogonalises in bfloat16
    everywhere."""
    ours = nn.Linear(8, 16, bias=False)
    theirs = nn.Linear(8, 16, bias=False)
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    one = Muon(ours.parameters(), lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(3):
        with_gradients(ours, step), with_gradients(theirs, step)
        one.step(), other.step()
    moved = (theirs.weight - before).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved


@pytest.mark.slow
def test_what_muon_takes() -> None:
    def names(model: nn.Module, *globs: str) -> set[str]:
        inside = hidden_matrices(model, dict(model.named_parameters()), globs)
        return {name for name, one in model.named_parameters() if one in inside}

    gpt = names(Gpt(50, 8, layers=1, heads=2, width=16))
    assert gpt and all(name.endswith("weight") and "block" in name for name in gpt), (
        "the head is tied to the embedding"
    )
    convolutions = names(resnet18())
    assert (
        "conv1.weight" in convolutions
        and "fc.weight" not in convolutions
        and len(convolutions) == 20
    )
    transformer = names(vit_b_16())
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" in transformer
    assert not {"class_token", "encoder.pos_embedding", "heads.head.weight"} & transformer
    assert names(net(), "1.*t", "7.weight") == {"1.weight", "7.weight"}, "globs replace the rule"


@pytest.mark.parametrize(
    ("model", "globs", "problem"),
    [
        (
            nn.Linear(3, 2),
            [],
            "optimizer=muon: the model has no matrix between its input and its output; use adamw",
        ),
        (
            net(),
            ["1.wieght"],
            (
                r"optimizer.matrices=\[1.wieght\]: matches no parameter that trains; did you mean"
                r" 1.weight"
            ),
        ),
        (
            net(),
            ["1.*"],
            "optimizer.matrices: 1.bias has 1 dimension, Muon needs two or more; use globs",
        ),
    ],
)
def test_what_cannot_be_taken_is_told(model: nn.Module, globs: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        hidden_matrices(model, dict(model.named_parameters()), globs)


def test_rates_of_groups() -> None:
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    optimizer = Muon(
        [
            {"params": first.parameters()},
            {"params": second.parameters(), "lr": 0.01},
            {"params": third.parameters(), "lr": 0.01, "adamw_lr": 0.5},
        ],
        lr=0.02,
        adamw_lr=0.001,
    )
    rates = [(group["use_muon"], group["lr"]) for group in optimizer.param_groups]
    assert rates == [
        (True, 0.02),
        (False, 0.001),
        (True, 0.01),
        (False, 0.0005),
        (True, 0.01),
        (False, 0.5),
    ]
    with pytest.raises(ValueError, match="two and more dimensions"):
        Muon([{"params": [first.bias], "use_muon": True}])


def test_an_exchange_that_fails_has_changed_nothing() -> None:
    """What survivors of a rank save is the state before the step."""
    module = net()
    optimizer = Muon(module.parameters())
    with_gradients(module, 0)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    state = [tensor.clone() for moments in optimizer.state.values() for tensor in moments.values()]
    with_gradients(module, 1)
    lost = mock.patch.object(
        muon, "from_all_ranks", side_effect=RuntimeError("Connection closed by peer")
    )
    with (
        mock.patch.object(muon, "place_among_ranks", return_value=(1, 3)),
        lost,
        pytest.raises(RuntimeError),
    ):
        optimizer.step()
    after = [tensor for moments in optimizer.state.values() for tensor in moments.values()]
    assert all(map(torch.equal, before, module.parameters())) and all(
        map(torch.equal, state, after)
    )


def stepped(world: World, dtype: torch.dtype) -> tuple[dict[str, Tensor], int]:
    """Weights after three steps with the same gradients everywhere, and how many batches this rank
    computed."""
    module = net(dtype)
    optimizer = Muon(module.parameters())
    computed = 0

    def counted(matrices: Tensor, steps: int) -> Tensor:
        nonlocal computed
        computed += 1
        return orthogonalised(matrices, steps)

    with mock.patch.object(muon, "orthogonalised", counted):
        for step in range(3):
            with_gradients(module, step)
            optimizer.step()
    moments = optimizer.state_dict()["state"]
    state = {f"{n}.{name}": value for n, one in moments.items() for name, value in one.items()}
    return {**module.state_dict(), **state}, computed


def trained(world: World) -> dict[str, Tensor]:
    """A job of 8 steps."""
    config = config_of(
        world,
        strategy={"name": "single" if world.size == 1 else "ddp"},
        model={"name": "mlp", "hidden": 12},
        train={
            "global_batch_size": 24,
            "epochs": 2,
            "accumulation_steps": 1 if world.size == 1 else 2,
        },
        optimizer={"name": "muon"},
        tuning={"precision": "fp64"},
    )
    job = job_of(config, world, (table(100), table(12)))
    train(job, iter(job.batches), until=8)
    return {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}


def on_ranks_both(world: World) -> tuple[tuple[dict[str, Tensor], int], dict[str, Tensor]]:
    return stepped(world, torch.float32), trained(world)


@pytest.mark.slow
def test_each_rank_computes_its_share_and_all_have_the_same_bits() -> None:
    """Four ranks share six batches; the weights of a whole job are those of one process."""
    alone, batches = stepped(World(), torch.float32)
    whole = trained(World())
    for ranks in (3, 4):
        found = on_ranks(ranks, on_ranks_both)
        computed = [count for (_, count), _ in found]
        assert sum(computed) == batches and max(computed) < batches
        for (weights, _), of_job in found:
            assert largest_difference(alone, weights) == 0
            assert largest_difference(whole, of_job) < 1e-10


def test_the_plan_tells_what_muon_takes() -> None:
    config: Any = config_of(
        World(),
        optimizer={"name": "muon", "lr_scaling": "linear", "lr_base_batch": 8},
        strategy={"name": "single"},
        model={"name": "mlp", "hidden": 8},
        train={"global_batch_size": 24},
    )
    job = job_of(config, World(), (table(48), table(12)))
    built = job.stepper.optimizer
    task = job.module.task
    rows = plan_rows(PlanFacts(config, job.plan, task, job.stepper.base_lrs[0], optimizer=built))
    rule = "muon, lr 0.06 = 0.02 x 24 / 8 for 112 parameters, AdamW's 0.0009 for the rest"
    assert rows["optimizer"].startswith(rule), rows["optimizer"]
    assert MuonConfig().lr == 0.02 and job.stepper.base_lrs == pytest.approx([0.06, 0.0009])
