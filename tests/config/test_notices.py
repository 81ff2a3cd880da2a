"""Switches without effect are noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.config.prepare import prepare
from ddp_train.distributed.world import World
from tests.support.commands import PROGRAM
from tests.support.configs import (
    checkpoint_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (
            "optimizer.decay_norm_and_bias=false",
            "optimizer.decay_norm_and_bias=false has no effect: optimizer.weight",
        ),
        (
            "train.early_stopping.min_delta=0.1",
            "train.early_stopping.min_delta=0.1 has no effect without train.early_stopping.patience",
        ),
        ("predict.split=train", "predict.split=train has no effect: it is for mode=predict"),
        ("prove.steps=8", "prove.steps=8 has no effect: it is for mode=prove"),
        ("sweep.gpus_per_trial=2", "sweep.gpus_per_trial=2 has no effect without -m"),
        (
            "strategy=single launch.backend=gloo",
            "launch.backend=gloo has no effect: strategy=single",
        ),
        (
            "launch.nproc_per_node=1 strategy.bucket_cap_mb=3",
            "strategy.bucket_cap_mb=3.0 has no effect: one process",
        ),
        (
            "model=mlp tuning.channels_last=true",
            "tuning.channels_last=true has no effect: model=mlp has no convolution",
        ),
        (
            "tuning.compile_mode=max-autotune",
            "tuning.compile_mode=max-autotune has no effect: tuning.compile=false",
        ),
        (
            "tuning.buckets=one strategy=single",
            "tuning.buckets=one has no effect: strategy=single has no buckets",
        ),
        (
            "tuning.buckets=large strategy.comm_hook=powersgd launch.nproc_per_node=3",
            (
                "tuning.buckets=large has no effect: strategy.comm_hook=powersgd over gloo needs"
                " all gradients in one"
            ),
        ),
        (
            "tuning.buckets=by_flops strategy.comm_hook=powersgd launch.nproc_per_node=3",
            (
                "tuning.buckets=by_flops has no effect: strategy.comm_hook=powersgd over gloo needs"
                " all gradients in one"
            ),
        ),
        (
            "tuning.buckets=by_flops launch.nproc_per_node=1",
            "tuning.buckets=by_flops has no effect: one process exchanges nothing",
        ),
    ],
)
def test_a_switch_without_effect_is_noted(line: str, notice: str) -> None:
    (told,) = prepare(PROGRAM, [*line.split(" "), "run_dir=run"], None).notices
    assert told.startswith(notice)


@pytest.mark.parametrize(
    ("words", "world", "told"),
    [
        (["launch.nproc_per_node=2"], None, []),
        (
            [],
            World(0, 2, 0, 2),
            [
                "under torchrun a lost process costs the steps since the last checkpoint; `python"
                " launch.py` without torchrun loses none"
            ],
        ),
        (
            ["launch.nnodes=2", "launch.rdzv_endpoint=a:1"],
            None,
            [
                "launch.nnodes=2: a lost process costs the steps since the last checkpoint;"
                " launch.nnodes=2:2 loses none"
            ],
        ),
        (["launch.nnodes=2:2", "launch.rdzv_endpoint=a:1", "launch.max_restarts=1"], None, []),
    ],
)
def test_what_a_lost_process_costs_is_said(
    words: list[str], world: World | None, told: list[str]
) -> None:
    assert prepare(PROGRAM, [*words, "run_dir=run"], world).notices == told


@pytest.mark.slow
def test_an_evaluation_says_that_it_enters_no_hooks(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run")
    words = ["mode=evaluate", "checkpoint.resume=run", "run_dir=out"]
    hooks = "hooks=[ddp_lab.study.step_times.StepTimes]"
    notices = prepare(PROGRAM, [*words, hooks], None).notices
    assert notices == [f"{hooks} has no effect: mode=evaluate does not train"]
