"""What presets say of a sweep is known before its first trial, as if it had been typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.config.program import Program
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from ddp_train.options.sections import TrainConfig
from ddp_train.sweeps.plan import plan_sweep
from ddp_train.sweeps.preset_words import with_words_of_presets
from ddp_train.sweeps.value_checks import last_of_each_key, tied_to_seed
from tests.support.commands import ONE
from tests.support.configs import own_presets

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
RUN = "# @package _global_\n"
GRID = f"""{RUN}hydra:
  sweeper:
    params:
      optimizer.lr: 0.1,0.5
      train: {{epochs: "range(1,4)"}}
"""


@pytest.fixture
def program() -> Program:
    """A program with presets that say something of sweeps."""
    return own_presets(
        experiment__grid=GRID,
        experiment__folder=f"{RUN}hydra: {{sweep: {{subdir: 'seed_${{seed}}'}}}}\n",
        experiment__first=f"{RUN}run_dir: a\n",
        experiment__second=f"{RUN}run_dir: b\n",
        experiment__plain=f"{RUN}seed: 1\n",
        experiment__measured=f"{RUN}sweep: {{baseline: true}}\n",
        experiment__pool=f"""{RUN}defaults:
  - override /hydra/launcher: pool
hydra: {{launcher: {{processes_at_once: 2}}}}
""",
        experiment__circle=f"{RUN}defaults: [circle, _self_]\n",
        experiment__unset=f"""{RUN}defaults:
  - override /hydra/launcher: pool
hydra: {{launcher: {{processes_at_once: "${{oc.env:NOT_SET}}"}}}}
""",
    )


def refused(program: Program, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_sweep(program, ["-m", "model=mlp", ONE, *words])
    return caught.value.problems


@pytest.mark.slow
def test_grid_of_a_preset_is_swept_and_shown(program: Program) -> None:
    plan = plan_sweep(program, ["-m", "model=mlp", ONE, "experiment=grid", "optimizer.lr=0.3"])
    assert plan.swept == {"train.epochs"}, "a typed value replaces the grid of its key"
    assert plan.total == 3
    assert "hydra.sweeper.params=null" in plan.hydra_arguments


def test_words_of_presets_come_before_typed_ones(program: Program) -> None:
    found = with_words_of_presets(program, ["experiment=grid", "seed=1"])
    grid = ["optimizer.lr=0.1,0.5", "train.epochs=range(1,4)"]
    assert found.words == [*grid, "experiment=grid", "seed=1"] and found.params_are_words
    found = with_words_of_presets(program, ["experiment=pool"])
    pool = ["hydra/launcher=pool", "hydra.launcher.processes_at_once=2"]
    assert found.words == [*pool, "experiment=pool"]
    typed = ["experiment=pool", "hydra/launcher=basic"]
    assert with_words_of_presets(program, typed).words == typed


@pytest.mark.parametrize("preset", ["circle", "unset"])
def test_mistake_in_a_preset_is_left_to_the_checks(preset: str, program: Program) -> None:
    words = [f"experiment={preset}", "seed=1,2"]
    assert with_words_of_presets(program, words).words == words


@pytest.mark.slow
def test_preset_cannot_move_trials(program: Program) -> None:
    (problem,) = refused(program, "experiment=folder", "seed=1,2")
    assert problem.startswith(
        "hydra.sweep.subdir=seed_${seed}: the folder of a trial is named by its number"
    )
    assert "(in conf/experiment/folder.yaml)" in problem


@pytest.mark.slow
def test_swept_preset_cannot_say_what_all_trials_share(program: Program) -> None:
    assert refused(program, "experiment=first,second") == [
        "run_dir=b: all trials share this key, but another trial has run_dir=a; give it one value"
    ]
    (problem,) = refused(program, "experiment=plain,measured")
    assert problem.startswith(
        "sweep.baseline=true: all trials share this key, but another trial has"
    )
    problems = refused(program, "experiment=grid,pool")
    assert [problem.partition(", which")[0] for problem in problems] == [
        "experiment=grid: sets hydra.sweeper",
        "experiment=pool: sets hydra.launcher",
    ]


def test_parameters_may_be_given_as_one_mapping() -> None:
    word = "hydra.sweeper.params={seed:'1,2',optimizer:{lr:'0.1,0.5'}}"
    assert last_of_each_key([word, "seed=7"]) == ["seed=7", "optimizer.lr=0.1,0.5"]


@pytest.mark.slow
def test_trials_share_one_folder_of_their_sweep(program: Program, tmp_path: Path) -> None:
    rule = "all trials share this key, so it cannot be swept; give it one value"
    problems = refused(program, "run_dir=a,b", "objective=test.loss,test.accuracy")
    assert problems == [f"run_dir: {rule}", f"objective: {rule}"]
    (problem,) = refused(program, "run_dir='x/${seed}'", "seed=1,2")
    assert problem.startswith("run_dir=x/2: all trials share this key")
    of_run = tmp_path / "run"
    (of_run / "checkpoints").mkdir(parents=True)
    (problem,) = refused(program, f"run_dir={of_run}", "seed=1,2")
    assert problem.startswith(f"run_dir={of_run}: is the folder of a run")


def test_keys_that_follow_the_seed_are_known() -> None:
    def config(seed: int, epochs: int) -> Config:
        return Config(seed=seed, train=TrainConfig(epochs=epochs))

    combinations = [
        {"seed": "1", "name": "a"},
        {"seed": "2", "name": "a"},
        {"seed": "1", "name": "b"},
    ]
    configs = [config(1, 1), config(2, 2), config(1, 5)]
    assert tied_to_seed(combinations, configs) == {"train.epochs"}
    assert tied_to_seed(combinations, [config(1, 1), config(2, 1), config(1, 5)]) == frozenset()
