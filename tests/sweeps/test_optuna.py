"""`hydra/sweeper=pool_optuna`: Optuna asks and is told, prunes, and goes on after kill -9."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus

from ddp_train.commands.flags import run_with_flags
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from ddp_train.options.sections import SweepConfig
from ddp_train.sweeps import pruning
from ddp_train.sweeps.baseline import Baseline
from ddp_train.sweeps.outcomes import value_of
from ddp_train.sweeps.overrides import identifying
from ddp_train.sweeps.plan import SweepPlan, plan_sweep
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.results import append_row, ended_row, read_rows, rows_of_sweep
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.table import SweepTable
from ddp_train.sweeps.trial_numbers import TrialNumbers
from hydra_plugins.ddp_train_pool import PoolError, Pruned, SweepListener
from hydra_plugins.ddp_train_pool._signals import StopSignals
from tests.support.commands import (
    ONE,
    PROGRAM,
    foreign_code,
    foreign_net,
    processes_of,
    run,
    running,
    wait_until,
)

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")

from hydra_plugins.ddp_train_pool._journal import Journal  # noqa: E402
from hydra_plugins.ddp_train_pool._study import (  # noqa: E402
    StudyJobs,
    distribution_of,
    open_study,
)

NO_PRUNER = {"name": "none"}


def with_path(folder: Path) -> dict[str, str]:
    """The environment in which modules of a folder can be imported, beside those of this
    process."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    }


# --- the study ------------------------------------------------------------------------------------


def test_words_are_read_as_users_of_hydras_own_optuna_sweeper_know_them() -> None:
    def of(word: str) -> Any:
        return distribution_of(OverridesParser.create().parse_override(word))

    d = optuna.distributions
    assert of("x=interval(0,1.5)") == d.FloatDistribution(0, 1.5)
    assert of("x=tag(log,interval(0.001,1))") == d.FloatDistribution(0.001, 1, log=True)
    assert of("x=int(interval(1,9))") == d.IntDistribution(1, 9)
    assert of("x=tag(log,int(interval(1,9)))") == d.IntDistribution(1, 9, log=True)
    assert of("x=range(2,10,3)") == d.IntDistribution(2, 8, step=3), "10 is not of it, nor is 11"
    assert of("x=a,'b c'") == d.CategoricalDistribution(["a", "'b c'"]) and of(
        "x=choice(1,2)"
    ).choices == ("1", "2")
    assert of("x=range(0,1,0.5)").choices == ("0.0", "0.5") and of("x=1") is None
    with pytest.raises(PoolError, match=r"x=tag\(log,interval\(0,1\)\): "):
        of("x=tag(log,interval(0,1))")


class Listener(SweepListener):
    """An application that reports given values, and notes what is pruned."""

    def __init__(self) -> None:
        self.values: dict[int, list[float]] = {}
        self.pruned: list[tuple[int, int, float]] = []

    def values_so_far(self, number: int) -> list[float]:
        return self.values.get(number, [])

    def job_pruned(self, number: int, count: int, value: float) -> None:
        self.pruned.append((number, count, value))


class Launcher:
    """What a study sees of the pool."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.signals = StopSignals()


def drawing(
    folder: Path, launcher: Launcher, n_trials: int = 6, pruner: Any = None, **more: Any
) -> StudyJobs:
    words = OverridesParser.create().parse_overrides(
        more.get("words", ["+x=interval(0,1)", "k=a,b", "m=7"])
    )
    study = open_study(folder / "optuna.log", "sweep", "minimize", pruner or NO_PRUNER)
    sampler = {"name": "tpe", "seed": 3, "n_startup_trials": 2}
    return StudyJobs(study, words, sampler, n_trials, more.get("n_jobs"), launcher)  # type: ignore


def end(draws: StudyJobs, number: int, value: Any) -> None:
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = value
    draws.ended(number, returned)


def score(words: list[str]) -> float:
    return float(words[1].partition("=")[2])


def test_a_study_that_is_cut_off_draws_what_an_undisturbed_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calm").mkdir()
    calm = drawing(tmp_path / "calm", Launcher())
    expected = []
    while drawn := calm.ask():
        expected.append(drawn)
        end(calm, drawn[0], score(drawn[1]))
    assert len({tuple(words) for _, words in expected}) == 6 and expected[0][1][0] == "m=7"
    assert expected[0][1][1].startswith("+x=") and set(calm.best().params) == {"x", "k"}  # type: ignore

    found = []
    for _ in range(20):  # killed while each one runs: it comes again, and none is lost
        draws = drawing(tmp_path, Launcher())
        if not (drawn := draws.ask()):
            break
        found.append(drawn)
        with (tmp_path / "optuna.log").open("a") as file:
            file.write('{"op_co')  # and while it wrote
        draws = drawing(tmp_path, Launcher())
        assert draws.ask() == drawn
        end(draws, drawn[0], score(drawn[1]))
    assert found == expected
    assert (
        capsys.readouterr().err.count(
            "note: the study has 6 of 6 trials, and no more are run; raise hydra.sw"
        )
        == 1
    )
    more = drawing(tmp_path, Launcher(), n_trials=7)
    assert more.ask() is not None and more.ask() is None, "of the whole study"
    with pytest.raises(PoolError, match="has minimize; name another"):
        open_study(tmp_path / "optuna.log", "sweep", "maximize", NO_PRUNER)


def test_a_study_of_other_words_is_refused(tmp_path: Path) -> None:
    """Its results would be shown as those of these words."""
    drawing(tmp_path, Launcher()).ask()
    words = "+x=interval(0,1)", "k=a,b", "m=7"

    def refused(*words: str) -> str:
        with pytest.raises(PoolError) as found:
            drawing(tmp_path, Launcher(), words=words)
        return str(found.value)

    assert drawing(tmp_path, Launcher(), words=("m=6", *words)).ask(), (
        "the last word about a key counts"
    )
    assert (
        "m=8: the study that would go on has m=7; give the same words, or name another"
        in refused(*words, "m=8")
    )
    assert "no m: the study that would go on has m=7" in refused(*words[:2])
    assert "n=1: the study that would go on has no n" in refused(*words, "n=1")
    assert "k=a: the study that would go on has k=(drawn)" in refused(*words, "k=a")
    assert "k: CategoricalDistribution" in (said := refused(*words, "k=a,c"))
    assert "what is drawn from has changed: name another directory" in said
    assert drawing(tmp_path, Launcher(), words=("+x=interval(0,2)", *words[1:])).ask(), (
        "a wider interval is no other"
    )
    words = ("++launch.nproc_per_node=1", "++sweep.baseline=true", "+m= 7")
    assert identifying(words, set()) == {"m=7"}, "how trials run makes no other study"


def test_the_rows_of_other_words_are_of_another_sweep() -> None:
    def row(trial: int, *words: str) -> dict[str, Any]:
        return {"trial": trial, "overrides": ["lr=1"], "words": ["++lr=1", *words]}

    rows = [
        row(0, "++a=[1, 2]", "launch.x=1"),
        row(1, "++a=[1,3]"),
        row(2),
        row(3, "++a=[1,2]") | {"alone": 0},
    ]
    assert [
        one["trial"] for one in rows_of_sweep(rows, frozenset({"lr"}), frozenset({"a=[1,2]"}))
    ] == [0]


def test_one_process_at_a_time_has_a_study(tmp_path: Path) -> None:
    holder = drawing(tmp_path, Launcher())
    path = tmp_path / "optuna.log"
    if not (pid := os.fork()):
        try:
            Journal(path)
        except PoolError as error:
            os._exit(
                0
                if "another sweep has this study; wait for it, or name another" in str(error)
                else 2
            )
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and holder


@pytest.mark.parametrize("text", ["a: 1\n", "{}", '{"op_code": 1\n'])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes").write_text(text)
    for path in (tmp_path, tmp_path / "notes"):
        with pytest.raises(PoolError, match=r"cannot be the journal of a study: .*; name another"):
            open_study(path, "sweep", "minimize", NO_PRUNER)
    assert (tmp_path / "notes").read_text() == text


def test_a_study_killed_while_it_draws_loses_that_trial_alone(tmp_path: Path) -> None:
    drawing(tmp_path, Launcher()).ask()
    lines = (tmp_path / "optuna.log").read_text().splitlines(keepends=True)
    (tmp_path / "optuna.log").write_text(
        "".join(lines[:-1])
    )  # without its words: no job can have begun
    draws = drawing(tmp_path, Launcher())
    assert (draws.ask() or [0])[0] == 1 and draws.count == 1
    draws.n_jobs = 1
    assert draws.ask() is None, "one at a time"


def test_how_trials_end_is_told(tmp_path: Path) -> None:
    launcher = Launcher()
    draws = drawing(tmp_path, launcher)
    numbers = [draws.ask()[0] for _ in range(5)]  # type: ignore
    failed = JobReturn(status=JobStatus.FAILED)
    failed.return_value = SystemExit(1)
    draws.ended(0, failed)
    for number, value in ((1, math.nan), (2, Pruned(0.5)), (3, 0.25)):
        end(draws, number, value)
    launcher.signals.received.append(signal.SIGTERM)
    end(draws, 4, math.nan)
    states = [trial.state.name for trial in draws.study.get_trials()]
    assert states == [
        "FAIL",
        "FAIL",
        "PRUNED",
        "COMPLETE",
        "RUNNING",
    ], "the last was stopped with the sweep: it goes on"
    assert numbers == [0, 1, 2, 3, 4] and drawing(tmp_path, Launcher()).ask()[0] == 4  # type: ignore


def test_the_pruner_sees_each_evaluation_once(tmp_path: Path) -> None:
    launcher = Launcher()
    pruner = {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 2}
    draws = drawing(tmp_path, launcher, pruner=pruner)
    for _ in range(3):
        draws.ask()
    launcher.listener.values = {10: [3.0, 2.0, 1.0]}
    assert draws.to_stop({0: 10, 1: 11}) == []
    end(draws, 0, 1.0)
    launcher.listener.values = {11: [4.0], 12: [2.0]}
    assert draws.to_stop({1: 11, 2: 12}) == [], "the first is before the warm-up"
    launcher.listener.values = {11: [4.0, 4.0], 12: [2.0, 1.5]}
    assert draws.to_stop({1: 11, 2: 12}) == [1] and launcher.listener.pruned == [(11, 2, 4.0)]
    assert draws.to_stop({1: 11, 2: 12}) == [], "once"
    assert draws.study.get_trials()[2].intermediate_values == {1: 2.0, 2: 1.5}
    end(draws, 1, math.nan)
    assert draws.study.get_trials()[1].state.name == "PRUNED"
    with pytest.raises(PoolError, match=r"hydra/sweeper/pruner=median: .*pruner\.nonsense=1"):
        open_study(tmp_path / "o", "s", "minimize", {"name": "median", "nonsense": 1})


def test_a_full_disk_ends_no_study(tmp_path: Path) -> None:
    draws = drawing(tmp_path, Launcher())
    draws.ask()
    path = tmp_path / "optuna.log"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        end(draws, 0, 0.5)
        draws.ask()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text().endswith("\n")
    end(draws, 1, 0.25)
    again = drawing(tmp_path, Launcher())
    assert [trial.value for trial in again.study.get_trials()] == [0.5, 0.25]
    assert Journal(path).logs == again.study._storage._backend.logs  # type: ignore


# --- our runs -------------------------------------------------------------------------------------


def test_what_a_run_has_scored_so_far_is_read_from_its_metrics(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "step": 1, "loss": 9.0},
        {"kind": "validation", "step": 1, "loss": 2.0, "accuracy": 0.5},
        {"kind": "test", "step": 1, "loss": 3.0},
        {"kind": "validation", "step": 2, "loss": None, "accuracy": 0.75},
    ]
    reports = pruning.ObjectiveValues(tmp_path)
    file = tmp_path / "metrics.jsonl"
    assert reports.read("auto") == []
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(text + '{"kind": "validation", "st')
    first, second = reports.read("auto")
    assert first == 2.0 and math.isnan(second)
    assert reports.read("validation.accuracy") == [0.5, 0.75] and reports.read("test.loss") == [3.0]
    with file.open("a") as more:
        more.write('ep": 3, "accuracy": 0.8}\n')
    assert reports.read("validation.accuracy") == [0.5, 0.75, 0.8], "the rest of a line came later"
    (tmp_path / "part").write_text(text)
    (tmp_path / "part").replace(file)
    assert reports.read("validation.accuracy") == [0.5, 0.75], "it was resumed, before the third"
    assert pruning.pruned_outcome(tmp_path) is None
    pruning.mark_pruned(tmp_path, 2, 0.5)
    row = pruning.pruned_outcome(tmp_path) or {}
    assert (row["status"], row["exit_code"], row["evaluations"], row["last_value"]) == (
        "pruned",
        0,
        2,
        0.5,
    )
    assert isinstance(value_of(row), Pruned)


def listener_of(plan: SweepPlan) -> PoolListener:
    return PoolListener(TrialRunner(PROGRAM, SweepTable(plan), None))


def test_a_pruned_trial_keeps_its_row_whoever_was_killed(tmp_path: Path) -> None:
    """The mark is there before the trial is stopped: its launcher, or the sweep, may die at any
    moment after it."""
    listener = listener_of(SweepPlan(tmp_path, pruner="median"))
    (tmp_path / "0").mkdir()
    assert listener.known_value(0, ["a=1"]) is None
    listener.job_pruned(0, 3, 0.5)
    assert isinstance(listener.known_value(0, ["a=1"]), Pruned)
    assert [row["status"] for row in read_rows(tmp_path)] == ["pruned"]
    assert listener.known_value(0, ["a=1"]) == 0.5
    assert len(read_rows(tmp_path)) == 1, "written once"
    returned = JobReturn(status=JobStatus.FAILED)
    returned.return_value = RuntimeError("killed")
    listener.job_pruned(1, 2, 0.25)
    listener.job_ended(1, ["a=2"], returned, -9, 1.0)
    assert isinstance(returned.return_value, Pruned) and listener.table.exit_code() == 0


def test_what_was_pruned_runs_in_a_sweep_that_prunes_nothing(tmp_path: Path) -> None:
    listener = listener_of(SweepPlan(tmp_path))
    append_row(tmp_path, {"trial": 0, "status": "pruned", "words": ["a=1"], "overrides": ["a=1"]})
    listener.job_pruned(0, 3, 0.5)
    assert listener.known_value(0, ["a=1"]) is None
    assert pruning.pruned_outcome(tmp_path / "0") is None, "if it is stopped now, it was not pruned"


def test_a_baseline_compares_a_trial_with_itself(tmp_path: Path) -> None:
    rows = [
        {"trial": 0, "status": "failed", "words": ["a=1"], "at_once": 4},
        {
            "trial": 1,
            "status": "completed",
            "words": ["a=2"],
            "at_once": 4,
            "samples_per_second": 600.0,
        },
    ]
    numbers = TrialNumbers(tmp_path, 2, "now")
    baseline = Baseline(is_wanted=True)
    assert (
        Baseline().choose(rows, rows, numbers) is None
        and baseline.choose(rows[:1], rows, numbers) is None
    )
    assert baseline.text(rows) == ""
    assert (
        baseline.choose(rows, rows, numbers) == (2, ["a=2"])
        and baseline.choose(rows, rows, numbers) is None
    )
    own = {
        "trial": 2,
        "alone": 1,
        "status": "completed",
        "words": ["a=2"],
        "samples_per_second": 800.0,
    }
    again = Baseline(is_wanted=True)
    assert again.choose(rows, [*rows, own], TrialNumbers(tmp_path, 2, "later")) is None, (
        "it is known"
    )
    assert "600 samples/s beside 3 others, 800 alone" in again.text(
        rows
    ) and " 3.00 times the work" in again.text(rows)
    append_row(tmp_path, own)
    assert ended_row(tmp_path, ["a=2"], True) is None, "it is no trial"


def test_trials_too_short_to_compare_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "trial": 0,
        "status": "completed",
        "words": ["a=1"],
        "at_once": 2,
        "samples_per_second": 9000.0,
    }
    alone = Baseline(
        is_wanted=True, number=2, row=row | {"trial": 2, "alone": 0, "samples_per_second": 850.0}
    )
    assert (
        "Sharing was not measured: trial 0 has 9,000 samples/s beside 1 other, 850 alone; 0.2 s are"
        " too short" in (alone.text([row | {"seconds": 0.2}]))
    )
    assert "as if this host had other work by then" in alone.text([row | {"seconds": 20.0}])
    assert "do 1.00 times the work" in alone.text(
        [row | {"seconds": 20.0, "samples_per_second": 425.0}]
    )
    listener = listener_of(SweepPlan(tmp_path, total=2, swept=frozenset({"a"})))
    listener.table.baseline = alone
    listener.table.begun = {0, 1}
    listener.job_started(2, ["a=1"], [])
    assert capsys.readouterr().out == "trial 2: a=1  (trial 0 alone)\n", "it is no third of two"


def test_what_contradicts_the_sweeper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(*more: str) -> tuple[str, ...]:
        argv = ["-m", "hydra/sweeper=pool_optuna", "optimizer.lr=interval(0.01,0.1)", *more]
        return plan_sweep(PROGRAM, argv).hydra_arguments

    assert {"hydra/launcher=pool", "hydra.sweeper.direction=maximize"} < set(
        words("objective=test.accuracy")
    )
    for given, message in (
        (
            ["hydra/launcher=basic"],
            "needs hydra/launcher=pool, which says when a trial has ended; leave out hydra/laun",
        ),
        (
            ["hydra/sweeper/pruner=median", "objective=seconds"],
            "objective=seconds is known at the end only",
        ),
        (
            ["hydra/sweeper/pruner=median", "objective=test.accuracy", "data.validation=0.1"],
            (
                r"pruner=median: with a validation set objective=test\.accuracy .*; use"
                r" objective=validation\.accuracy"
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            words(*given)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"needs the package optuna; pip install -e '\.\[optuna\]'"
    ):
        words()
    assert not Config(sweep=SweepConfig()).sweep.baseline


LR = "optimizer.lr=interval(0.01,0.1)"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "model.hidden=interval(8,64)",
            "model.hidden=64.0: must be a whole number; for whole numbers use model.hidde",
        ),
        ("optimizer.lr=interval(-0.3,0.1)", "optimizer.lr=-0.3: must be above 0"),
        ("+optimizer.foo=interval(0.1,0.2)", "optimizer.foo=0.1: no such key"),
        (
            "optimizer.lr=interval(0.3,0.001)",
            "optimizer.lr=interval(0.3,0.001): `low <= high` must hold",
        ),
        ("seed=1", "nothing to draw; give a key an interval"),
        (f"{LR} optimizer.lr=0.1", "nothing to draw; give a key an interval"),
        ("model=glob(nonsense*)", "model: has no value to try: nothing matches"),
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
            "hydra/sweeper/sampler=tpe,random: is about all trials, and cannot",
        ),
        (
            f"{LR} hydra.sweeper.sampler=random",
            "is an option of a group; use hydra/sweeper/sampler=random",
        ),
        (
            f"{LR} hydra.sweeper.storage=sqlite:///x.db",
            "hydra.sweeper.storage=sqlite:///x.db: must be a file, Optuna'",
        ),
        (f"{LR} hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0: must be at least 1"),
        (f"{LR} hydra.sweeper.n_trails=3", "Key 'n_trails' not in 'PoolOptunaConf'"),
        (
            f"{LR} hydra/sweeper=basic",
            f"{LR}: a grid needs values; name some, or let Optuna draw: add hydra/sweeper=p",
        ),
        (
            "seed=1,2 hydra/sweeper=basic hydra.sweeper.n_trials=3",
            "hydra.sweeper.n_trials=3: is of a sweeper that dra",
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


def test_what_hydra_itself_refuses_has_the_exit_code_of_a_mistake(
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
    table = SweepTable(SweepPlan(Path(), pruner="median"))
    row = {"objective_name": "test.loss", "better": "min"}
    assert table.learn(row) is None
    contradiction = table.learn(row | {"validation": {"loss": 1.0}})
    assert "use objective=validation.loss" in str(contradiction)


@pytest.mark.slow
def test_a_study_that_cannot_go_on_is_one_message(tmp_path: Path) -> None:
    words = (
        "-m",
        "hydra/sweeper=pool_optuna",
        "hydra.sweeper.n_trials=1",
        LR,
        "train.epochs=1",
        ONE,
        "model=mlp",
    )
    assert run(*words, "data.limit=100", f"run_dir={tmp_path}").returncode == 0
    again = run(*words, "data.limit=120", f"run_dir={tmp_path}")
    problem = (
        "  - data.limit=120: the study that would go on has data.limit=100; give the same words, or"
        " name another"
    )
    assert again.returncode == 2 and f"1 problem in the configuration:\n{problem}" in again.stderr
    assert (
        "Traceback" not in again.stderr
        and "HYDRA" not in again.stderr
        and "best trial" not in again.stdout
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_study_is_pruned_killed_and_goes_on(tmp_path: Path) -> None:
    """kill -9 of the sweep at a random moment; the same command repeats nothing. Bad trials are
    pruned."""
    foreign_code(tmp_path)
    folder = tmp_path / "sweep"
    env = with_path(tmp_path)
    words = (
        "-m",
        "hydra/sweeper=pool_optuna",
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.sampler.seed=1",
        "hydra/sweeper/sampler=random",
        "hydra/sweeper/pruner=median",
        "hydra.sweeper.pruner.n_startup_trials=1",
        *foreign_net(delay=0.1),
        "optimizer.lr=tag(log,interval(0.00001,0.5))",
        "train.epochs=4",
        ONE,
        "sweep.processes_at_once=2",
        "data.validation=0.2",
    )
    with running(folder, *words, env=env) as first:
        wait_until(lambda: len(read_rows(folder)) >= 2, "two trials")
        time.sleep(random.uniform(0, 1))
        first.process.send_signal(signal.SIGKILL)
        first.end()
        wait_until(lambda: not processes_of(folder), "end of all processes", 10)
    before = read_rows(folder)
    again = run(*words, "sweep.baseline=true", f"run_dir={folder}", env=env)
    assert again.returncode == 0, again.stdout + again.stderr
    rows = read_rows(folder)
    alone = rows.pop()
    assert rows[: len(before)] == before and sorted(row["trial"] for row in rows) == list(
        range(6)
    ), "none twice"
    assert {row["status"] for row in rows} == {"completed", "pruned"} and alone["alone"] in range(6)
    assert all(row["evaluations"] < 4 for row in rows if row["status"] == "pruned")
    study = optuna.load_study(
        study_name="sweep",
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log"))
        ),
    )
    states = {trial.number: trial.state.name for trial in study.trials}
    assert states == {
        row["trial"]: {"completed": "COMPLETE", "pruned": "PRUNED"}[row["status"]] for row in rows
    }
    values = {row["trial"]: row["objective"] for row in rows if row["status"] == "completed"}
    assert study.best_value == min(values.values())
    assert [int(number) for number in re.findall(r"^ +(\d+)   ", again.stdout, re.M)] == list(
        range(6)
    ), "of both starts"
    assert f"best trial {min(values, key=lambda trial: values[trial])}:" in again.stdout
    assert "Sharing" in again.stdout and "Sharing" in (folder / "report.md").read_text()
