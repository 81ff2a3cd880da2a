"""Sweeps from the command line to the last process."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_train.checkpoints.layout import places
from ddp_train.config.folders import is_of_sweep
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.results import (
    RESULTS,
    read_rows,
)
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.sweep import finish, run_sweep
from ddp_train.sweeps.sweep_state import SweepState
from ddp_train.telemetry.json_files import read_objects
from ddp_train.telemetry.pages import page
from hydra_plugins.ddp_train_pool._devices import Locks
from tests.support.commands import (
    ONE,
    PROGRAM,
    fatal_lines,
    foreign_code,
    foreign_net,
    processes_of,
    run,
    running,
    wait_until,
)
from tests.support.pages import report_in


@pytest.mark.slow
def test_a_sweep_started_again_with_other_values_mixes_nothing(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("model=mlp", "data.limit=200", "train.epochs=1", ONE)
    assert run("-m", "optimizer.lr=0.1,0.01", *words, f"run_dir={sweep}").returncode == 0
    of_another = (sweep / "0/summary.json").read_bytes()
    again = run("-m", "optimizer.lr=0.02,0.1", *words, f"run_dir={sweep}")
    assert again.returncode == 0, again.stdout + again.stderr
    rows = read_rows(sweep)
    assert [(row["trial"], row["overrides"][0]) for row in rows] == [
        (0, "optimizer.lr=0.1"),
        (1, "optimizer.lr=0.01"),
        (2, "optimizer.lr=0.02"),
    ]
    assert [Path(row["run_dir"]).name for row in rows] == ["0", "1", "2"]
    assert (sweep / "0/summary.json").read_bytes() == of_another
    assert (
        "trial 2 (1 of 2): optimizer.lr=0.02" in again.stdout
        and "trial 0 was completed before" in again.stdout
    )
    shown = json.loads((sweep / "report.json").read_text())["tables"][0]["rows"]
    assert sorted((line[0], line[2]) for line in shown) == [
        (0, "0.1"),
        (2, "0.02"),
    ], "those of this start"
    refused = run(*words, f"run_dir={sweep}")
    assert (
        refused.returncode == 2 and f"run_dir={sweep}: is the folder of a sweep" in refused.stderr
    ), refused.stderr
    assert not (sweep / "config.yaml").exists()
    (tmp_path / RESULTS).write_text('{"mine": 1}\n')
    assert is_of_sweep(sweep) and not is_of_sweep(tmp_path) and not is_of_sweep(tmp_path / "none")


def saved(run_dir: Path) -> bool:
    """Whether a run has a whole checkpoint."""
    return bool(places(run_dir))  # one that is being written has a manifest too


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_survives_kills_and_does_nothing_twice(tmp_path: Path) -> None:
    """Trial 0 is killed, then the sweep. Started again, it repeats no trial that was completed, and
    resumes others."""
    sweep = tmp_path / "sweep"
    env = foreign_code(tmp_path)
    net = foreign_net(delay=0.1)
    words = (
        "-m",
        *net,
        "optimizer.lr=0.1,0.01,0.02,0.03",
        "train.epochs=6",
        ONE,
        "sweep.processes_at_once=2",
    )
    with running(sweep, *words, env=env) as first:
        wait_until(lambda: saved(sweep / "0"), "checkpoint")
        os.kill(json.loads((sweep / "0/lock.json").read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: saved(sweep / "2") and len(read_rows(sweep)) == 2, "trial 2")
        first.process.send_signal(signal.SIGKILL)
        first.end()
        wait_until(lambda: not processes_of(sweep), "end of all processes", 10)
    died, completed = read_rows(sweep)
    assert (died["trial"], died["kind"], died["exit_code"]) == (0, "died", 70)
    assert (completed["trial"], completed["status"], completed["at_once"]) == (1, "completed", 2)
    begun = {entry["trial"] for entry in read_objects(sweep / "trials.jsonl")}
    fourth = (
        3 if 3 in begun else 4
    )  # began in the moment before the kill; else new, and 0 to 3 are names of this start

    words = (
        *words,
        "optimizer.lr=0.03,0.02,0.01,0.1",
    )  # in another order: each goes on in its own folder
    again = run(
        *(word for word in words if word != "optimizer.lr=0.1,0.01,0.02,0.03"),
        f"run_dir={sweep}",
        env=env,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1 was completed before: " in again.stdout
    assert "trials, 2 at a time on one host" in again.stdout
    rows = read_rows(sweep)[2:]
    assert sorted(row["trial"] for row in rows) == [0, 2, fourth], "trial 1 is not repeated"
    for trial in (0, 2):
        said = (sweep / f"{trial}/log.txt").read_text()
        assert (
            said.count("processes      1 x cpu") == 2 and len(re.findall(r"epoch +1/6 ", said)) == 1
        ), "it was resumed"
    assert "samples to train on" not in again.stdout, "what a trial prints is in its log"


@pytest.mark.slow
def test_a_trial_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("-m", "optimizer.lr=1e30,0.01", "model=mlp", "data.limit=200", "train.epochs=1", ONE)
    done = run(*words, "hydra/launcher=pool", "sweep.processes_at_once=2", f"run_dir={sweep}")
    assert done.returncode == 70
    (fatal,) = fatal_lines((sweep / "0/log.txt").read_text())
    assert f"trial 0: failed (70)  {fatal}  log: {sweep}/0/log.txt" in done.stdout
    assert sorted(row["status"] for row in read_rows(sweep)) == ["completed", "failed"]
    assert (sweep / "1/log.txt").read_text().count("epoch 1/1") == 1


FAULTY = """
import os, signal, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.layers, self.fault, self.calls = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), fault, 0

    def forward(self, images):
        self.calls += 1
        if self.fault == "hang" and self.calls == 2:
            time.sleep(600)
        if self.fault == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        if self.fault == "killed":
            os.kill(os.getppid(), signal.SIGKILL)
        return self.layers(images)
"""


@pytest.mark.slow
def test_failed_trial_keeps_its_row_and_frees_its_device(
    tmp_path: Path,
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = run(
        "-m",
        "model._target_=faulty.Net",
        "trusted_modules=[faulty]",
        "data.limit=100",
        "train.epochs=1",
        ONE,
        "+model.fault=hang,oom,killed,none",
        "launch.timeout_seconds=3",
        "hydra.launcher.gpus_per_trial=1",
        "hydra.launcher.devices=[a]",
        f"hydra.launcher.lock_folder={tmp_path}/locks",
        f"run_dir={tmp_path}/sweep",
        env={"PYTHONPATH": str(tmp_path)},
    )
    rows = read_rows(tmp_path / "sweep")
    assert [(row.get("kind"), row["status"]) for row in rows] == [
        ("hang", "failed"),
        ("oom", "failed"),
        ("died", "failed"),
        (None, "completed"),
    ], done.stdout + done.stderr
    assert [row["exit_code"] for row in rows] == [71, 70, 70, 0] and done.returncode == 71
    locks = Locks(tmp_path / "locks")
    assert locks.take("a") is not None


@pytest.mark.usefixtures("folder_without_gpus")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_while_hydra_composes_leaves_table_and_page(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"trial": 0, "overrides": ["seed=1"], "words": [], "status": "completed"}
    ended = row | {"exit_code": 0, "objective": 0.5, "objective_name": "test.loss", "better": "min"}

    def compose(_program: Any, _arguments: list[str], run_trial: Any) -> None:
        state = run_trial.__self__.state
        if with_row:
            state.rows.append(ended)
        run_trial.__self__.page.look()
        signal.raise_signal(number)

    monkeypatch.setattr("ddp_train.sweeps.sweep.call_hydra", compose)
    before = signal.getsignal(number)
    plan = SweepPlan(tmp_path, "python launch.py -m seed=1,2", objective="test.loss", total=2)
    code = 143 if number == signal.SIGTERM else 130
    for with_row in (False, True):
        with pytest.raises(SystemExit) as end:
            run_sweep(PROGRAM, plan, None)
        told = capsys.readouterr()
        assert end.value.code == code and signal.getsignal(number) == before
        assert f"stopped by {signal.Signals(number).name}" in told.err
        assert "-m seed=1,2 run_dir=" in (told.out if with_row else told.err)
    assert "stopped: 1 of 2 trials completed, 1 not begun; to go on" in told.out
    assert report_in((tmp_path / "report.html").read_text())["state"].startswith("stopped: 1 of 2")


@pytest.mark.usefixtures("folder_without_gpus")
def test_a_report_that_fails_does_not_hide_the_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Path:
        raise OSError("no room for plots")

    monkeypatch.setattr(page, "write", failing)
    runner = TrialRunner(PROGRAM, SweepState(SweepPlan(tmp_path)), None)
    row = {"trial": 0, "overrides": [], "status": "failed", "exit_code": 3}
    runner.state.rows = [row | {"kind": "crash", "reason": "bad"}]
    finish(runner)
    assert runner.state.exit_code() == 3
    runner.page.write_last()
    told = capsys.readouterr()
    assert (
        f"results {tmp_path}/results.jsonl" in told.out
        and "note: the report of the sweep cannot be written: OSError: no room for plots"
        in told.err
    )
