"""Runs side by side."""

from __future__ import annotations

from pathlib import Path

from ddp_train.telemetry.pages.page import as_page
from tests.support.pages import compared, section_of


def test_one_run_of_each_tells_differences_and_no_noise(tmp_path: Path) -> None:
    report = compared(tmp_path, 0.9, 0.95)
    assert report.tables[1].rows == [["optimizer.lr", "0.1", "0.2"]]
    assert report.tables[0].columns[1] == "accuracy %, last"
    assert [row[:3] for row in report.tables[0].rows] == [["0_0", 90.0, 90.0], ["1_0", 95.0, 95.0]]
    found = report.findings[0]
    assert (
        found.startswith("1_0 against 0_0: accuracy +5.00 points")
        and "cannot be told from 1 run of each" in found
    )
    assert "11.73 points" in found and "less than twice" in found, "of ten samples"
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
    assert "differ in their seed at most" in compared(tmp_path / "c", 0.9, repeats=3).findings[0]
