"""`hydra/sweeper=pool_optuna` from the command line."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from ddp_train.sweeps.results import (
    read_rows,
)
from tests.support.commands import (
    ONE,
    foreign_code,
    foreign_net,
    processes_of,
    run,
    running,
    wait_until,
)

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")


LR = "optimizer.lr=interval(0.01,0.1)"


def with_path(folder: Path) -> dict[str, str]:
    """The environment in which modules of a folder can be imported, beside those of this
    process."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    }


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
        "  - data.limit=120: the earlier study, which this sweep would continue, has"
        " data.limit=100; give the same overrides, or use a new file"
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
        *foreign_net(
            delay=0.25
        ),  # an epoch is longer than the sweep takes to look at it, when busy
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
    assert (
        "Cost of sharing" in again.stdout
        and "Cost of sharing" in (folder / "report.md").read_text()
    )
