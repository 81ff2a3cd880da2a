"""Processes whose weights have come apart are told so before a checkpoint is written."""

from __future__ import annotations

import contextlib
import math
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


def said(world: World) -> list[Any]:
    """Of equal weights, of some that have drifted by rounding, of two layers on rank 2, and of NaN
    on rank 1."""
    found = []
    for change in (
        lambda net: None,
        lambda net: net[0].weight.data.mul_(1 + 1e-6 * world.rank),
        lambda net: world.rank == 2 and (net[0].bias.data.add_(1), net[1].weight.data.add_(0.1)),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        nn.init.constant_(net[0].bias, 0.01)
        net.register_parameter(
            "table", nn.Parameter(torch.arange(3) + world.rank, requires_grad=False)
        )
        change(net)
        try:
            found.append(check_same_weights(net))
        except ModelError as error:
            found.append(str(error))
    return found


def test_the_parameter_that_differs_most_is_named_everywhere() -> None:
    for same, drifted, other in on_ranks(3, said):
        assert same is None and drifted is None
        assert "the norm of 0.bias is 0.02 on rank 0 and 2.02 on rank 2" in other


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
    found = mock.patch.object(
        replicas, "from_all_ranks", return_value=torch.tensor(rows, dtype=torch.float64)
    )
    with (
        mock.patch.object(replicas, "ranks", return_value=2),
        found,
        contextlib.ExitStack() as stack,
    ):
        if named:
            stack.enter_context(pytest.raises(ModelError, match=f"the norm of {named} is"))
        replicas.check_same_weights(nn.Linear(2, 2))
