"""What Hydra's sweepers need, and must be given."""

from __future__ import annotations

import sys

import pytest

from ddp_train.errors import ConfigError
from ddp_train.sweeps.plan import SweepPlan, plan_sweep
from ddp_train.sweeps.sweep_state import SweepState
from ddp_train.sweeps.sweeper import notes_on_ranges
from tests.support.commands import PROGRAM

pytest.importorskip("optuna", reason="needs the extra optuna")


def optuna_plan(*overrides: str) -> SweepPlan:
    """The plan of a sweep by Optuna."""
    return plan_sweep(PROGRAM, ["-m", "hydra/sweeper=pool_optuna", "seed=1,2", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "direction"),
    [
        ("test.accuracy", "maximize"),
        ("test.loss", "minimize"),
        ("auto", "minimize"),
        ("samples_per_second", "maximize"),
        ("seconds", "minimize"),
    ],
)
def test_optuna_gets_the_direction_of_the_objective(objective: str, direction: str) -> None:
    override = f"hydra.sweeper.direction={direction}"
    assert override in optuna_plan(f"objective={objective}").hydra_arguments
    typed = optuna_plan(f"objective={objective}", override).hydra_arguments
    assert typed.count(override) == 1
    wrong = {"maximize": "minimize", "minimize": "maximize"}[direction]
    message = rf"direction={wrong}: objective=.* is better the .*use hydra\.sweeper\."
    with pytest.raises(ConfigError, match=message):
        optuna_plan(f"objective={objective}", f"hydra.sweeper.direction={wrong}")


@pytest.mark.slow
def test_user_gives_the_direction_that_only_a_task_knows() -> None:
    overrides = ["task._target_=yaml.Task", "trusted_modules=[yaml]", "objective=test.dice"]
    message = r"add hydra\.sweeper\.direction=maximize or hydra\.sweeper\.direction=minim"
    with pytest.raises(ConfigError, match=message):
        optuna_plan(*overrides)

    state = SweepState(optuna_plan(*overrides, "hydra.sweeper.direction=minimize"))
    contradiction = state.learn({"objective_name": "test.dice", "better": "max"})
    remedy = "better the higher it is with this task; use hydra.sweeper.direction=maximize"
    assert remedy in str(contradiction)


def test_optuna_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.ddp_train_pool._study", None)
    with pytest.raises(ConfigError, match=r"hydra/sweeper=pool_optuna: .*; run pip install optuna"):
        optuna_plan()


@pytest.mark.slow
def test_sweeper_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="Could not find 'hydra/sweeper/nevergrad'"):
        plan_sweep(PROGRAM, ["-m", "hydra/sweeper=nevergrad", "seed=1,2"])


def test_end_of_a_range_is_told_to_who_knows_another_sweeper() -> None:
    words = ["hydra/sweeper=pool_optuna", "++seed=range(1,4)", "++optimizer.lr=interval(0.1,1)"]
    (note,) = notes_on_ranges(words)
    assert note.startswith("seed=range(1,4) draws 1 to 3: a range excludes its end, as in a grid")
    assert [*notes_on_ranges(words[1:])] == []
