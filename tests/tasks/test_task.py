"""The exact mean over the units of a global batch, however it is split, for every task."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.assembly.plan import build_plan
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit
from ddp_train.errors import TaskError
from ddp_train.tasks.score import Score
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tasks.user_task import complete
from ddp_train.tensor_tree import map_tensors
from tests.support.jobs import config_of, job_of, largest_difference
from tests.support.ranks import on_ranks
from tests.support.task_samples import CASES, IDS, NEXT, SAMPLES, WeightedNorm

GLOBAL_BATCH = 16


STEPS = 6


def as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def mean_of_batch(name: str, model: nn.Module, data: Any) -> Tensor:
    """The mean over the units of a whole batch, as the formula of the task says."""
    if name == "custom":
        total, weight = WeightedNorm().loss(model, map_tensors(as_double, data))
        return total / weight
    inputs, targets = map(as_double, data)
    outputs = model(inputs)
    factors = torch.tensor([1.0, 2.0, 3.0]).double()
    if name == "classification":
        each = functional.cross_entropy(
            outputs, targets, weight=factors, label_smoothing=0.1, reduction="none"
        )
        return each.mean()  # torch's own mean would divide by the factors
    if name == "multilabel":
        return functional.binary_cross_entropy_with_logits(outputs, targets, pos_weight=factors)
    if name == "regression":
        return functional.huber_loss(outputs, targets)
    if name == "language_model":
        outputs = outputs.flatten(0, 1)
        targets = targets.flatten()
    return functional.cross_entropy(outputs, targets)


def by_hand(name: str) -> dict[str, Tensor]:
    """Plain PyTorch: each global batch in one pass on one process."""
    job = made(World(), name, "fp64", 1, strategy={"name": "single"})
    model = job.module.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_of_batch(
            name, model, CASES[name][2].get_batch(job.plan.global_batch(step), 0)
        ).backward()
        optimizer.step()
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def made(world: World, name: str, precision: str, accumulation: int, **more: Any) -> Any:
    kind, task, source = CASES[name]
    config = config_of(
        world,
        **{
            "task": task,
            "model": {"_target_": "tests.support.task_samples.Head", "kind": kind},
            "data": {"_target_": "tests.support.task_samples.Ragged"},
            "train": {
                "global_batch_size": GLOBAL_BATCH,
                "accumulation_steps": accumulation,
                "epochs": 3,
                "max_steps": STEPS,
            },
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "constant"},
            "tuning": {"precision": precision, "num_workers": 0},
            **more,
        },
    )
    return job_of(config, world, (source, source))


def trained(job: Any) -> tuple[dict[str, Tensor], float, Score]:
    """Weights, the mean loss of the last epoch, and the score."""
    fit(job)
    weights = {key: tensor.clone() for key, tensor in job.module.model.state_dict().items()}
    return weights, job.stepper.mean_loss().value, evaluate(job.evaluation)


def ladder(world: World) -> dict[tuple[str, str, int], Any]:
    rungs = itertools.product(CASES, ("fp64", "fp32"), (1, 4))
    return {
        (name, precision, accumulation): trained(made(world, name, precision, accumulation))
        for name, precision, accumulation in rungs
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_loss_is_the_mean_over_all_units_on_any_world() -> None:
    expected = {name: by_hand(name) for name in CASES}
    (alone,) = on_ranks(1, ladder)
    for name, weights in expected.items():
        untrained = made(
            World(), name, "fp64", 1, strategy={"name": "single"}
        ).module.model.state_dict()
        assert largest_difference(weights, untrained) > 1e-2, "the comparison would be idle"
    for ranks in (1, 2, 3, 4):
        for found in on_ranks(ranks, ladder, timeout_seconds=200) if ranks > 1 else [alone]:
            for (name, precision, accumulation), (weights, loss, score) in found.items():
                what = (ranks, name, precision, accumulation)
                tolerance = 1e-10 if precision == "fp64" else 1e-5
                assert largest_difference(weights, expected[name]) < tolerance, what
                reference = alone[name, precision, 1]
                assert loss == pytest.approx(reference[1], rel=tolerance), what
                assert score.metrics == pytest.approx(reference[2].metrics, rel=tolerance), what


def in_order(world: World) -> tuple[dict[str, Tensor], Score]:
    ordered = {"name": "ordered", "virtual_shards": 4}
    jobs = [made(world, name, "fp32", 1, strategy=ordered) for name in ("language_model", "custom")]
    return [trained(job) for job in jobs]


@pytest.mark.slow
def test_ordered_reduction_has_the_same_bits_for_any_units() -> None:
    (alone,) = on_ranks(1, in_order)
    for ranks in (2, 4):
        for found in on_ranks(ranks, in_order):
            for (weights, loss, score), (expected, its_loss, its_score) in zip(
                found, alone, strict=True
            ):
                assert largest_difference(weights, expected) == 0
                assert (loss, score) == (its_loss, its_score)


def test_a_global_batch_without_units_changes_nothing() -> None:
    source = ArraySource(IDS[:8], torch.full_like(NEXT[:8], -100))
    config = config_of(
        World(),
        strategy={"name": "single"},
        task={"name": "language_model"},
        model={"_target_": "tests.support.task_samples.Head", "kind": "text"},
        train={"global_batch_size": 8, "epochs": 1},
        optimizer={"name": "sgd"},
    )
    job = job_of(config, World(), (source, source))
    before = {key: tensor.clone() for key, tensor in job.module.model.state_dict().items()}
    fit(job)
    assert largest_difference(before, job.module.model.state_dict()) == 0
    assert math.isnan(job.stepper.mean_loss().value), "there is nothing to take a mean of"


def test_loss_that_eval_mode_lacks_is_named() -> None:
    """Detectors of torchvision return losses in train mode, and boxes in eval mode."""

    class Detector(nn.Module):
        def forward(self, images: Tensor) -> Any:
            return {"loss": images.sum()} if self.training else [images]

    class Detection:
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return sum(model(batch).values()), len(batch)

        def score(self, model: nn.Module, batch: Any) -> Any:
            return {"iou": (1.0, len(batch))}

    module = ModelWithTask(Detector(), complete(Detection()), "cpu", None)
    assert module.loss_of(torch.ones(2, 1))[0] == 2
    with pytest.raises(
        TaskError,
        match=r"loss\(\) of the task Detection failed in eval mode: AttributeError: 'list' object",
    ) as caught:
        module.eval().score(torch.ones(2, 1))
    assert "return 'loss': (sum, units) from score()" in caught.value.remedy


def test_the_ladder_meets_uneven_batches_and_stand_ins() -> None:
    train = {"global_batch_size": GLOBAL_BATCH, "accumulation_steps": 4}
    sizes = []
    for rank in range(4):
        world = World(rank, 4, rank, 4)
        plan = build_plan(config_of(world, train=train), world, SAMPLES)
        sizes += [micro_batch.num_real for micro_batch in plan.micro_batches()]
    assert set(sizes) == {0, 1}
