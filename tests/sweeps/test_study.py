"""The study of Optuna: asks and is told, prunes, and resumes after kill -9."""

from __future__ import annotations

import math
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus

from ddp_train.sweeps.overrides import identifying
from hydra_plugins.ddp_train_pool import PoolError, Pruned, SweepListener
from hydra_plugins.ddp_train_pool._signals import StopSignals

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")

from hydra_plugins.ddp_train_pool._journal import Journal  # noqa: E402
from hydra_plugins.ddp_train_pool._study import (  # noqa: E402
    StudyJobs,
    distribution_of,
    open_study,
)

NO_PRUNER = {"name": "none"}


def test_overrides_are_those_of_hydras_optuna_sweeper() -> None:
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


def test_interrupted_study_draws_the_same_trials(
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
            "note: the study has 6 of 6 trials, so it runs no more; to run more, raise"
        )
        == 1
    )
    more = drawing(tmp_path, Launcher(), n_trials=7)
    assert more.ask() is not None and more.ask() is None, "of the whole study"
    with pytest.raises(PoolError, match="has minimize; use"):
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
        "m=8: the earlier study, which this sweep would continue, has m=7; give the same overrides"
        in refused(*words, "m=8")
    )
    assert "no m: the earlier study, which this sweep would continue, has m=7" in refused(
        *words[:2]
    )
    assert "n=1: the earlier study, which this sweep would continue, has no n" in refused(
        *words, "n=1"
    )
    assert "k=a: the earlier study, which this sweep would continue, has k=(drawn)" in refused(
        *words, "k=a"
    )
    assert "continue, draws from other values (CategoricalDistribution" in (
        said := refused(*words, "k=a,c")
    )
    assert "use a new file: hydra.sweeper.storage=" in said
    assert drawing(tmp_path, Launcher(), words=("+x=interval(0,2)", *words[1:])).ask(), (
        "a wider interval is no other"
    )
    words = ("++launch.nproc_per_node=1", "++sweep.baseline=true", "+m= 7")
    assert identifying(words, set()) == {"m=7"}, "how trials run makes no other study"


def test_one_process_at_a_time_has_a_study(tmp_path: Path) -> None:
    holder = drawing(tmp_path, Launcher())
    path = tmp_path / "optuna.log"
    if not (pid := os.fork()):
        try:
            Journal(path)
        except PoolError as error:
            os._exit(
                0
                if "another sweep is using this study; wait until that sweep ends" in str(error)
                else 2
            )
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and holder


@pytest.mark.parametrize("text", ["a: 1\n", "{}", '{"op_code": 1\n'])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes").write_text(text)
    for path in (tmp_path, tmp_path / "notes"):
        with pytest.raises(
            PoolError, match=r"cannot be the journal of a study: .*; use a new file"
        ):
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
    assert draws.jobs_to_stop({0: 10, 1: 11}) == []
    end(draws, 0, 1.0)
    launcher.listener.values = {11: [4.0], 12: [2.0]}
    assert draws.jobs_to_stop({1: 11, 2: 12}) == [], "the first is before the warm-up"
    launcher.listener.values = {11: [4.0, 4.0], 12: [2.0, 1.5]}
    assert draws.jobs_to_stop({1: 11, 2: 12}) == [1] and launcher.listener.pruned == [(11, 2, 4.0)]
    assert draws.jobs_to_stop({1: 11, 2: 12}) == [], "once"
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
