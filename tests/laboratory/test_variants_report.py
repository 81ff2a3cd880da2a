"""The tables and plots of a study of variants."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ddp_lab.study import variants_report
from ddp_lab.study.comparison_table import PARTS
from ddp_lab.study.request import read_request
from ddp_lab.study.variants import NEEDS_GPU, plan
from ddp_train.telemetry.pages.report import show
from tests.support.commands import (
    PROGRAM,
)
from tests.support.studies import outcome, whole


@pytest.mark.slow
def test_a_ladder_tells_the_gain_by_all_and_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [
        "mode=study",
        "study=tips",
        "data=digits",
        "study.only=[none,recommended,AMP,pin_memory,channels*,without gc*]",
    ]
    request = read_request(PROGRAM, words)
    study = plan(request)
    figures = {"cpu_cores": 1.5, "resident_gib": 0.25, "power_watts": None}
    seconds = {
        "none": 8.0,
        "recommended": 1.0,
        "AMP": 4.0,
        "channels_last": 2.0,
        "without gc_freeze": 1.0,
    }
    found = {
        name: [outcome([9.0, value + step / 100]) for step in range(3)]
        for name, value in seconds.items()
    }
    found["AMP"][0].summary["figures"] = figures
    report = variants_report.build_report(request, study, found, 0.0)
    by_name = {table.title: table for table in report.tables}
    ladder = [
        dict(zip(by_name[PARTS["ladder"]].columns, row, strict=True))
        for row in by_name[PARTS["ladder"]].rows
    ]
    assert [row["tip"].partition(" (")[0] for row in ladder] == [
        "none",
        "pin_memory",
        "AMP",
        "channels_last",
    ]
    assert ladder[1]["result"] == NEEDS_GPU and ladder[1]["s/epoch"] is None
    assert [ladder[3]["total speed-up"], ladder[3]["speed-up of this tip"]] == pytest.approx(
        [8.01 / 2.01, 4.01 / 2.01]
    )
    assert (ladder[2]["verdict"], ladder[0]["verdict"]) == ("faster", None)
    assert (ladder[2]["CPU cores"], ladder[2]["memory GiB"], ladder[3]["CPU cores"]) == (
        1.5,
        0.25,
        None,
    )
    assert "power W" not in by_name[PARTS["ladder"]].columns, "what no run knows has no column"
    left_out = by_name[PARTS["leave_one_out"]].rows[1]
    assert "no effect within the noise" in left_out
    assert "10.0%" in report.intro, "what chance alone does with three runs of each"
    assert "V100 s/epoch" in by_name["Published: one epoch of MNIST"].columns


@pytest.mark.slow
def test_a_variant_is_compared_with_the_one_that_its_study_names() -> None:
    request, study = whole("strategies")
    seconds = {
        "single": 8.0,
        "ddp": 4.0,
        "single, batch norm": 12.0,
        "ddp, batch norm": 6.0,
        "ddp, SyncBN": 9.0,
    }
    found = {
        name: [outcome([9.0, value + step / 100]) for step in range(3)]
        for name, value in seconds.items()
    }
    table = variants_report.build_report(request, study, found, 0.0).tables[0]
    rows = {
        row[0]: dict(zip(table.columns, row, strict=True))
        for row in table.rows
        if row[0] in seconds
    }
    names = ("compared with", "verdict")
    assert {name: tuple(row[key] for key in names) for name, row in rows.items()} == {
        "single": (None, None),
        "ddp": ("single", "faster"),
        "single, batch norm": ("single", "slower"),
        "ddp, batch norm": ("single, batch norm", "faster"),
        "ddp, SyncBN": ("ddp, batch norm", "slower"),
    }
    assert rows["ddp, SyncBN"]["speed-up"] == pytest.approx(6.01 / 9.01), (
        "what the exchange of statistics costs"
    )


@pytest.mark.slow
def test_run_table_has_the_shortest_epoch_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [
        "mode=study",
        "study=runs",
        "data=digits",
        "study.grid=['device=cuda,cpu','tuning.num_workers=0,1']",
    ]
    request = read_request(PROGRAM, words)
    study = plan(request)
    names = [variant.name for variant in study.variants if not variant.reason]
    found = {names[0]: [outcome([9.0, 3.0])], names[1]: [outcome([9.0, 2.0])]}
    rows = variants_report.build_report(request, study, found, 0.0).tables[0].rows
    assert [(row[1], row[5], row[7], row[8]) for row in rows] == [
        ("completed", 2.0, "cpu", 1),
        ("completed", 3.0, "cpu", 0),
        (NEEDS_GPU, None, "cuda", 0),
        (NEEDS_GPU, None, "cuda", 1),
    ]


@pytest.mark.slow
def test_growth_has_a_line_for_each_optimizer() -> None:
    request, study = whole("large_batch")
    found = {v.name: [outcome([1.0, 1.0], 0.9), outcome([1.0, 1.0], 0.95)] for v in study.variants}
    report = variants_report.build_report(request, study, found, 0.0)
    assert all(
        name in json.dumps(report.plots[0].chart)
        for name in ("sgd", "lars", "lamb", "global batch size", "test accuracy")
    )
    assert report.tables[0].rows[1][4:6] == [95.0, 0.0], "highest, and the difference in points"


@pytest.mark.slow
def test_comparison_with_data_parallel_fits_a_terminal() -> None:
    request, study = whole("strategies")
    seconds = {"single": 4.0, "dp": 2.0, "ddp": 1.0}
    found = {name: [outcome([9.0, value])] for name, value in seconds.items()}
    report = variants_report.build_report(request, study, found, 0.0)
    brief = report.brief
    assert brief is not None
    assert brief.columns[:4] == ["variant", "s/epoch", "times DataParallel", "agreement"]
    times = {row[0]: row[2] for row in brief.rows if row[2] is not None}
    assert times == {"single": 0.5, "dp": 1.0, "ddp": 2.0}
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    show(report, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 100 and "In short" in lines[0]
    without = variants_report.build_report(request, study, {"single": found["single"]}, 0.0)
    assert without.brief is not None and without.brief.columns[2] == "times single"


@pytest.mark.slow
def test_a_study_has_the_metrics_of_the_users() -> None:
    request, study = whole("strategies")
    found = {"single": [outcome([9.0, 4.0])], "ddp": [outcome([9.0, 1.0])]}
    for number, (one,) in enumerate(found.values()):
        one.summary["test"]["distance"] = number + 0.5
    table = variants_report.build_report(request, study, found, 0.0).tables[0]
    column = table.columns.index("test distance")
    values = {row[0]: row[column] for row in table.rows}
    assert (values["single"], values["ddp"], values["dp"]) == (0.5, 1.5, None)
    study.config.metric = "test.distance"
    for one in (*found["single"], *found["ddp"]):
        one.summary["better"] = {"distance": "min"}
    table = variants_report.build_report(request, study, found, 0.0).tables[0]
    assert table.columns.count("test distance") == 1, "as the metric of the study"
    ddp = next(row for row in table.rows if row[0] == "ddp")
    assert ddp[table.columns.index("difference")] == -1.0, "worse by 1"
