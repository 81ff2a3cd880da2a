"""Studies: what their files mean, what their runs leave, what their reports say. The runs are real
commands."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from ddp_lab.study import main, results, trials, variant_trials, variants_report
from ddp_lab.study.comparison_table import PARTS
from ddp_lab.study.provenance import conditions, load_at_start, source_digest
from ddp_lab.study.request import Request, read_request
from ddp_lab.study.results import METRICS, verdict
from ddp_lab.study.trials import Outcome, Trial, trial_session
from ddp_lab.study.variants import NEEDS_GPU, Study, merged, plan
from ddp_train.config.overrides import read_overrides
from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.resilience import run_lock
from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.charts import Axis, Bar, bars
from ddp_train.telemetry.pages.page import as_page, write
from ddp_train.telemetry.pages.report import Plot, Report, as_csv, as_json, as_markdown, show
from ddp_train.telemetry.pages.tables import Table, cells
from tests.support.commands import (
    ENDLESS,
    PROGRAM,
    ROOT,
    processes_of,
    read,
    run,
    running,
    wait_until,
)
from tests.support.pages import report_in
from tests.support.studies import leave

CONF = ROOT / "ddp_train/conf"
TINY = (
    "data.limit=48",
    "train.global_batch_size=24",
    "model=mlp",
    "train.epochs=2",
    "train.log_every_steps=1",
)
"""Two epochs of two steps each."""


def planned(*words: str) -> Study:
    """The study of a command line."""
    return plan(read_request(PROGRAM, ["mode=study", *words]))


def refused(*words: str) -> str:
    """The message for a command line that is wrong."""
    with pytest.raises(ConfigError) as caught:
        planned(*words)
    return str(caught.value)


def outcome(
    epoch_seconds: list[float], accuracy: float = 0.9, losses: tuple[float, ...] = (1.0, 0.5)
) -> Outcome:
    """As `trials.read_outcome` reads it from the files of a run."""
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    test = {"loss": 0.1, "accuracy": accuracy}
    seen = 100 * len(epoch_seconds)
    summary = {
        "epoch_seconds": epoch_seconds,
        "samples_seen": seen,
        "seconds": 9.0,
        "test": test,
        "epochs": 2,
        "steps": 2,
    }
    return Outcome(0, 12.0, summary, lines)


# --- the report -----------------------------------------------------------------------------------

SPITEFUL = '<script>alert(1)</script> |_x_| `y` $z$ *b* [l](u) & "q"'


def spiteful_report() -> Report:
    """Whatever a name or an error message may hold, wherever it may stand."""
    table = Table(SPITEFUL, ["name", SPITEFUL], [[SPITEFUL, 1], ["=cmd()", float("nan")]], SPITEFUL)
    plot = Plot(SPITEFUL, bars([Bar(SPITEFUL, 1.0)], Axis(SPITEFUL)), SPITEFUL)
    return Report(SPITEFUL, SPITEFUL, [table, plot], {SPITEFUL: SPITEFUL}, [SPITEFUL])


def test_no_text_becomes_markup() -> None:
    page = as_page(spiteful_report())
    scripts = ['<script type="application/json" id="report">', *["<script>"] * 3]
    assert re.findall(r"<script[^>]*>", page) == scripts and SPITEFUL not in page
    found = report_in(page)
    table, plot = found["sections"]
    assert [found["title"], found["intro"], *found["commands"]] == [SPITEFUL] * 3
    assert [table["columns"][0]["texts"][0], plot["chart"]["x"]["label"]] == [SPITEFUL] * 2
    markdown = as_markdown(spiteful_report())
    row = next(line for line in markdown.splitlines() if line.startswith(r"| \<script"))
    assert (
        row
        == r"| \<script\>alert(1)\</script\> \|\_x\_\| \`y\` $z$ \*b\* \[l\](u) & " + '"q" | 1 |'
    )


def test_a_page_loads_nothing_and_has_a_library_only_for_plots() -> None:
    page = as_page(spiteful_report())
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert len(page) < 2_000_000, "with the library"
    without = as_page(Report("T", "", [Table("t", ["a"], [[1]])]))
    assert (
        not any(word in without for word in ("src=", "url(http", "@import", "<link"))
        and len(without) < 30_000
    )


def test_all_formats_hold_the_same_numbers(tmp_path: Path) -> None:
    one = Table("One", ["name", "s/epoch", "runs"], [["a", 0.25, 3], ["b", None, 0]])
    two = Table("Two", ["name", "loss"], [["a", 1.5e-7], ["b", float("inf")]], "why")
    assert (
        write(Report("T", "I", [one, two], {"Date": "today"}, ["python x"]), tmp_path)
        == tmp_path / "report.html"
    )
    content = json.loads((tmp_path / "report.json").read_text())
    assert [table["rows"] for table in content["tables"]] == [
        one.rows,
        [["a", 1.5e-7], ["b", None]],
    ]
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    assert [row["table"] for row in rows] == ["One", "One", "Two", "Two"]
    assert (rows[0]["s/epoch"], rows[1]["s/epoch"], float(rows[2]["loss"])) == ("0.25", "", 1.5e-7)
    assert "| a | 0.250 | 3 |\n| b | - | 0 |" in (tmp_path / "report.md").read_text()
    assert as_csv(spiteful_report()).splitlines()[2].split(",")[1] == "'=cmd()", (
        "no formula for a spreadsheet"
    )
    assert json.loads(as_json(spiteful_report()))["tables"][0]["rows"][1][1] is None


def test_numbers_of_a_column_have_the_decimals_of_its_middle() -> None:
    rows = [
        [0.1731, 25615.3, 99.181, 3e-6, 1.0],
        [2.4329, 18359.2, 98.6, 0.02, 1e-7],
        [14.7, 133.0, 9.1, 1.0, 0.0],
    ]
    shown = list(zip(*cells(Table("", list("abcde"), rows)), strict=True))
    assert shown[0] == ("0.173", "2.433", "14.700") and shown[1] == ("25,615", "18,359", "133")
    assert shown[2] == ("99.18", "98.60", "9.10")
    assert shown[3] == ("3.0e-06", "0.0200", "1.0000"), "too small for the column is not nothing"
    assert shown[4][2] == "0"


@pytest.mark.parametrize("width", [40, 200])
def test_a_file_has_every_number_however_long_its_lines_are(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("Wide", [f"column {n}" for n in range(12)], [[123456.0 + n for n in range(12)]])
    show(Report("", "", [table]), Console(width=width))
    out = capsys.readouterr().out.replace("\n", "")
    assert all(f"{123456 + n:,}" in out for n in range(12))


@pytest.mark.parametrize("width", [40, 80, 400])
def test_terminal_shows_columns_that_fit_and_names_others(width: int) -> None:
    columns = ["variant", "result", *[f"figure {number}" for number in range(9)]]
    written = io.StringIO()
    table = Table(
        "Variants", columns, [["none", "completed", *[1000.5 + number for number in range(9)]]]
    )
    show(
        Report("", "", [table]),
        Console(width=width, force_terminal=True, file=written, color_system=None),
    )
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    told = " ".join(" ".join(lines).split())
    left_out = [
        name
        for name in columns
        if name in told.partition("Columns not shown here (see the report):")[2]
    ]
    assert bool(left_out) == (width < 400) and all(name in told for name in ("variant", "result"))
    assert told.count("1,00") == 9 - len(left_out)


# --- statistics -----------------------------------------------------------------------------------


def test_a_verdict_needs_every_run_to_be_better() -> None:
    time = METRICS["epoch_seconds"]
    score = METRICS["test.accuracy"]
    assert verdict(time, [3.0, 3.1, 3.2], [2.0, 2.9, 1.0]) == "faster"
    assert verdict(time, [3.0, 3.1, 3.2], [3.3, 4.0, 9.0]) == "slower"
    assert verdict(time, [3.0, 3.1, 3.2], [1.0, 1.0, 3.0]) == "no effect within the noise"
    assert verdict(score, [90.0, 91.0, 92.0], [93.0, 94.0, 95.0]) == "better"
    assert verdict(score, [90.0, 91.0, 92.0], [89.0, 88.0, 87.0]) == "worse"
    assert verdict(time, [3.0, 3.1], [1.0, 1.0, 1.0]) == "too few runs"
    assert verdict(time, [], [1.0]) == ""


@pytest.mark.parametrize(("runs", "others"), [(3, 3), (3, 4), (2, 2)])
def test_how_often_chance_alone_looks_like_an_effect(runs: int, others: int) -> None:
    """Counted: every way to deal ranks to two variants."""
    ranks = range(runs + others)
    deals = list(itertools.combinations(ranks, runs))
    apart = [
        d for d in deals if max(d) < min(set(ranks) - set(d)) or min(d) > max(set(ranks) - set(d))
    ]
    assert results.false_positive_rate(runs, others) == pytest.approx(len(apart) / len(deals))


def test_the_first_epoch_counts_only_where_it_is_the_only_one() -> None:
    assert (
        results.epoch_seconds(outcome([9.0, 2.0, 4.0])) == 3.0
        and results.first_epoch(outcome([9.0, 2.0])) == 9.0
    )
    assert (
        results.epoch_seconds(outcome([9.0])) == 9.0 and results.first_epoch(outcome([9.0])) is None
    )
    assert results.samples_per_second(outcome([9.0, 2.0, 2.0])) == 50.0


# --- files and words ------------------------------------------------------------------------------


@functools.cache
def whole(name: str) -> tuple[Request, Study]:
    """A study as it is in its file, on a machine without GPUs: to compose all runs of one takes
    seconds."""
    request = read_request(PROGRAM, ["mode=study", f"study={name}"])
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        return request, plan(request)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PROGRAM.options("study")
        if "kind:" not in (CONF / "study" / f"{name}.yaml").read_text()
    ],
)
def test_every_study_of_variants_can_be_made_here(name: str) -> None:
    request, study = whole(name)
    assert study.first.device == "cpu" and not study.named(study.baseline).reason
    assert sum(not variant.reason for variant in study.variants) > 1
    gpu = [
        variant
        for variant in study.variants
        if "device=cuda" in variant.overrides or variant.name in study.config.needs_gpu
    ]
    assert gpu == [] or all(variant.reason for variant in gpu)
    assert all(
        "python launch.py" in command
        for command in variants_report.build_report(request, study, {}, 0.0).commands
    )


@pytest.mark.slow
def test_whatever_a_folder_is_called_its_runs_find_it(tmp_path: Path) -> None:
    for name in ("plain", "a b", "a=1,b={2}", "it's", "$x"):
        folder = tmp_path / name
        read_back = read_overrides(PROGRAM, [Trial([], folder).run_dir_word])
        assert (read_back.problems, read_back.given) == ([], {"run_dir": str(folder)})
    assert (
        planned("study=runs", "data=digits", "study.grid=['seed=1,2']").variants[1].folder
        == "seed_2"
    )


@pytest.mark.slow
def test_rung_has_the_tips_below_it_that_can_run() -> None:
    _, study = whole("tips")
    rungs = {variant.name: variant for variant in study.variants}
    fused = rungs["fused optimizer"]
    assert {
        "tuning=none",
        "tuning.precision=bf16",
        "tuning.channels_last=true",
        "tuning.optimizer=fused",
    } <= {*fused.overrides}
    assert (
        rungs["pin_memory"].reason == NEEDS_GPU and "tuning.pin_memory=true" not in fused.overrides
    )
    assert (fused.against, rungs["AMP"].against) == ("channels_last", "workers auto")


def test_command_line_wins_over_the_study() -> None:
    study = planned("study=tips", "data=synthetic", "study.only=[none]")
    assert study.first.data.name == "synthetic"


@pytest.mark.slow
def test_a_grid_is_every_combination_of_every_variant() -> None:
    study = planned(
        "study=large_batch",
        "study.grid=['train.global_batch_size=96,192',seed=1]",
        "study.baseline='sgd, global_batch_size=96, seed=1'",
    )
    assert [v.name for v in study.variants][:3] == [
        "sgd, global_batch_size=96, seed=1",
        "sgd, global_batch_size=192, seed=1",
        "lars, global_batch_size=96, seed=1",
    ]
    assert study.variants[1].values == {"train.global_batch_size": "192", "seed": "1"}


def test_later_override_replaces_earlier() -> None:
    assert merged(["a=1", "b.c=2"], ["++b.c=3"], ["d=4"]) == ["a=1", "++b.c=3", "d=4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "mode=study: needs the name of a study; add study="),
        (["study=strategy"], "study=strategy: must be one of"),
        (["study=tips", "-m"], "-m: mode=study takes no flag but --help; leave it out"),
        (
            ["study=tips", "study.repeat=3"],
            "study.repeat=3: no such key; did you mean study.repeats?",
        ),
        (["study=tips", "study.repeats=0"], "study.repeats=0: must be at least 1"),
        (
            ["study=tips", "study.only=[none]", "optimizer.lrr=1"],
            "did you mean optimizer.lr? (study.variants: none)",
        ),
        (["study=tips", "lr"], "lr: not of the form key=value"),
        (
            ["study=strategies", "strategy=single"],
            "strategy=single: study=strategies sets strategy for each variant",
        ),
        (
            ["study=strategies", "study.only=[dpp]"],
            "study.only=[dpp]: no variant of that name; did you mean dp?",
        ),
        (
            ["study=strategies", "study.only=[ddp]"],
            "study.only: leaves out the baseline; add single",
        ),
        (
            ["study=strategies", "study.against.dp=one"],
            "study.against=one: no variant of that name",
        ),
        (
            ["study=strategies", "study.only=[single,'ddp, SyncBN']"],
            "study.only: leaves out ddp, batch norm, the baseline of ddp, SyncBN; add it",
        ),
        (["study=strategies", "study.baseline=one"], "study.baseline=one: no variant of that name"),
        (
            ["study=strategies", "study.variants.mine=3"],
            "study.variants.mine=3: must be a list of overrides",
        ),
        (
            ["study=strategies", "study.variants.mine=[train.epochs=0]"],
            "must be at least 1 (study.variants: mine)",
        ),
        (
            ["study=strategies", "study.only=[single]", "train.epochs=0"],
            "train.epochs=0: must be at least 1",
        ),
        (
            ["study=strategies", "study.only=[single]", "launch.nnodes=2"],
            "a study runs on one host",
        ),
    ],
)
def test_mistakes_are_told_before_anything_runs(words: list[str], message: str) -> None:
    assert message in refused(*words)


@pytest.mark.slow
def test_a_study_is_no_run(tmp_path: Path) -> None:
    """Neither its words without its mode, nor its mode in a sweep, nor under torchrun's
    environment."""
    for words, message in (
        (["study=tips"], "study=tips: belongs to mode=study"),
        (["-m", "mode=train,study"], "mode=study: cannot be set in a config file or a sweep"),
        (["+mode=study", "study=tips"], "belongs to mode=study"),
    ):
        done = run(*words, f"run_dir={tmp_path}/none")
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_variant_that_does_not_fit_this_machine_keeps_its_row() -> None:
    study = planned(
        "study=strategies",
        "study.variants.many=[strategy=ddp,launch.nproc_per_node=5]",
        *TINY[:2],
        "study.only=[single,ddp,many]",
    )
    assert study.named("many").reason.startswith(
        "cannot run here: train.global_batch_size=24: cannot be split over 5"
    )


def test_help_shows_what_there_is_and_the_keys_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.study(PROGRAM, ["mode=study", "--help"], None) == 0
    out = capsys.readouterr().out
    assert all(f"study={name} " in out for name in PROGRAM.options("study"))
    assert main.study(PROGRAM, ["mode=study", "study=scaling", "-h"], None) == 0
    out = capsys.readouterr().out
    assert "study.KEY=VALUE" in out and (CONF / "study/scaling.yaml").read_text().strip() in out


def test_nothing_is_begun_once_a_study_is_stopped(tmp_path: Path) -> None:
    trial = Trial(["train.epochs=1"], tmp_path / "trial")
    stop = StopRequests()
    stop.received.append(signal.SIGTERM)
    trial.run_dir.mkdir()
    assert trials.run(trial, PROGRAM, stop) is None
    assert trial.run_dir.exists() and not trial.output.exists()


# --- tables ---------------------------------------------------------------------------------------


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


# --- the run directory ----------------------------------------------------------------------------

KINDS = {
    "strategies": ["study.only=[single,ddp]"],
    "scaling": ["study.processes=2"],
    "batch_size": ["study.memory_gb=2"],
    "gradients": [],
    "simulate": ["study.step_ms=1", "study.gradient_mb=1", "study.dry_plan=false"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_study_has_its_run_directory_alone(name: str, tmp_path: Path) -> None:
    held = run_lock.acquire(tmp_path / run_lock.FILE)
    with pytest.raises(
        ConfigError, match=rf"run_dir={tmp_path}: in use by another study, process {os.getpid()} on"
    ):
        main.study(
            PROGRAM, ["mode=study", f"study={name}", *KINDS[name], f"run_dir={tmp_path}"], None
        )
    held.release()
    assert [path.name for path in tmp_path.iterdir()] == [run_lock.FILE], "nothing was run"


def enter(request: Request) -> None:
    """As a study does before its first run."""
    with request.resources, trial_session(request):
        pass


def test_a_trial_is_run_once_and_none_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = read_request(PROGRAM, ["mode=study", "study=scaling", f"run_dir={tmp_path}"])
    one, other = (Trial([f"seed={seed}"], tmp_path / "trials" / str(seed)) for seed in range(2))
    began: list[Trial] = []

    def begin(trial: Trial, script: Path, _: StopRequests) -> Outcome | None:
        began.append(trial)
        return leave(trial, script, [])

    def ask(trial: Trial) -> Outcome | None:
        return trials.run_or_load(
            request, trial, "the trial", lambda outcome: f"{outcome.seconds:.0f} s"
        )

    monkeypatch.setattr(trials, "run", begin)
    assert (first := ask(one)) and ask(one) == first
    request.stop.received.append(signal.SIGTERM)
    assert ask(one) == first and ask(other) is None
    assert began == [one] and capsys.readouterr().out == "the trial  1 s\n"


@pytest.mark.parametrize(
    ("cores", "load", "told"), [(2, 0.9, False), (2, 1.0, True), (32, 7.9, False), (32, 8.0, True)]
)
def test_other_work_on_the_machine_is_told(
    cores: int,
    load: float,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert load_at_start() == load
    assert (f"note: load average {load:.1f} at the start" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("name", "there"),
    [("torch", "1.0"), ("hardware", "8 x H100"), ("source", "0f0f"), ("old", "1")],
)
def test_trials_of_other_conditions_are_not_mixed_with_new_ones(
    name: str, there: str, tmp_path: Path
) -> None:
    here = conditions(PROGRAM)
    record = tmp_path / "trials/single/0.json"
    record.parent.mkdir(parents=True)
    request = read_request(PROGRAM, ["mode=study", "study=strategies", f"run_dir={tmp_path}"])
    for known in ({**here, name: there}, None):
        write_json(
            record,
            {"words": [], "exit_code": 0, "seconds": 1.0}
            | ({"conditions": known} if known else {}),
        )
        with pytest.raises(
            ConfigError,
            match=r"holds trials from other conditions, [\w-]+ was .*; use another run_dir",
        ):
            enter(request)
    write_json(record, {"words": [], "exit_code": 0, "seconds": 1.0, "conditions": here})
    enter(request)


def test_source_digest_leaves_out_what_reports_on_runs(tmp_path: Path) -> None:
    for package in ("ddp_train", "ddp_lab"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    copy = dataclasses.replace(PROGRAM, presets=tmp_path / "ddp_train/conf")
    before = source_digest(copy)
    assert before == source_digest(PROGRAM)
    own = dataclasses.replace(copy, own=tmp_path / "conf")
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("name: mine")
    assert before != source_digest(own), "presets of one's own too"
    for name, counts in (
        ("ddp_lab/study/variants_report.py", False),
        ("ddp_lab/doctor/host_checks.py", False),
        ("ddp_train/conf/study/tips.yaml", False),
        ("ddp_train/engine/loop.py", True),
        ("ddp_lab/study/step_times.py", True),
        ("ddp_train/conf/config.yaml", True),
    ):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content + "# more")
        assert (source_digest(copy) != before) == counts, name
        (tmp_path / name).write_text(content)


# --- real runs ------------------------------------------------------------------------------------

STUDY = (
    "mode=study",
    "study=strategies",
    "study.only=[single,ddp,bad]",
    *TINY,
    "study.variants.bad=[strategy=single,optimizer.lr=1e30]",
    "launch.fork_server=true",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A study of three variants, one of which fails, by the real command."""
    folder = tmp_path_factory.mktemp("study") / "study"
    return folder, run(*STUDY, "study.repeats=1", f"run_dir={folder}")


@pytest.mark.slow
def test_a_study_keeps_the_row_of_a_variant_that_fails(made: tuple[Path, Any]) -> None:
    folder, done = made
    assert done.returncode == 0, done.stderr
    table, agreement, failed = json.loads((folder / "report.json").read_text())["tables"]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert rows["bad"]["result"] == "non_finite_loss: see below" and rows["bad"]["runs"] == 0
    assert [name for name, reason in failed["rows"] if reason.startswith("non_finite_loss: ")] == [
        "bad"
    ]
    assert table["columns"][:3] == ["variant", "s/epoch", "result"], (
        "on a phone the metric is in sight"
    )
    assert rows["ddp"]["result"] == rows["single"]["result"] == "completed"
    summary = read(folder / "trials/ddp/0", "summary.json")
    assert rows["ddp"]["s/epoch"] == summary["epoch_seconds"][1], "without the first"
    assert rows["ddp"]["test accuracy %"] == 100 * summary["test"]["accuracy"]
    loss, weight = next(row[2:] for row in agreement["rows"] if row[:2] == ["ddp", "single"])
    assert 0 <= loss < 1e-6 and 0 < weight < 1e-6, (
        "two processes and one: four steps of float32 apart"
    )
    assert f"report {folder}/report.html" in done.stdout and "non_finite_loss" in done.stdout
    sections = report_in((folder / "report.html").read_text())["sections"]
    assert "bars" in [part["chart"]["kind"] for part in sections if part["kind"] == "plot"]


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_left(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second round is no real one."""
    folder, _ = made
    before = (folder / "trials/ddp/0/summary.json").stat().st_mtime_ns
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    summary = {"epoch_seconds": [9.0, 1.0], "samples_seen": 96, "epochs": 2, "steps": 4}
    monkeypatch.setattr(
        variant_trials, "run", lambda trial, script, _: leave(trial, script, [], summary)
    )
    only = [word.replace(",bad]", "]") for word in STUDY if not word.startswith("study.variants")]
    words = [*only, "study.repeats=2", f"run_dir={folder}"]
    program = dataclasses.replace(
        PROGRAM, own=Path("conf")
    )  # as the first round had, a real command in this folder
    assert main.study(program, words, None) == 0
    assert (folder / "trials/ddp/0/summary.json").stat().st_mtime_ns == before
    out = capsys.readouterr().out
    order = [line.split("  ")[1] for line in out.splitlines() if line.startswith("trial ")]
    assert order == ["single, repeat 1", "ddp, repeat 1", "ddp, repeat 2", "single, repeat 2"]
    assert out.count("(from an earlier run)") == 2
    with pytest.raises(
        ConfigError, match=r"holds a trial with other settings \(train.max_steps=3\)"
    ):
        main.study(program, [*words, "train.max_steps=3"], None)


@pytest.mark.slow
def test_interrupted_study_leaves_report_and_no_process(tmp_path: Path) -> None:
    words = (
        "mode=study",
        "study=strategies",
        "study.only=[single,ddp]",
        *ENDLESS[:3],
        "study.common=[tuning=none]",
    )
    with running(tmp_path / "study", *words) as job:
        wait_until(
            lambda: (tmp_path / "study/trials/single/0/metrics.jsonl").exists(),
            "a trial that trains",
        )
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
    assert processes_of(tmp_path / "study") == {}
    assert (
        "stopped; continue with python launch.py mode=study" in (tmp_path / "study.out").read_text()
    )
    rows = json.loads((tmp_path / "study/report.json").read_text())["tables"][0]["rows"]
    assert [row[2] for row in rows] == ["not run yet", "not run yet"]
