"""Activation checkpointing: the same run, to the last bit, with fewer bytes kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit
from ddp_train.errors import ConfigError
from ddp_train.performance.activation_checkpointing import checkpoint_blocks
from tests.support.jobs import config_of, job_of, largest_difference
from tests.support.ranks import on_ranks


class Block(nn.Module):
    """What a second forward pass could get wrong: dropout, batch norm, a power iteration, an
    operation in place."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Conv2d(channels, out, 3, padding=1))
        self.norm = nn.BatchNorm2d(out)
        self.drop = nn.Dropout(0.2)

    def forward(self, images: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.drop(self.norm(self.layer(images)).relu_()) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(1, 8), Block(8, 8), Block(8, 8)])
        self.last = nn.Linear(8 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images, scale=0.9)
        return self.last(images.flatten(1))


def weights_after(
    world: World, classes: list[str], sync_bn: bool, accumulation: int = 1
) -> dict[str, Tensor]:
    """And buffers, after two epochs that end with a short batch; trained with an evaluation in
    between."""
    config = config_of(
        world,
        model={"_target_": f"{__name__}.Net"},
        trusted_modules=["tests"],
        data={"name": "digits", "limit": 100},
        strategy={"name": "ddp", "sync_bn": sync_bn},
        train={"global_batch_size": 48, "epochs": 2, "accumulation_steps": accumulation},
        tuning={"activation_checkpointing": classes},
    )
    job = job_of(config, world)
    fit(job)
    return {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sync_bn", "accumulation"), [(1, False, 2), (3, True, 1)])
def test_a_run_ends_in_the_same_bits(ranks: int, sync_bn: bool, accumulation: int) -> None:
    plain, recomputed = (
        on_ranks(ranks, weights_after, given, sync_bn, accumulation) for given in ([], ["Block"])
    )
    for one, other in zip(plain, recomputed, strict=True):
        assert largest_difference(one, other) == 0
        assert other["blocks.0.norm.num_batches_tracked"] == 6 * accumulation - (
            2 if accumulation > 1 else 0
        )


def bytes_kept(model: Any) -> int:
    """For the backward pass."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.ones(4, 1, 8, 8))
    return kept


def test_blocks_keep_their_inputs_alone() -> None:
    plain = Net()
    recomputed = Net()
    checkpoint_blocks(recomputed, ["Block"])
    assert bytes_kept(recomputed) < bytes_kept(plain) / 2
    assert list(recomputed.state_dict()) == list(plain.state_dict()) and str(recomputed) == str(
        plain
    )
    assert [type(block).__mro__[1] for block in recomputed.blocks] == [Block] * 3


def test_two_backward_passes_have_the_same_gradients() -> None:
    model = Net()
    checkpoint_blocks(model, ["Block"])
    loss = model(torch.randn(4, 1, 8, 8)).square().sum()
    first, second = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    counted = [
        value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")
    ]
    assert counted == [1, 1, 1]


@pytest.mark.slow
def test_a_compiled_model_keeps_less_and_counts_a_batch_once() -> None:
    """One graph; its kernels are torch's own."""
    results = []
    kept = []
    for classes in ([], ["Block"]):
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            block.drop.p = 0.0  # the compiler draws otherwise
            nn.utils.parametrize.remove_parametrizations(block.layer, "weight")
        checkpoint_blocks(model, classes)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(torch.arange(256.0).view(4, 1, 8, 8)).square().sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
        kept.append(bytes_kept(compiled))
    assert kept[1] < kept[0] / 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_class_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        checkpoint_blocks(Net(), ["Block", "Bottleneck"])
    (problem,) = caught.value.problems
    assert problem.startswith(
        "tuning.activation_checkpointing=[Block,Bottleneck]: the model has no module of class "
    )
    assert "class Bottleneck; it has Block (3), " in problem and "Linear" not in problem
