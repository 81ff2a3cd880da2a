"""Sessions on GPUs, in float64: what plain torch learns on the CPU in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.distributed.world import World
from ddp_train.errors import ModelError
from tests.sessions import loops, moving_copies, test_samplers, test_streams
from tests.sessions.seen_batches import plain_loop
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="needs a GPU: torch.cuda.is_available() is false"),
    pytest.mark.timeout(300),
]
LOOPS = loops.LOOPS | moving_copies.LOOPS
if GPUS > 1:
    del LOOPS["looked_up"]  # sparse gradients, over NCCL
ROUNDING = 1e-9
"""Sums come in another order, in eight to 18 steps."""


def device_of(world: World) -> str:
    return f"cuda:{world.local_rank}"


def on_gpus(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function returns, in a process for each GPU."""
    return on_ranks(GPUS, function, *arguments, timeout_seconds=200, device="cuda")


def all_loops(world: World) -> dict[str, loops.Weights]:
    found = {}
    for name, loop in LOOPS.items():
        with session_on(world, device=device_of(world)) as run:
            found[name] = loop(run)
    return found


def test_models_and_copies_of_them_are_exact() -> None:
    for found in on_gpus(all_loops):
        for name, weights in found.items():
            by_hand = LOOPS[name](moving_copies.PlainRun())
            torch.testing.assert_close(weights, by_hand, rtol=0, atol=ROUNDING)


def looked_up(world: World) -> str:
    with (
        pytest.raises(ModelError) as refused,
        session_on(world, device=device_of(world)) as run,
    ):
        loops.looked_up(run)
    return str(refused.value)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_sparse_gradients_are_refused() -> None:
    for said in on_gpus(looked_up):
        assert "torch cannot exchange sparse gradients over NCCL" in said


def all_samplers(world: World, folder: str) -> dict[tuple[str, bool], Any]:
    return test_samplers.all_kinds(world, folder, device_of(world))


def test_samplers_give_the_batches_of_a_plain_loop(tmp_path: Path) -> None:
    for found in on_gpus(all_samplers, str(tmp_path)):
        for (kind, taken_apart), (seen, weights) in found.items():
            plain = plain_loop(test_samplers.batches_of_torch(kind, taken_apart))
            assert seen == plain[0], kind
            torch.testing.assert_close(weights, plain[1], rtol=0, atol=ROUNDING)


def all_streams(world: World, folder: str) -> dict[str, Any]:
    return test_streams.all_streams(world, folder, device_of(world))


def test_streams_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    for found in on_gpus(all_streams, str(tmp_path)):
        for kind, (seen, weights) in found.items():
            plain = plain_loop(
                lambda epoch, kind=kind: test_streams.expected_batches(kind, GPUS, epoch)
            )
            assert seen == plain[0], kind
            torch.testing.assert_close(weights, plain[1], rtol=0, atol=ROUNDING)
