"""What is known of a sweep before its first trial: all mistakes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ddp_train.commands.flags import run_with_flags
from ddp_train.errors import ConfigError
from ddp_train.sweeps.plan import SweepPlan, plan_sweep
from ddp_train.sweeps.sweep_state import SweepState
from tests.support.commands import ONE, PROGRAM
from tests.support.configs import own_presets

pytest.importorskip("optuna", reason="needs the extra optuna")

LR = "optimizer.lr=interval(0.01,0.1)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hydra/launcher=basic"],
            "needs hydra/launcher=pool, which says when a trial has ended; leave out hydra/laun",
        ),
        (
            ["hydra/sweeper/pruner=median", "objective=seconds"],
            "objective=seconds is known only at the end",
        ),
        (
            ["hydra/sweeper/pruner=median", "objective=test.accuracy", "data.validation=0.1"],
            r"pruner=median: with a validation set objective=test\.accuracy .*; use"
            r" objective=validation\.accuracy",
        ),
    ],
)
def test_what_contradicts_the_sweeper_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_sweep(PROGRAM, ["-m", "hydra/sweeper=pool_optuna", LR, *overrides])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "model.hidden=interval(8,64)",
            "model.hidden=64.0: must be a whole number; for whole numbers use 'model.hid",
        ),
        ("optimizer.lr=interval(-0.3,0.1)", "optimizer.lr=-0.3: must be above 0"),
        ("+optimizer.foo=interval(0.1,0.2)", "optimizer.foo=0.1: no such key"),
        (
            "optimizer.lr=interval(0.3,0.001)",
            "optimizer.lr=interval(0.3,0.001): `low <= high` must hold",
        ),
        ("seed=1", "no key has several values to draw from; give one an interval"),
        (f"{LR} optimizer.lr=0.1", "no key has several values to draw from; give one an interval"),
        ("model=glob(nonsense*)", "model: no option matches the pattern, so there is no value"),
        (
            f"{LR} hydra/sweeper/pruner=threshold",
            "hydra/sweeper/pruner=threshold: Either lower or upper must be speci",
        ),
        (
            f"{LR} hydra.sweeper.sampler.n_startup_trials=a",
            "hydra/sweeper/sampler=tpe: '<' not supported",
        ),
        (
            f"{LR} hydra/sweeper/pruner=medain",
            "Could not find 'hydra/sweeper/pruner/medain' Available options",
        ),
        (
            f"{LR} hydra/sweeper/sampler=tpe,random",
            "Sweeping over Hydra's configuration is not supported : 'hydra/sweeper/sampler=",
        ),
        (
            f"{LR} hydra.sweeper.sampler=random",
            "is an option of a group; use hydra/sweeper/sampler=random",
        ),
        (
            f"{LR} hydra.sweeper.storage=sqlite:///x.db",
            "hydra.sweeper.storage=sqlite:///x.db: must be the path of a file",
        ),
        (f"{LR} hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0: must be at least 1"),
        (f"{LR} hydra.sweeper.n_trails=3", "Key 'n_trails' not in 'PoolOptunaConf'"),
        (
            f"{LR} hydra/sweeper=basic",
            f"{LR}: a grid needs a list of values, not an interval; list the values",
        ),
        (
            "seed=1,2 hydra/sweeper=basic hydra.sweeper.n_trials=3",
            "Key 'n_trials' not in 'BasicSweeperConf'",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_starts(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_sweep(PROGRAM, ["-m", "hydra/sweeper=pool_optuna", "model=mlp", *words.split()])
    assert problem in str(refused.value)


@pytest.mark.slow
def test_parameters_of_the_sweeper_are_words_as_others() -> None:
    """Hydra has no keys of that name on a command line."""
    for given in (
        "hydra.sweeper.params.seed=int(interval(1,9))",
        "+hydra.sweeper.params.seed='int(interval(1,9))'",
    ):
        plan = plan_sweep(PROGRAM, ["-m", "hydra/sweeper=pool_optuna", "seed=7", given])
        assert "++seed=int(interval(1,9))" in plan.hydra_arguments and plan.swept == {"seed"}


@pytest.mark.slow
def test_refusal_by_hydra_has_the_exit_code_of_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["launch.py"])
    with pytest.raises(SystemExit) as end:  # one trial at a time: no pool, which alone has the key
        words = ["-m", "seed=1,2", ONE, "hydra.launcher.lock_folder=x", f"run_dir={tmp_path}/sweep"]
        run_with_flags(PROGRAM, words, None)
    assert (
        end.value.code == 2
        and "Key 'lock_folder' not in 'BasicLauncherConf'" in capsys.readouterr().err
    )


def test_who_has_a_validation_set_is_told_to_select_by_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["-m", "seed=1,2", "objective=test.loss", "data.validation=0.1"]
    plan_sweep(PROGRAM, argv).print_notes()
    said = capsys.readouterr().err
    assert "objective=test.loss: selects by the test set" in said
    assert "; use objective=validation.loss\n" in said
    # data of your own: a trial tells
    state = SweepState(SweepPlan(Path(), pruner="median"))
    row = {"objective_name": "test.loss", "better": "min"}
    assert state.learn(row) is None
    contradiction = state.learn(row | {"validation": {"loss": 1.0}})
    assert "use objective=validation.loss" in str(contradiction)


@pytest.mark.usefixtures("folder_without_gpus")
@pytest.mark.slow
def test_sweep_checks_its_combinations_not_the_defaults() -> None:
    """The default batch, 96, cannot be split over 5 processes, and nobody asked for it."""
    argv = ["-m", "launch.nproc_per_node=5", "train.global_batch_size=50,100", "seed=1,2,3"]
    assert plan_sweep(PROGRAM, argv).total == 6
    with pytest.raises(ConfigError) as caught:
        plan_sweep(PROGRAM, ["-m", "launch.nproc_per_node=1,5", "train.global_batch_size=96"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "train.global_batch_size=96"
    ]


@pytest.mark.usefixtures("folder_without_gpus")
@pytest.mark.slow
def test_own_arguments_can_be_swept() -> None:
    words = [
        "-m",
        "model._target_=torch.nn.Linear",
        "model.in_features=64",
        "model.out_features=10,12",
    ]
    plan = plan_sweep(PROGRAM, words)
    assert "++model.out_features=10,12" in plan.hydra_arguments and plan.total == 2


@pytest.mark.usefixtures("folder_without_gpus")
@pytest.mark.slow
def test_a_sweep_on_slurm_without_its_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without_plugins(name: str, package: str | None = None) -> Any:
        if name == "hydra_plugins":
            return None
        if name.startswith("hydra_plugins."):
            raise ModuleNotFoundError(
                "No module named 'hydra_plugins'"
            )  # what the real one does then
        return real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_plugins)
    with pytest.raises(
        ConfigError,
        match=r"needs the package hydra-submitit-launcher; run .* -m pip install .*\[slurm\]",
    ):
        plan_sweep(PROGRAM, ["-m", "hydra/launcher=slurm", "seed=1,2"])


@pytest.mark.slow
def test_sweep_composes_presets_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = own_presets(optimizer__mine="name: sgd\nlr: 0.3\n")
    assert plan_sweep(program, ["-m", "optimizer=mine", "optimizer.lr=0.1,0.2"]).total == 2
    assert plan_sweep(program, ["-m", "optimizer=mine,adam"]).total == 2


def test_a_folder_that_hydra_takes_for_a_reference_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "${x}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(
        ConfigError, match=r"-m: the working folder .*/\$\{x\} has \$\{ in its name"
    ):
        plan_sweep(PROGRAM, ["-m", "model=mlp", LR])
