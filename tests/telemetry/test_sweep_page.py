"""The page of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.telemetry.pages.page import as_page
from ddp_train.telemetry.pages.sweep_page import Sweep, sweep_page
from tests.support.pages import BOUND, leave_run, page_of_sweep, sweep_rows


def test_best_trial_is_first_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.001, 0.01])
    rows.append(
        {
            "trial": 3,
            "overrides": ["optimizer.lr=9"],
            "status": "failed",
            "exit_code": 70,
            "kind": "oom",
        }
    )
    report = page_of_sweep(tmp_path, rows)
    table = report.tables[0]
    assert (
        table.columns[:4] == ["trial", "test.accuracy %", "optimizer.lr", "status"]
        and table.best == 0
    )
    assert [row[0] for row in table.rows] == [2, 1, 0, 3] and table.rows[-1][1:4] == [
        None,
        "9",
        "failed (70): oom",
    ]
    assert (
        report.sections[0].lines[0]
        == f"python launch.py mode=evaluate checkpoint.resume={tmp_path}/2"
    )  # type: ignore
    monkeypatch.chdir(tmp_path)
    assert (
        page_of_sweep(tmp_path, rows).sections[0].lines[0]
        == "python launch.py mode=evaluate checkpoint.resume=2"
    )  # type: ignore
    assert (
        "not known which differences are noise" in report.findings[0]
        and "seed=0,1,2" in report.findings[0]
    )
    kinds = [plot.chart["kind"] for plot in report.plots if plot.chart]
    assert kinds == ["curves", "scatter"], "the parameter has a plot of its own"


def test_single_points_are_no_plot_of_curves(tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2, 0.3])
    for row in rows:
        path = Path(row["run_dir"]) / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert [plot.chart["kind"] for plot in page_of_sweep(tmp_path, rows).plots if plot.chart] == [
        "scatter"
    ]


def test_page_of_hundreds_of_long_trials_stays_small(tmp_path: Path) -> None:
    leave_run(tmp_path / "0", epochs=300)
    row = {
        "overrides": ["seed=1"],
        "status": "completed",
        "exit_code": 0,
        "objective": 0.5,
        "run_dir": str(tmp_path / "0"),
    }
    rows = [{"trial": number, **row} for number in range(301)]
    assert len(as_page(page_of_sweep(tmp_path, rows)).encode()) < BOUND


def test_running_sweep_shows_trials_a_stopped_one_the_command(
    tmp_path: Path,
) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2])
    row = {"trial": 2, "overrides": ["optimizer.lr=0.3"], "run_dir": str(leave_run(tmp_path / "2"))}
    now = [*rows, {**row, "status": "running", "exit_code": 2}]
    report = sweep_page(
        Sweep(tmp_path, now, "test.accuracy", "max", "python launch.py -m", total=5), 10
    )
    assert (
        report.state.startswith("running: 1 now, 2 of 5 trials ended, as of")
        and report.numbers["running"] == "1"
    )
    assert [line[:4][-1] for line in report.tables[0].rows] == ["completed", "completed", "running"]
    assert report.plots[0].chart and len(report.plots[0].chart["curves"]) == 3, "its curve is drawn"
    first = sweep_page(Sweep(tmp_path, now[2:], "auto", None, "python launch.py -m"), 10)
    assert first.plots[0].chart and first.plots[0].chart["curves"][0]["level"] == 0, (
        "nothing is the best yet"
    )
    ended = [
        *rows,
        {**row, "status": "failed", "exit_code": 75, "kind": "stopped", "reason": "stopped"},
    ]
    report = sweep_page(
        Sweep(
            tmp_path,
            ended,
            "test.accuracy",
            "max",
            "python launch.py -m a=1,2 run_dir=r",
            total=5,
        )
    )
    assert (
        report.state == "stopped: 2 of 5 trials completed, 2 not begun"
        and report.numbers["failed"] == "0"
    )
    assert report.tables[0].rows[-1][3] == "stopped (75)" and "Failed" not in [
        table.title for table in report.tables
    ]
    assert report.sections[-1].lines == [f"python launch.py -m a=1,2 run_dir={tmp_path}"]  # type: ignore
