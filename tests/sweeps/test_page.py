"""The page and the results of a sweep while it runs and at its end."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from ddp_train.resilience.preemption import INTERRUPTED, SAVED, UNSAVED
from ddp_train.sweeps.page import print_results
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.sweep_state import SweepState
from ddp_train.telemetry.pages.sweep_page import Sweep, sweep_page
from ddp_train.telemetry.pages.trials import Row, trials_table
from tests.support.commands import ENDLESS, ONE, PROGRAM, running, wait_until
from tests.support.pages import leave_run, report_in, section_of, sweep_rows


def test_sweep_of_one_trial_compares_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"trial": 0, "overrides": [], "status": "completed", "exit_code": 0, "objective": 1.1235}
    print_results([row], "test.loss", "min", 1)
    assert "\ntrial 0: test.loss 1.1235\n" in capsys.readouterr().out
    report = sweep_page(Sweep(tmp_path, [row], "test.loss", "min", "python launch.py -m"))
    assert report.findings == [] and "with" not in report.numbers


def test_results_in_80_columns_say_ends_and_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "is_terminal", True)
    drawn = [0.09278490880397514, 0.004099511084931485]
    rows = sweep_rows(
        tmp_path, optimizer__lr=drawn, optimizer__weight_decay=[0.012345678901], seed=[0, 1]
    )
    rows[0] |= {"status": "pruned", "evaluations": 2, "objective": None}
    print_results(rows, "validation.accuracy", "max", 1)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table = out.partition("best trial")[0]
    assert {"pruned", "completed", "0.09278", "0.0041", "accuracy"} <= {*table.split()}, table
    assert (
        max(
            len(line.rstrip())
            for line in out.splitlines()
            if "launch.py" not in line and "best trial" not in line
        )
        <= 80
    )
    assert "best trial 3: " in out and "validation.accuracy 61.00%" in out, (
        "in the form of the page"
    )
    assert "The same settings with other seeds differ by" in " ".join(out.split())
    wide = trials_table(rows, "validation.accuracy").columns
    assert {"validation.accuracy %", "test.accuracy %", "test.loss"} <= {*wide}, "of which split"


def test_page_is_there_before_a_trial_ends_and_comes_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    plan = SweepPlan(tmp_path, "python launch.py -m", swept=frozenset({"optimizer.lr"}))
    listener = PoolListener(TrialRunner(PROGRAM, SweepState(plan), None))
    leave_run(tmp_path / "0")
    listener.job_started(0, ["++optimizer.lr=0.1"], [])
    listener.while_waiting()
    assert report_in(page.read_text())["state"].startswith("running: 1 now, 0 trials ended")
    columns = section_of(page.read_text(), "Trials")["columns"]
    assert [column["texts"] for column in columns if column["name"] == "optimizer.lr"] == [["0.1"]]
    page.unlink()
    listener.while_waiting()
    assert not page.exists() and listener.page.due > time.monotonic() + 9
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    for _ in range(2):
        listener.page.due = 0.0
        listener.while_waiting()
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("words", "at_once"), [((), 1), (("sweep.processes_at_once=2",), 2)])
def test_stopped_sweep_leaves_its_page_and_the_command(
    tmp_path: Path, words: tuple[str, ...], at_once: int
) -> None:
    words = ("-m", "optimizer.lr=0.1,0.2,0.3", ONE, *ENDLESS, *words)
    with running(tmp_path / "s", *words) as sweep:
        sweep.wait_for_file("report.html")
        assert not (tmp_path / "s/results.jsonl").exists()
        wait_until(lambda: any(tmp_path.glob("s/*/metrics.jsonl")), "a trial that trains")
        sweep.process.send_signal(signal.SIGINT)
        assert sweep.end() in (INTERRUPTED, SAVED, UNSAVED)
    state = f"stopped: 0 of 3 trials completed, {3 - at_once} not begun"
    assert f"{state}; to go on:\n  python launch.py" in sweep.output.read_text()
    assert report_in((tmp_path / "s/report.html").read_text())["state"] == state


def test_table_has_a_column_for_each_named_set() -> None:
    rows: list[Row] = []
    for trial, accuracy in enumerate((0.5, 0.75)):
        noisy = {"loss": 1.0, "accuracy": accuracy}
        row = {"trial": trial, "overrides": [], "status": "completed", "objective": 0.25}
        rows.append(
            {**row, "accuracy": 0.9, "validation": {"loss": 0.25}, "validation/noisy": noisy}
        )
    table = trials_table(rows, "validation.loss")
    place = table.columns.index("validation/noisy.accuracy %")
    assert [line[place] for line in table.rows] == [50.0, 75.0]
    assert "validation/noisy.accuracy %" in trials_table(rows, "validation/noisy.accuracy").columns
