"""Processes whose weights have come apart are told so before a checkpoint is written."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ddp_train.distributed import replicas
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.distributed.world import World
from ddp_train.errors import ModelError
from tests.support.commands import SMALL, THREE, fatal_lines, read, run
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.timeout(120)


def swapped(weights: torch.Tensor) -> None:
    """Exchange two numbers: the norm stays what it is."""
    flat = weights.data.view(-1)
    flat[[3, 50_000]] = flat[[50_000, 3]]


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "nothing": lambda weights: None,
    "two numbers": swapped,
    "all signs": lambda weights: weights.data.neg_(),
    "one number": lambda weights: weights.data[7, 7].add_(weights.data.norm() * 3e-6),
}


def said(world: World, dtype: torch.dtype, name: str) -> str:
    """What is said of a layer of 90,000 weights that rank 2 alone has changed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(300, 300)).to(dtype)
    net.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=dtype)))
    net.register_parameter("count", nn.Parameter(torch.tensor(world.rank), requires_grad=False))
    if world.rank == 2:
        CHANGES[name](net.get_parameter("1.weight"))
    try:
        check_same_weights(net)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_weights_of_one_norm_that_differ_are_named(dtype: torch.dtype, name: str) -> None:
    words = re.compile(
        r"1.weight differs by about \de[+-]\d\d of its norm between rank 0 and rank 2"
    )
    for answer in on_ranks(3, said, dtype, name):
        if name == "nothing":
            assert answer == ""
        else:
            assert words.search(answer), answer


def drifted(world: World, share: float, is_other_processor: bool) -> str:
    net = nn.Linear(300, 300, device="cpu").double()
    torch.manual_seed(0)
    net.reset_parameters()
    net.weight.data.mul_(1 + share * world.rank)
    kind = float(world.rank if is_other_processor else 0)
    with mock.patch.object(replicas, "kind_of_processor", return_value=kind):
        try:
            check_same_weights(net)
        except ModelError as error:
            return str(error)
    return ""


def said_on_another_default_device(world: World) -> str:
    with torch.device("meta"):
        return drifted(world, 0.0, False)


def test_default_device_of_a_script_does_not_matter() -> None:
    assert on_ranks(2, said_on_another_default_device) == ["", ""]


def test_rounding_of_other_processors_is_no_difference() -> None:
    assert on_ranks(2, drifted, 1e-6, True) == ["", ""]
    assert all("weight differs by about" in answer for answer in on_ranks(2, drifted, 1e-6, False))
    assert all("the norm of weight is" in answer for answer in on_ranks(2, drifted, 1e-3, True))


def test_sums_differ_by_about_the_norm_of_a_difference() -> None:
    torch.manual_seed(0)
    for shape in [(5,), (4096,), (4097,), (70, 64, 3, 3), (3000, 3000)]:
        before = torch.randn(shape, dtype=torch.float64)
        apart = [torch.randn(shape, dtype=torch.float64) for _ in range(20)]
        sums = replicas.sums_of([before, *(before + one for one in apart)])
        shares = [
            abs(float(one - sums[0])) / float(other.norm())
            for one, other in zip(sums[1:], apart, strict=True)
        ]
        assert 0.3 < sum(shares) / 20 < 1.6 and min(shares) > 1e-3


class Noise:
    """A hook that changes the weights, on each process by other numbers."""

    def __init__(self, job: Any, run_dir: Path, world: World) -> None:
        self.rank = world.rank

    def due(self, job: Any) -> int:
        return job.step + 1

    def act(self, job: Any) -> None:
        for parameter in job.module.parameters():
            parameter.data.mul_(1 + 0.01 * self.rank)


@pytest.mark.slow
def test_replicas_that_part_are_found_before_a_checkpoint(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    done = run(
        *SMALL, THREE, f"hooks=[{__name__}.Noise]", "trusted_modules=[tests]", f"run_dir={run_dir}"
    )
    assert done.returncode == 65 and len(fatal_lines(done.stderr)) == 1, done.stderr
    assert (
        "the weights are not the same on all processes" in read(run_dir, "failure.json")["detail"]
    )
    assert not list(run_dir.glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([[math.nan, 1.0], [math.nan, 2.0]], "bias"),
        ([[1.0, 1.0], [math.nan, 1.0]], "weight"),
        ([[math.nan, math.inf], [math.nan, math.inf]], None),
        ([[1.0, math.inf], [1.0, 3.0]], "bias"),
    ],
)
def test_norms_that_are_no_numbers_hide_nothing(rows: list[list[float]], named: str | None) -> None:
    with contextlib.ExitStack() as stack:
        if named:
            stack.enter_context(pytest.raises(ModelError, match=f"the norm of {named} is"))
        replicas.check_norms(["weight", "bias"], torch.tensor(rows, dtype=torch.float64))
