"""Keys of Hydra that would move a run, or trials of a sweep, out of their folders."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_train.config.hydra_keys import problem_of_word, problems_of_presets
from ddp_train.config.overrides import read_overrides
from tests.support.commands import PROGRAM

SOUND = {
    "mode": None,
    "run": {"dir": "."},
    "sweep": {"dir": ".", "subdir": "${hydra.job.num}"},
    "job": {"chdir": False},
    "output_subdir": None,
}


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        (
            "hydra.run.dir=mine",
            "hydra.run.dir=mine: run_dir is the folder of a run; use run_dir=mine",
        ),
        ("hydra.sweep.dir=mine", "use run_dir=mine"),
        ("++hydra.sweep.dir='a b'", "use run_dir=FOLDER"),
        (
            "hydra.sweep.subdir='seed_${seed}'",
            "leave it out; trials.jsonl has the overrides of each",
        ),
        (
            "hydra.sweep.subdir=${now:%S}",
            "leave it out; trials.jsonl has the overrides of each number",
        ),
        ("hydra.job.chdir=true", "writes only to run_dir; leave it out"),
        (
            "hydra.output_subdir=x",
            "a run writes its config to config.yaml in run_dir; leave it out",
        ),
        ("hydra={sweep:{subdir:x}}", "hydra.sweep.subdir=x: "),
        ("hydra.searchpath=[file:///my/conf]", "use --config-dir=/my/conf"),
        ("~hydra.sweep.subdir", "a key cannot be removed"),
    ],
)
@pytest.mark.parametrize("sweep", [False, True])
def test_word_that_moves_a_folder_is_refused(word: str, remedy: str, sweep: bool) -> None:
    (problem,) = read_overrides(PROGRAM, [word], sweep=sweep).problems
    assert remedy in problem and "add -m" not in problem


def test_default_may_be_typed() -> None:
    assert problem_of_word("hydra.job.chdir", False) is None
    assert problem_of_word("hydra.output_subdir", ".hydra") is None
    assert problem_of_word("hydra.job.name", "mine") is None


def found_in(is_sweep: bool, **changes: Any) -> list[str]:
    node = OmegaConf.create({**SOUND, **changes})
    return [key for key, _ in problems_of_presets(node, is_sweep)]


@pytest.mark.parametrize("is_sweep", [False, True])
def test_preset_moves_no_folder(is_sweep: bool) -> None:
    assert found_in(is_sweep) == []
    assert found_in(is_sweep, run={"dir": "mine"}) == ["hydra.run.dir"]
    assert found_in(is_sweep, job={"chdir": True}) == ["hydra.job.chdir"]
    assert found_in(is_sweep, output_subdir="x") == ["hydra.output_subdir"]


def test_preset_for_sweeps_alone_does_not_stop_a_run() -> None:
    of_sweep = {"dir": "mine", "subdir": "${seed}"}
    assert found_in(False, sweep=of_sweep) == []
    assert found_in(True, sweep=of_sweep) == ["hydra.sweep.dir", "hydra.sweep.subdir"]
