"""examples/moco.py on several processes, and resumed within an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_train.distributed.world import World
from examples import moco
from tests.sessions.test_batch_norm import interrupt
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on


def trained(world: World, folder: Path, is_interrupted: bool = False) -> torch.Tensor:
    """The queue at the end of an epoch and a half, with keys of all weights before."""
    moco.EPOCHS = 2
    moco.KEYS = 450
    moco.BATCH = 155  # the last batch of an epoch has 105
    torch.set_default_dtype(torch.float64)
    found: list[torch.Tensor] = []
    for attempt in range(1 + is_interrupted):
        with session_on(world, str(folder)) as run:
            wrap = run.wrap

            def kept(model: moco.Contrast, wrap: object = wrap) -> object:
                found.append(model.double().queue)
                return wrap(model)  # type: ignore[operator]

            run.wrap = kept  # type: ignore[method-assign, assignment]
            if is_interrupted and not attempt:
                interrupt(run)
            moco.main(run)
    return found[-1].clone()


def both(world: World, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return trained(world, folder / "whole"), trained(world, folder / "again", True)


@pytest.mark.slow
def test_the_queue_is_that_of_one_process(tmp_path: Path) -> None:
    (alone, *_) = on_ranks(1, trained, tmp_path / "alone")
    for whole, again in on_ranks(3, both, tmp_path):
        torch.testing.assert_close(whole, alone, rtol=0, atol=1e-9)
        torch.testing.assert_close(again, whole, rtol=0, atol=0)
