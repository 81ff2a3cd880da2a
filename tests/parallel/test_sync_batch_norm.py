"""Batch norm over the samples of three processes, unevenly split, against torch's own over the
whole batch in one."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.strategy import build_strategy
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.distributed.world import World
from ddp_train.errors import ModelError
from ddp_train.parallel.sync_batch_norm import (
    TOGETHER,
    SyncBatchNorm,
    cost_of,
    synchronised,
    synchronised_on,
)
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.task import ModelWithTask
from tests.support.jobs import config_of, largest_difference, table, trained
from tests.support.ranks import on_ranks


class WithRelu(nn.BatchNorm2d):
    """A layer as users write them, whose forward does more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class ByHand(nn.BatchNorm2d):
    """A layer as timm's BatchNormAct2d, whose forward calls no other layer's."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        parameters = self.weight, self.bias
        return functional.batch_norm(input, *statistics, *parameters, self.is_training(), 0.1)

    def is_training(self) -> bool:
        return self.training


class Frozen(ByHand):
    """A layer that normalises by its running statistics in train mode too."""

    def is_training(self) -> bool:
        return False


FEATURES = 3
BATCHES = 3
SHAPES = {"1d": (), "1d sequence": (5,), "2d": (4, 5), "with ReLU": (4, 5), "3d": (2, 3, 4)}
LAYERS = {
    "1d": nn.BatchNorm1d,
    "1d sequence": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "with ReLU": WithRelu,
    "3d": nn.BatchNorm3d,
}


def layer_of(kind: str, options: dict[str, Any]) -> nn.Module:
    layer = LAYERS[kind](FEATURES, **options).double()
    if layer.affine:
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
        nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(6))
    return layer


def batch_of(kind: str, number: int, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs far from zero, where a sum of squares would lose seven digits; and the gradients of
    the outputs."""
    generator = torch.Generator().manual_seed(number)
    inputs, gradients = torch.randn(
        2, samples, FEATURES, *SHAPES[kind], generator=generator, dtype=torch.float64
    )
    return 1000 + inputs, gradients


def normalised(
    world: World, kind: str, options: dict[str, Any], split: list[int], sync: bool
) -> dict[str, Tensor]:
    """Some training batches and one in evaluation: outputs, gradients of this rank's inputs and of
    weights, statistics.

    A rank whose part is 0 takes sample 0 as a stand-in, which must not count.
    """
    model: nn.Module = nn.Sequential(layer_of(kind, options))
    model = synchronised(model) if sync else model
    assert isinstance(model[0], SyncBatchNorm) == sync
    found: dict[str, Tensor] = {}
    for number in range(BATCHES):
        inputs, gradients = (
            part.split(split)[world.rank] for part in batch_of(kind, number, sum(split))
        )
        real = len(inputs) > 0
        if not real:
            inputs, gradients = (part[:1] for part in batch_of(kind, number, sum(split)))
            gradients = gradients * 0
        inputs = inputs.clone().requires_grad_()
        with TrainingStep(counts=real):
            outputs = model(inputs)
            outputs.backward(gradients)
        assert inputs.grad is not None
        if real:
            found |= {
                f"outputs {number}": outputs.detach(),
                f"input gradients {number}": inputs.grad,
            }
        else:
            assert not inputs.grad.any(), "a stand-in has no influence on anything"
    model.eval()
    found["evaluated"] = model(batch_of(kind, 99, 4)[0]).detach()
    weights = {
        f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    return found | weights | {f"state {name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("split", [[4, 1, 6], [5, 0, 2]], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("1d", {}),
        ("1d sequence", {}),
        ("2d", {}),
        ("with ReLU", {}),
        ("3d", {}),
        ("2d", {"momentum": None}),
        ("2d", {"affine": False, "eps": 0.1}),
        ("2d", {"track_running_stats": False}),
    ],
)
def test_three_uneven_ranks_are_one_process_with_the_whole_batch(
    kind: str, options: dict[str, Any], split: list[int]
) -> None:
    expected = normalised(World(), kind, options, [sum(split)], sync=False)
    results = on_ranks(3, normalised, kind, options, split, True)
    for name, whole in expected.items():
        if name.startswith(("outputs", "input")):
            ours = torch.cat([result[name] for result in results if name in result])
        elif name.startswith("gradient"):  # of what each rank's samples contribute
            ours = torch.stack([result[name] for result in results]).sum(0)
        else:
            ours = results[0][name]
            assert all(torch.equal(ours, result[name]) for result in results)
        # The largest number in here is a mean of 1,000: 1e-12 of it.
        torch.testing.assert_close(
            ours, whole, rtol=1e-12, atol=1e-12 * max(1.0, whole.abs().max().item()), msg=name
        )
    assert results[0].keys() >= {name for name in expected if name.startswith("state")}


def alone(world: World, samples_of_rank_0: int) -> str:
    layer = synchronised(nn.BatchNorm1d(2))
    try:
        with TrainingStep(counts=world.rank == 0):
            layer(torch.ones(samples_of_rank_0, 2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_single_value_is_refused_on_all_ranks() -> None:
    assert all("more than 1 value per channel" in said for said in on_ranks(3, alone, 1))
    assert on_ranks(3, alone, 2) == ["no error"] * 3


def half_precision(world: World) -> tuple[torch.dtype, torch.dtype, float]:
    layer = synchronised(nn.BatchNorm1d(2))
    inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(world.rank)).bfloat16() + 10
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(inputs)
    return outputs.dtype, layer.running_mean.dtype, outputs.float().mean().item()


def test_half_precision_stays_and_statistics_are_in_single() -> None:
    results = on_ranks(3, half_precision)
    assert all(result[:2] == (torch.bfloat16, torch.float32) for result in results)
    assert abs(sum(result[2] for result in results)) < 0.02


def test_what_is_converted_keeps_its_tensors_names_and_mode() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), nn.ModuleDict({"norm": nn.BatchNorm1d(3, eps=0.1, momentum=0.3)})
    ).eval()
    before = copy.copy(model.state_dict(keep_vars=True))
    converted = synchronised(model)
    after = converted.state_dict(keep_vars=True)
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    layer = converted[1]["norm"]
    assert (layer.eps, layer.momentum, layer.training) == (0.1, 0.3, False)


def halved(_: nn.Module, inputs: object, outputs: Tensor) -> Tensor:
    return outputs / 2


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, WithRelu, Frozen])
def test_layers_remain_the_same_objects_of_their_class(device: str, cls: type[nn.Module]) -> None:
    layer = cls(FEATURES)
    layer.register_forward_hook(halved)
    model = synchronised_on(device, nn.Sequential(layer, nn.Identity(), layer))
    assert model[0] is layer and model[2] is layer
    assert isinstance(layer, TOGETHER) and isinstance(layer, cls)
    if cls.__module__.startswith("torch"):
        assert "BatchNorm" in type(layer).__name__
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    inputs = torch.randn(4, FEATURES, *[2] * (0 if cls is nn.BatchNorm1d else 2))
    if cls is nn.BatchNorm3d:
        inputs = inputs[..., None]
    for copied in (layer, copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert type(copied) is type(layer)
        expected = cls(FEATURES)(inputs) / 2
        torch.testing.assert_close(copied(inputs), expected, rtol=1e-4, atol=1e-5)


def test_other_layers_are_not_touched() -> None:
    for layer in (nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3), nn.LayerNorm(3)):
        assert type(synchronised(copy.deepcopy(layer))) is type(layer)
    gpu_layer = nn.SyncBatchNorm(3)
    assert type(synchronised_on("cuda:0", gpu_layer)) is nn.SyncBatchNorm
    ours = synchronised(nn.BatchNorm2d(3))
    assert isinstance(synchronised_on("cuda:0", ours), SyncBatchNorm), "the user's choice stays"


def test_lazy_layers_must_have_seen_a_batch() -> None:
    layer = nn.LazyBatchNorm1d(affine=False, track_running_stats=False)
    with pytest.raises(ModelError, match="LazyBatchNorm1d") as caught:
        synchronised(nn.Sequential(layer))
    assert "call the model once" in caught.value.remedy
    layer(torch.randn(4, 3))
    assert isinstance(synchronised(layer), SyncBatchNorm)


def by_hand(world: World) -> str:
    inputs = torch.randn(4, FEATURES, 2, 2)
    synchronised(Frozen(FEATURES))(inputs)
    with pytest.raises(ModelError) as caught:
        synchronised(nn.Sequential(ByHand(FEATURES)))(inputs)
    return f"{caught.value}; {caught.value.remedy}"


def test_a_layer_that_takes_its_own_statistics_is_refused() -> None:
    for said in on_ranks(3, by_hand):
        assert "ByHand.forward does not call super().forward" in said
        assert "run.wrap(model, sync_batch_norm=False)" in said


def test_what_it_costs_is_said_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    assert cost_of(model, "run.wrap(model)") == ""
    said = cost_of(synchronised(model), "strategy.sync_bn=false")
    assert said.startswith("2 batch norms over all processes: ")
    assert ". With strategy.sync_bn=false each process uses its own" in said


def ladder_run(world: World, samples: int, sync_bn: bool) -> dict[str, Tensor]:
    config = config_of(
        world,
        model={"name": "cnn", "norm": "batch"},
        data={"name": "digits", "limit": samples},
        train={"global_batch_size": 48, "epochs": 5, "max_steps": 12, "max_grad_norm": 1.0},
        strategy={"name": "ddp", "sync_bn": sync_bn},
        optimizer={"name": "sgd", "lr": 0.02},
        tuning={"precision": "fp64"},
    )
    return trained(world, config)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [101, 50])  # the last batch of 5, or of 2: fewer than ranks
def test_the_parity_ladder_holds_with_batch_norm(samples: int) -> None:
    (reference,) = on_ranks(1, ladder_run, samples, False)
    assert largest_difference(reference, on_ranks(3, ladder_run, samples, False)[0]) > 1e-3, (
        "without synchronisation the statistics of three ranks must differ, else this test says"
        " nothing"
    )
    for ranks in (1, 2, 3, 4):
        results = on_ranks(ranks, ladder_run, samples, True)
        assert largest_difference(results[0], results[-1]) == 0, "ranks of one run differ"
        assert largest_difference(reference, results[0]) < 1e-10, ranks


def compiled(world: World) -> float:
    torch.manual_seed(0)
    config = config_of(world, strategy={"name": "ddp", "sync_bn": True})
    inputs, labels = table(24).get_batch(torch.arange(world.rank, 24, 3).numpy(), 0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module = ModelWithTask(model, Classification(), "cpu", None)
    losses = []
    module = build_strategy(config, world, "cpu").place(module)
    for _ in range(2):  # eager, then compiled
        loss, _ = module((inputs, labels))
        loss.backward()
        losses.append(loss.item() + model[0].weight.grad.sum().item())
        module.zero_grad()
        module.compile(backend="aot_eager")  # everything of torch.compile but the C++ compiler
    return abs(losses[0] - losses[1])


@pytest.mark.slow
def test_it_works_inside_a_compiled_model() -> None:
    assert max(on_ranks(3, compiled, timeout_seconds=100)) < 1e-5
