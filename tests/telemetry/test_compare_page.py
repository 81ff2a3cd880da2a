"""Runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_train.telemetry.pages.compare_page import compare_page
from ddp_train.telemetry.pages.page import as_page
from ddp_train.telemetry.pages.run_files import read_run
from tests.support.pages import compared, leave_run, section_of


def test_one_run_of_each_tells_differences_and_no_noise(tmp_path: Path) -> None:
    report = compared(tmp_path, 0.9, 0.95)
    assert report.tables[1].rows == [["optimizer.lr", "0.1", "0.2"]]
    assert report.tables[0].columns[1] == "test.accuracy %, last"
    assert [row[:3] for row in report.tables[0].rows] == [["0_0", 90.0, 90.0], ["1_0", 95.0, 95.0]]
    found = report.findings[0]
    assert (
        found.startswith("1_0 against 0_0: test accuracy +5.00 points")
        and "cannot be told from 1 run of each" in found
    )
    assert "11.73 points" in found and "smaller than twice" in found, "of ten samples"
    loss = section_of(as_page(report), "Loss")["chart"]
    assert {"0_0 training", "1_0 test"} <= {curve["name"] for curve in loss["curves"]}


def test_repeated_runs_are_tested(tmp_path: Path) -> None:
    apart = compared(tmp_path / "a", 0.7, 0.9, repeats=3).findings[0]
    assert (
        "more than noise" in apart
        and "Welch's t-test of 3 and 3 runs" in apart
        and "+20.00 points" in apart
    )
    assert "within the noise" in compared(tmp_path / "b", 0.9, 0.905, repeats=3).findings[0]
    assert (
        "the same settings, except for the seed"
        in compared(tmp_path / "c", 0.9, repeats=3).findings[0]
    )


def test_the_findings_are_about_the_metric_that_is_named(tmp_path: Path) -> None:
    runs = []
    for name, kl in {"a": 3.0, "b": 2.5}.items():
        folder = leave_run(tmp_path / name, test={"accuracy": 0.5, "f1": kl / 10, "loss": 1.0})
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"kind": "hook", "step": 9, "epoch": 1, "vae/kl": kl}) + "\n")
        text = (folder / "config.yaml").read_text().replace("lr: 0.1", f"lr: {kl}")
        (folder / "config.yaml").write_text(text)
        runs.append(read_run(folder))
    found = compare_page(runs, "", "vae/kl").findings[0]
    assert found.startswith("b against a: hook vae/kl -0.5"), found
    assert compare_page(runs, "", "test.f1").findings[0].startswith("b against a: test f1 -0.05")
    with pytest.raises(
        LookupError, match=r"test\.f2: not all runs have this number; all of them have .*test\.f1"
    ):
        compare_page(runs, "", "test.f2")


def test_trials_are_compared_by_their_objective_and_all_named(tmp_path: Path) -> None:
    runs = []
    for number in range(4):
        scores = {"accuracy": 0.5, "f1": 0.1 * number, "loss": 1.0}
        folder = leave_run(tmp_path / str(number), test=scores)
        text = (folder / "config.yaml").read_text().replace("lr: 0.1", f"lr: {number // 2}")
        text += f"objective: test.f1\nseed: {number % 2}\n"
        (folder / "config.yaml").write_text(text)
        runs.append(read_run(folder))
    found = compare_page(runs, "").findings[0]
    assert found.startswith("2, 3 against 0, 1: test f1 +0.2, "), found
    assert (
        compare_page(runs, "", "test.accuracy")
        .findings[0]
        .startswith("2, 3 against 0, 1: test accuracy ")
    )


def test_scores_of_two_sets_are_never_put_side_by_side(tmp_path: Path) -> None:
    finished = leave_run(tmp_path / "finished", test={"accuracy": 0.5, "loss": 1.0})
    stopped = leave_run(tmp_path / "stopped", best=0.8)
    for folder in (finished, stopped):
        log = folder / "metrics.jsonl"
        log.write_text(log.read_text().replace('"kind": "test"', '"kind": "validation"'))
    table, *_ = compare_page([read_run(finished), read_run(stopped)], "").tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["validation.accuracy %, last"] for row in rows] == [90.0, 80.0]
    assert [row["test.accuracy %, last"] for row in rows] == [50.0, None]
    assert "test.accuracy %, best" not in table.columns, "it was scored once"
    (found,) = [
        line
        for line in compare_page([*map(read_run, (finished, stopped))], "").findings
        if "against" in line or "same settings" in line
    ]
    assert "validation accuracy" in found, "one of them has no score of the test set"
