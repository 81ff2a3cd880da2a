"""strategy=ddp with one process, which wraps the model in no DDP: the numbers and the errors are
those of DDP."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_train.assembly.strategy import build_strategy
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit
from ddp_train.errors import ModelError
from ddp_train.parallel.ddp.config import DdpConfig
from ddp_train.parallel.naming_ddp import NamingDdp
from ddp_train.parallel.strategy import DistributedDataParallel, Single
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.task import ModelWithTask
from tests.support.jobs import config_of, job_of
from tests.support.ranks import on_ranks


class Scaled(torch.autograd.Function):
    """Has no gradient for its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return dy * weight, None


class Reached(nn.Module):
    """Batch norm, and a weight that the backward pass reaches with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 10)
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(Scaled.apply(self.norm(self.first(images.flatten(1))), self.weight))


class Spare(nn.Module):
    """A layer that is not used in every forward pass of the training."""

    def __init__(self, *used: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.spare = nn.Linear(64, 10)
        self.used = list(used)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return self.layer(flat) + (self.spare(flat) if self.used.pop(0) else 0)


def trained(
    world: World, with_ddp: bool, **sections: Any
) -> tuple[dict[str, Tensor], list[str], list[Any]]:
    config = config_of(
        world,
        data={"name": "digits", "limit": 131},
        train={"global_batch_size": 48, "epochs": 3, "max_grad_norm": 0.5, "accumulation_steps": 5},
        optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
        trusted_modules=["tests"],
        **sections,
    )
    with pytest.MonkeyPatch.context() as patch:
        if with_ddp:
            patch.setattr(DdpConfig, "is_plain", False)
        job = job_of(config, world)
    norms: list[Any] = []

    class Look:
        def due(self, job: Any) -> int:
            return job.step + 1

        def act(self, job: Any) -> None:
            norms.append(job.stepper.last_gradient_norm)

    job.hooks = [Look()]
    fit(job)
    kinds = [type(job.strategy).__name__, type(job.wrapped).__name__]
    return dict(job.module.model.state_dict()), kinds, norms


def both(world: World, sections: dict[str, Any]) -> list[Any]:
    return [trained(world, ddp, **sections) for ddp in (False, True)]


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"name": "cnn", "channels": 8, "norm": "batch"}},
        {
            "model": {"name": "cnn", "channels": 8, "norm": "batch"},
            "strategy": {"name": "ddp", "sync_bn": True},
        },
        {"model": {"name": "custom", "target": "tests.parallel.test_gradient_check.Reached"}},
    ],
)
def test_the_bits_are_those_of_ddp(sections: dict[str, Any]) -> None:
    """With a short last batch, whose four micro-batches are not all the same size, and clipping."""
    ((alone, ddp),) = on_ranks(1, both, {"strategy": {"name": "ddp"}} | sections)
    assert (alone[1], ddp[1]) == (
        ["Single", "ModelWithTask"],
        ["DistributedDataParallel", "NamingDdp"],
    )
    assert alone[2] == ddp[2] and len(alone[2]) == 9
    assert alone[0].keys() == ddp[0].keys() and all(
        torch.equal(alone[0][name], ddp[0][name]) for name in ddp[0]
    )


@pytest.mark.parametrize(
    ("size", "options", "kind"),
    [
        (1, {}, Single),
        (1, {"sync_bn": True, "bucket_cap_mb": 1.0}, Single),
        (1, {"comm_hook": "fp16"}, DistributedDataParallel),
        (1, {"find_unused_parameters": True}, DistributedDataParallel),
        (1, {"static_graph": True}, DistributedDataParallel),
        (2, {}, DistributedDataParallel),
    ],
)
def test_ddp_stays_where_it_does_more_than_average(
    size: int, options: dict[str, Any], kind: type
) -> None:
    world = World(size=size)
    assert (
        type(build_strategy(config_of(world, strategy={"name": "ddp", **options}), world, "cpu"))
        is kind
    )


def spared(world: World, used: list[bool], with_ddp: bool) -> tuple[str, int]:
    """The error of a run with two micro-batches for each step, and the optimizer steps that were
    done."""
    config = config_of(
        world,
        strategy={"name": "ddp"},
        data={"name": "digits", "limit": 96},
        train={"global_batch_size": 48, "epochs": 1, "accumulation_steps": 2},
    )
    module = ModelWithTask(Spare(*used), Classification(10), "cpu", None)
    with pytest.MonkeyPatch.context() as patch:
        if with_ddp:
            patch.setattr(DdpConfig, "is_plain", False)
        job = job_of(config, world, module=module.train())
    try:
        fit(job)
    except ModelError as error:
        return str(error), job.step
    return "", job.step


def all_spared(world: World, cases: list[list[bool]]) -> list[Any]:
    return [[spared(world, used, with_ddp) for with_ddp in (False, True)] for used in cases]


def test_missing_gradients_are_named_before_ddp_would() -> None:
    """As DDP does, it looks at the last micro-batch of a step. DDP raises its error in the step
    behind."""
    t = True
    f = False
    cases = [[t, t, t, t], [f, t, t, t], [t, f, t, t], [t, t, t, f], [f, f, f, f]]
    (found,) = on_ranks(1, all_spared, cases)
    error = "the loss does not depend on 2 parameters: spare.weight, spare.bias"
    expected = [(("", 2), ("", 2))] * 2 + [
        ((error, 0), (error, 1)),
        ((error, 1), ("", 2)),
        ((error, 0), (error, 1)),
    ]
    assert [tuple(pair) for pair in found] == expected


def test_hooks_keep_nothing_alive_and_leave_with_their_strategy() -> None:
    """The garbage collector does not see what a hook of a parameter holds."""
    module = ModelWithTask(Reached(), Classification(10), "cpu", None)
    strategy = Single("cpu", needs_all_gradients=True)
    strategy.wrap(module)
    first, parameter = weakref.ref(strategy.gradient_check), weakref.ref(module.model.weight)  # type: ignore[arg-type]
    strategy.wrap(module)
    assert all(len(one._post_accumulate_grad_hooks) == 1 for one in module.parameters())  # type: ignore[arg-type]
    del module, strategy
    gc.collect()
    assert first() is None and parameter() is None


def not_trained(world: World, model: str) -> str:
    sections: dict[str, Any] = {
        "data": {"name": "digits", "limit": 96},
        "trusted_modules": ["tests"],
    }
    with pytest.raises(ModelError) as raised:
        job_of(
            config_of(
                world,
                strategy={"name": "ddp"},
                model={"name": "custom", "target": model},
                **sections,
            ),
            world,
        )
    return str(raised.value)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (
            "tests.parallel.test_gradient_check.lazy",
            "lazy layers have 2 parameters without a shape yet: 1.weight, 1.bias",
        ),
        (
            "tests.parallel.test_gradient_check.frozen",
            "no parameter requires grad: the whole model is frozen",
        ),
    ],
)
def test_a_model_that_several_refuse_one_refuses_too(model: str, error: str) -> None:
    for ranks in (1, 2):
        assert set(on_ranks(ranks, not_trained, model)) == {error}


def refused_over_nccl(_: World) -> str:
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "nccl")
        with pytest.raises(ModelError) as refused:
            NamingDdp(module)
    return str(refused.value)


def test_sparse_gradients_are_refused_where_torch_cannot_exchange_them() -> None:
    """tests/sessions/test_on_gpus.py asks NCCL itself."""
    (said,) = set(on_ranks(2, refused_over_nccl))
    assert said.startswith("0: torch cannot exchange sparse gradients over NCCL")
