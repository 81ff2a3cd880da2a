"""Pieces for a loop of the user's own: under plain torch, without config and launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ddp_train
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from tests.support.commands import ROOT
from tests.support.ranks import on_ranks

AFTER = """
test_sampler = ddp_train.ExactSampler(data, shuffle=False)
seen = sum(len(batch[0]) for batch in DataLoader(data, 4, sampler=test_sampler))
scored = torch.tensor([len(test_sampler), seen])
dist.all_reduce(scored)
"""


def documented_loop(world: World, folder: Path, epochs: int) -> tuple[int, list[int]]:
    """The script of docs/guides/own_loop_more.md, in a process group that is there already.

    Returns where it began, and the numbers of samples that a test sampler and its loader had."""
    page = (ROOT / "docs/guides/own_loop_more.md").read_text()
    (code,) = re.findall(r"```python\n# pieces\.py\n(.*?)```", page, re.S)
    imports, loop = code.split('dist.init_process_group("gloo")\n')
    assert loop.count("range(first_epoch, 2)") == 1
    loop = loop.replace("range(first_epoch, 2)", f"range(first_epoch, {epochs})")
    loop = loop.replace("dist.destroy_process_group()\n", "")
    os.chdir(folder)
    found: dict[str, Any] = {}
    exec(imports + loop + AFTER, found)
    return found["first_epoch"], found["scored"].tolist()


@pytest.mark.slow
def test_the_documented_loop_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """On three processes; a checkpoint that was damaged since is passed over."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    each_once = [64, 64]
    assert on_ranks(3, documented_loop, whole, 4) == [(0, each_once)] * 3
    assert on_ranks(3, documented_loop, parts, 2) == [(0, each_once)] * 3
    assert on_ranks(3, documented_loop, parts, 3) == [(2, each_once)] * 3
    (parts / "runs/pieces/checkpoints/step_00000003/model.safetensors").write_bytes(b"damaged")
    assert on_ranks(3, documented_loop, parts, 4) == [(2, each_once)] * 3
    ends = [
        load_file(folder / "runs/pieces/checkpoints/step_00000004/model.safetensors")
        for folder in (whole, parts)
    ]
    # torch's DDP orders its buckets anew after the first step of a process, and three processes sum
    # in another order then; with find_unused_parameters=True, which keeps them, the bytes are equal.
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)
    kept = sorted(path.name for path in (whole / "runs/pieces/checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000004"]


def test_nothing_saved_is_none_and_nothing_whole_is_an_error(tmp_path: Path) -> None:
    assert ddp_train.load_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        place = ddp_train.save_checkpoint(
            tmp_path, step, {"w": torch.full((2,), step)}, {"epoch": step}, keep=1
        )
    found = ddp_train.load_checkpoint(tmp_path)
    assert found and found[0] == 3 and found[1]["w"].tolist() == [3, 3] and found[2] == {"epoch": 3}
    assert [path.name for path in place.parent.iterdir()] == ["step_00000003"]
    (place / "training.pt").write_bytes(b"")
    with pytest.raises(DataError):
        ddp_train.load_checkpoint(tmp_path)


@pytest.mark.slow
def test_all_that_is_public_can_be_imported() -> None:
    names = "[getattr(ddp_train, name) for name in ddp_train.__all__]"
    code = f"import sys, ddp_train; assert 'torch' not in sys.modules; {names}"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
