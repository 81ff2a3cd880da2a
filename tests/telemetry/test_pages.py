"""Pages: what they say of a run, that a browser shows them right, and that they cost a run
nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from ddp_train.commands.compare import compare
from ddp_train.commands.watch import screen, watch
from ddp_train.config.freeze import not_default
from ddp_train.config.overrides import read_overrides
from ddp_train.errors import ConfigError
from ddp_train.models.config import MlpConfig
from ddp_train.options.schema import Config
from ddp_train.resilience import run_lock
from ddp_train.resilience.preemption import INTERRUPTED, SAVED, UNSAVED
from ddp_train.resilience.whole_files import write_json
from ddp_train.sweeps.page import print_results
from ddp_train.sweeps.plan import SweepPlan
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.table import SweepTable
from ddp_train.telemetry.pages.charts import Axis, Bar, Curve, bars, curves, thinned
from ddp_train.telemetry.pages.compare_page import compare_page
from ddp_train.telemetry.pages.findings import findings
from ddp_train.telemetry.pages.live import LivePage
from ddp_train.telemetry.pages.noise import welch
from ddp_train.telemetry.pages.page import HERE, as_page
from ddp_train.telemetry.pages.report import Lines, Plot, Report
from ddp_train.telemetry.pages.run_files import RunFiles, as_typed, glance, is_locked, read_run
from ddp_train.telemetry.pages.run_page import run_page, uses
from ddp_train.telemetry.pages.seeds import SeedGroups
from ddp_train.telemetry.pages.sweep_page import Sweep, goes_on, sweep_page
from ddp_train.telemetry.pages.tables import Table, show
from ddp_train.telemetry.pages.timeline import Timeline
from ddp_train.telemetry.pages.trials import trials_table
from tests.support.browser import Page, browser, installed
from tests.support.commands import ENDLESS, ONE, PROGRAM, SMALL, read, run, running, wait_until
from tests.support.pages import report_in, section_of

NO_BROWSER = "no browser is installed (Debian: apt-get install chromium)"
BOUND = 2_000_000
"""Bytes of a page."""


def leave_run(folder: Path, epochs: int = 4, best: float = 0.9, **summary: Any) -> Path:
    """The files of a run of some epochs, of 10 steps each."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        step = 10 * epoch
        moment = 1.7e9 + 60 * epoch
        figures = {"cpu_cores": [0.9, 0.8], "resident_gib": [0.5, 0.5]}
        lines.append(
            {
                "kind": "train",
                "step": step,
                "epoch": epoch,
                "time": moment,
                "loss": 2 / epoch,
                "lr": 0.1,
                "lrs": [0.1],
                "samples_per_second": 900.0,
                "figures": figures,
            }
        )
        lines.append(
            {
                "kind": "test",
                "step": step,
                "epoch": epoch,
                "time": moment,
                "loss": 1 / epoch,
                "accuracy": best - 0.1 * (epochs - epoch),
                "correct": 9,
                "samples": 10,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = "name: a\ndevice: cpu\nlaunch: {nproc_per_node: 2}\nstrategy: {name: ddp}\n"
    config += "train: {epochs: 4, max_steps: null}\noptimizer: {lr: 0.1}\n"
    (folder / "config.yaml").write_text(config)
    command = {
        "command": "python launch.py model=mlp",
        "started": "2023-11-14T22:13:20+00:00",
        "git_revision": "abc",
    }
    (folder / "commands.jsonl").write_text(json.dumps(command) + "\n")
    write_json(
        folder / "summary.json",
        {
            "status": "completed",
            "epochs": epochs,
            "seconds": 60.0,
            "better": {"accuracy": "max", "loss": "min"},
            **summary,
        },
    )
    return folder


# --- pure -----------------------------------------------------------------------------------------


def test_files_of_others_are_what_their_table_says() -> None:
    folder = HERE / "third_party"
    rows = re.findall(
        r"^\| (\S+) \| \S+ \| \S+ \| .* \| ([0-9a-f]{64}) \|$",
        (folder / "README.md").read_text(),
        re.M,
    )
    assert {name for name, _ in rows} | {"README.md"} == {path.name for path in folder.iterdir()}
    assert all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in rows
    )


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    values = [1.0] * 100_000
    values[77_777], values[5] = 50.0, -3.0
    kept = thinned(range(100_000), values)
    assert len(kept) <= 602 and {0, 5, 77_777, 99_999} <= {*kept} and kept == sorted(kept)
    assert curves([Curve("a", [1, 2], [None, float("nan")])], Axis("x"), Axis("y")) is None, (
        "nothing to draw"
    )


def test_a_curve_that_is_nearly_flat_has_no_steps_of_rounding() -> None:
    rates = [0.05 - 1e-8 * step for step in range(300)]
    (curve,) = curves([Curve("lr", range(300), rates)], Axis("step"), Axis("lr"))["curves"]  # type: ignore
    assert len({y for _, y in curve["points"]}) == 300
    (curve,) = curves([Curve("loss", range(2), [2.0, 1 / 3])], Axis("step"), Axis("loss"))["curves"]  # type: ignore
    assert curve["points"] == [[0, 2.0], [1, 0.333333]]


def timed(*ranks: dict[str, float], **summary: Any) -> list[str]:
    config = {"strategy": {"name": "ddp"}}
    found = RunFiles(
        Path("r"), config, summary={"status": "completed"} | summary, timeline={"seconds": [*ranks]}
    )
    return findings(found)


def test_what_held_a_run_back_is_said_only_where_the_figures_support_it() -> None:
    even = {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer step": 1.0}
    assert timed(even | {"data": 0.1}, even | {"data": 0.1})[0].startswith("Not input-bound: 0.2%")
    waits = timed(even | {"data": 40.0}, even | {"data": 40.0})
    assert waits[0].startswith("Input-bound: 40%") and "tuning.num_workers" in waits[0]
    busy = timed(even | {"data": 40.0}, figures={"gpu_utilisation": 95.0})
    assert not any("nput-bound" in text for text in busy), "the host waits while the GPU computes"
    late = timed(even, even | {"forward": 40.0, "backward": 20.0}, even)
    assert any(text.startswith("Straggler: rank 1") for text in late)
    assert not any("Straggler" in text for text in timed(even, even))
    assert any("Slow checkpoints: 20%" in text for text in timed(even | {"checkpoint": 15.5}))
    assert any(
        "29%" in text and "train.evaluate_every_epochs" in text
        for text in timed(even | {"evaluation data": 25.0})
    )
    assert timed({"forward": 2.0}) == [], "too short to say"
    assert any(
        "GPUs computed 40 % of the time" in text
        for text in timed(figures={"gpu_utilisation": 40.0})
    )


def test_the_timeline_goes_on_where_earlier_processes_ended(tmp_path: Path) -> None:
    for _ in range(2):
        timeline = Timeline(tmp_path)
        timeline.last -= 3.0
        timeline.look(["data", "start"])
        timeline.add_event("failure", "died (rank 1)", 7)
        timeline.write()
    found = read(tmp_path, "timeline.json")
    assert found["seconds"][0]["data"] == pytest.approx(6.0, abs=0.5) and found["seconds"][1] == {}
    assert [event["step"] for event in found["events"]] == [7, 7]


def test_settings_that_are_not_the_default_are_told_apart() -> None:
    config = Config(seed=3, device="cpu", model=MlpConfig(hidden=99))
    assert not_default(config) == {
        "seed": 3,
        "model": "mlp",
        "model.hidden": 99,
    }, "device: auto has chosen"


def test_a_page_of_every_state_says_it(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    page = as_page(run_page(read_run(folder), {"model": "<mlp>"}, 10))
    titles = [section["title"] for section in report_in(page)["sections"]]
    assert {"Memory of a process", "CPU cores in use"} <= {*titles}
    uses = section_of(page, "What to do with it")["lines"]
    assert "mode=evaluate checkpoint.resume=" in uses[0] and "train.epochs=8" in uses[2]
    assert uses[2].startswith("python launch.py run_dir=")
    assert section_of(page, "Settings that are not the default")["lines"] == ["model=<mlp>"]
    assert "<mlp>" not in page and 'http-equiv="refresh"' not in page
    assert len(page.encode()) < BOUND
    write_json(folder / "summary.json", {"status": "failed"})
    write_json(
        folder / "failure.json",
        {
            "kind": "oom",
            "rank": 1,
            "step": 7,
            "phase": "forward",
            "detail": "no memory",
            "remedy": "less",
            "log": "l",
        },
    )
    report = run_page(read_run(folder), {})
    assert (
        report.state.startswith("failed") and "oom; rank 1, step 7, forward" in report.findings[0]
    )
    (folder / "summary.json").write_text("{cut o")
    (folder / "failure.json").unlink()
    (folder / "metrics.jsonl").write_bytes(b'{"kind": "tra')
    report = run_page(read_run(folder), {})
    assert report.state == "ended" and "run_dir=" in report.findings[0]


def test_a_living_page_comes_seldom_and_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leave_run(tmp_path / "r")
    (folder / "summary.json").unlink()
    page = LivePage(folder, {})
    page.look(["data"])
    assert not (folder / "report.html").exists(), "nothing has been measured since the start"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    page.look(["data"])
    text = (folder / "report.html").read_text()
    assert 'http-equiv="refresh" content="10"' in text
    assert report_in(text)["state"].startswith("running, step 40")
    (folder / "report.html").unlink()
    (folder / "metrics.jsonl").write_text("")
    page.look(["data"])
    assert not (folder / "report.html").exists() and page.due > time.monotonic() + 9
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    page.write(is_running=True)
    page.write(is_running=True)
    assert capsys.readouterr().err.count("No space left on device; the run goes on") == 1
    LivePage(folder, {}).write()
    assert capsys.readouterr().err.endswith("No space left on device\n"), (
        "nothing goes on after the last page"
    )


# --- sweeps ---------------------------------------------------------------------------------------


def sweep_rows(folder: Path, **keys: list[Any]) -> list[dict[str, Any]]:
    """Rows of a grid, with their runs: the accuracy depends on the first key alone, and a little on
    the last."""
    rows = []
    for number, values in enumerate(itertools.product(*keys.values())):
        best = (
            0.5
            + 0.1 * next(iter(keys.values())).index(values[0])
            + 0.01 * list(keys.values())[-1].index(values[-1])
        )
        run_dir = leave_run(folder / str(number), best=best)
        words = [
            f"{key.replace('__', '.')}={value}" for key, value in zip(keys, values, strict=True)
        ]
        rows.append(
            {
                "trial": number,
                "overrides": words,
                "status": "completed",
                "exit_code": 0,
                "objective": best,
                "accuracy": best,
                "loss": 0.1,
                "seconds": 1.0,
                "run_dir": str(run_dir),
            }
        )
    return rows


def page_of_sweep(folder: Path, rows: list[dict[str, Any]]) -> Report:
    return sweep_page(Sweep(folder, rows, "test.accuracy", "max", "python launch.py -m"))


def test_the_best_trial_is_first_with_the_command_that_evaluates_it(
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
    assert "cannot be told" in report.findings[0] and "seed=0,1,2" in report.findings[0]
    kinds = [plot.chart["kind"] for plot in report.plots if plot.chart]
    assert kinds == ["curves", "scatter"], "the parameter has a plot of its own"


def test_seeds_are_grouped_and_noise_is_told_from_effect(tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2], model__hidden=[8, 16], seed=[0, 1, 2])
    report = page_of_sweep(tmp_path, rows)
    seeds = next(table for table in report.tables if "over seeds" in table.title)
    assert [row[0] for row in seeds.rows[:2]] == [
        "optimizer.lr=0.2 model.hidden=8",
        "optimizer.lr=0.2 model.hidden=16",
    ]
    assert (
        seeds.rows[0][1:6] == pytest.approx([61.0, 1.0, 60.0, 62.0, 3])
        and seeds.rows[2][6] < 0.01 < seeds.rows[1][6]
    )
    assert "1.00%" in report.findings[0] and "12 runs" in report.findings[0]
    assert (
        "cannot be told from noise against 1 other: optimizer.lr=0.2 model.hidden=16"
        in report.findings[1]
    )
    assert [plot.chart["kind"] for plot in report.plots if plot.chart] == ["curves", "parallel"]
    assert len(as_page(report).encode()) < BOUND


def test_a_plot_of_curves_has_lines(tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2, 0.3])
    for row in rows:
        path = Path(row["run_dir"]) / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert [plot.chart["kind"] for plot in page_of_sweep(tmp_path, rows).plots if plot.chart] == [
        "scatter"
    ]


def test_settings_are_shown_as_they_are_typed(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    command = {"command": "python launch.py ++model.how=oom launch.nproc_per_node=1 run_dir=r"}
    (folder / "commands.jsonl").write_text(json.dumps(command))
    typed = {
        "seed": 3,
        "model": "custom",
        "model.target": "net.Net",
        "model.arguments": {"how": "oom"},
    }
    sections = {section.title: section for section in run_page(read_run(folder), typed).sections}
    lines = sections["Settings that are not the default"].lines  # type: ignore
    assert lines == ["seed=3", "model._target_=net.Net", "model.how=oom", "launch.nproc_per_node=1"]
    assert as_typed({"model": {"name": "custom", "target": "a.B", "arguments": {}}}).keys() == {
        "model.name",
        "model._target_",
    }


def test_settings_that_ran_once_are_not_said_to_be_worse(tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2, 0.3], seed=[0, 1, 2])
    assert (
        page_of_sweep(tmp_path, rows)
        .findings[1]
        .startswith("optimizer.lr=0.3 is better than all others by more")
    )
    found = page_of_sweep(tmp_path, [row for row in rows if row["trial"] not in (1, 2)]).findings[1]
    assert "is better than 1 other by more than noise" in found, found
    assert found.endswith(" 1 other ran once and cannot be compared.") and "all others" not in found


def seeded(**losses: list[float]) -> list[dict[str, Any]]:
    """Rows of a sweep over settings and seeds."""
    runs = [
        (name, seed, loss) for name, values in losses.items() for seed, loss in enumerate(values)
    ]
    return [
        {"trial": trial, "overrides": [f"optimizer.name={name}", f"seed={seed}"], "objective": loss}
        for trial, (name, seed, loss) in enumerate(runs)
    ]


def test_a_setting_that_diverges_is_no_noise_of_the_others() -> None:
    rows = seeded(sgd=[0.51, 0.57], adam=[0.5, 0.6], lars=[2.4, 4.6])
    spread, close, apart = SeedGroups(rows, "test.loss", "min").findings()
    assert "differ by 0.0424 to 1.5556 (" in spread and "3 settings, 6 runs" in spread
    assert close.endswith("cannot be told from noise against 1 other: optimizer.name=adam.")
    assert apart.startswith(
        "Each run of optimizer.name=sgd is better than all of 1 other: optimizer.name=lars."
    )
    spread, apart = SeedGroups(
        seeded(sgd=[0.9, 0.91], adam=[0.1, 0.5]), "test.accuracy", "max"
    ).findings()
    assert "1 other: optimizer.name=adam" in apart and "noise" not in apart, "higher is better"


def test_a_sweep_of_one_trial_without_parameters_compares_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"trial": 0, "overrides": [], "status": "completed", "exit_code": 0, "objective": 1.1235}
    print_results([row], "test.loss", "min", 1)
    assert "\ntrial 0: test.loss 1.1235\n" in capsys.readouterr().out
    report = sweep_page(Sweep(tmp_path, [row], "test.loss", "min", "python launch.py -m"))
    assert report.findings == [] and "with" not in report.numbers


def test_the_results_of_a_sweep_in_80_columns_say_how_each_trial_ended_and_what_is_noise(
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
    assert "Runs that differ in their seed alone differ by" in " ".join(out.split())
    wide = trials_table(rows, "validation.accuracy").columns
    assert {"validation.accuracy %", "test.accuracy %", "test.loss"} <= {*wide}, "of which split"


def test_a_sweep_of_hundreds_of_long_trials_stays_small(tmp_path: Path) -> None:
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


def test_a_living_sweep_shows_the_trials_that_run_and_a_stopped_one_how_to_go_on(
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


def test_the_page_of_a_sweep_is_there_before_a_trial_ends_and_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    plan = SweepPlan(tmp_path, "python launch.py -m", swept=frozenset({"optimizer.lr"}))
    listener = PoolListener(TrialRunner(PROGRAM, SweepTable(plan), None))
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
def test_a_sweep_has_a_page_from_the_start_and_tells_who_stops_it_how_to_go_on(
    tmp_path: Path, words: tuple[str, ...], at_once: int
) -> None:
    words = ("-m", "optimizer.lr=0.1,0.2,0.3", ONE, *ENDLESS, *words)
    with running(tmp_path / "s", *words) as sweep:
        sweep.wait_for_file("report.html")
        assert not (tmp_path / "s/results.jsonl").exists()
        wait_until(lambda: any(tmp_path.glob("s/*/metrics.jsonl")), "metrics.jsonl of a trial")
        sweep.process.send_signal(signal.SIGINT)
        assert sweep.end() in (INTERRUPTED, SAVED, UNSAVED)
    state = f"stopped: 0 of 3 trials completed, {3 - at_once} not begun"
    assert f"{state}; to go on:\n  python launch.py" in sweep.output.read_text()
    assert report_in((tmp_path / "s/report.html").read_text())["state"] == state


@pytest.mark.parametrize("name", ["lr=1", "a,b", "it's", 'a"b\\', "my runs", "[x]", "{y:1}"])
def test_printed_commands_are_read_by_hydra_as_they_are_meant(tmp_path: Path, name: str) -> None:
    folder = leave_run(tmp_path / name)
    printed = [*uses(read_run(folder)), goes_on("python launch.py -m seed=1,2", folder)]
    words = [
        word
        for line in printed
        for word in shlex.split(line)
        if word.startswith(("run_dir", "checkpoint"))
    ]
    read_back = [read_overrides(PROGRAM, [word]) for word in words]
    assert len(words) == 4 and not any(found.problems for found in read_back)
    assert [*read_back[0].given.values()] == [*read_back[-1].given.values()] == [str(folder)]


@pytest.mark.parametrize(
    "samples",
    [([1.0, 2.0, 4.0], [3.0, 5.0, 9.0, 11.0]), ([1.0, 1.1], [1.0, 9.0]), ([1, 2], [1, 2])],
)
def test_welch_is_that_of_scipy(samples: tuple[list[float], list[float]]) -> None:
    expected = stats.ttest_ind(samples[1], samples[0], equal_var=False)
    found = welch(*samples)
    assert found and found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert [found.low, found.high] == pytest.approx([*expected.confidence_interval(0.95)], rel=1e-6)
    assert welch([1.0], [2.0, 3.0]) is None


@pytest.mark.parametrize("width", [30, 80, 10_000])
def test_no_word_and_no_number_of_a_table_is_broken(width: int) -> None:
    words = ["tuning.num_workers=2,4", "optimizer.lr=0.0005 model.hidden=16"]
    table = Table(
        "T", ["overrides", "accuracy %", "status"], [[word, 98.765, "completed"] for word in words]
    )
    for is_terminal in (True, False):
        written = io.StringIO()
        show(
            table, Console(width=width, file=written, force_terminal=is_terminal, color_system=None)
        )
        lines = written.getvalue().splitlines()
        shown = {word for line in lines for word in line.split()}
        assert {
            "tuning.num_workers=2,4",
            "optimizer.lr=0.0005",
            "model.hidden=16",
            "98.77",
        } <= shown
        if not is_terminal:
            assert any(
                "optimizer.lr=0.0005 model.hidden=16" in line and "completed" in line
                for line in lines
            )


# --- comparisons ----------------------------------------------------------------------------------


def compared(folder: Path, *bests: float, repeats: int = 1) -> Report:
    """Runs that differ in their learning rate, each repeated with other seeds."""
    runs = []
    for number, best in enumerate(bests):
        for seed in range(repeats):
            run_dir = leave_run(folder / f"{number}_{seed}", best=best + 0.01 * seed)
            text = (run_dir / "config.yaml").read_text().replace("lr: 0.1", f"lr: 0.{number + 1}")
            (run_dir / "config.yaml").write_text(f"seed: {seed}\nrun_dir: {run_dir}\n{text}")
            runs.append(read_run(run_dir))
    return compare_page(runs, "ddp-train compare")


def test_what_differs_is_listed_and_one_run_of_each_tells_nothing_of_noise(tmp_path: Path) -> None:
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


def test_compare_takes_folders_and_says_in_one_error_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path / "runs", 0.9, 0.95)
    assert compare([str(tmp_path / "runs"), "--output", str(tmp_path / "p.html")]) == 0
    out = capsys.readouterr().out
    assert "1_0 against 0_0" in out
    sections = report_in((tmp_path / "p.html").read_text())["sections"]
    assert [section["kind"] for section in sections].count("table") == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as error:
        compare([str(tmp_path / "run"), str(tmp_path / "empty"), str(tmp_path / "runs")])
    assert len(error.value.problems) == 2 and "no run is there" in str(error.value)
    for words in ([], ["--what"], [str(tmp_path / "runs/0_0")]):
        with pytest.raises(ConfigError, match="compare RUN RUN"):
            compare(words)


@pytest.mark.parametrize("count", [2, 3, 13])
def test_a_comparison_in_80_columns_shows_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "is_terminal", True)
    rates = [0.11 + 0.01 * number for number in range(count)]
    for number, rate in enumerate(rates):
        run_dir = leave_run(tmp_path / f"runs/a_run_with_a_name_{number}")
        text = (run_dir / "config.yaml").read_text().replace("lr: 0.1", f"lr: {rate:.2f}")
        (run_dir / "config.yaml").write_text(
            text + f"data: {{folder: a_folder_with_a_long_name_{number}}}\n"
        )
        line = {"command": "c", "hardware": f"{number + 1} cores AMD EPYC, 24 GiB"}
        (run_dir / "commands.jsonl").write_text(json.dumps(line))
    assert compare([str(tmp_path / "runs")]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 80 and "not shown" not in out
    assert all(
        f" {rate:.2g}" in out and f"a_folder_with_a_long_name_{at}" in out
        for at, rate in enumerate(rates)
    )
    assert {"samples/s", "state"} <= {*out.split()} and "--output compare.html" in out
    assert "AMD" not in out and "CPU cores that it could use" in " ".join(out.split()), (
        "the share of a trial"
    )
    words = {word for line in lines for word in line.split()}
    assert {"independent", "repeat", "noise"} <= words, "sentences break between words"


# --- many runs ------------------------------------------------------------------------------------


def test_watch_shows_what_runs_what_failed_and_what_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("done", "fails", "lives", "dead"):
        leave_run(tmp_path / "runs/a" / name)
    write_json(tmp_path / "runs/a/fails/summary.json", {"status": "failed"})
    write_json(
        tmp_path / "runs/a/fails/failure.json", {"kind": "oom", "detail": "out of\nmemory " * 9}
    )
    for name in ("lives", "dead"):
        (tmp_path / "runs/a" / name / "summary.json").unlink()
    held = run_lock.acquire(tmp_path / "runs/a/lives/lock.json")
    try:
        assert watch([str(tmp_path / "runs")]) == 0
        assert is_locked(tmp_path / "runs/a/lives/lock.json") and run_lock.is_held(
            tmp_path / "runs/a/lives/lock.json"
        )
    finally:
        held.release()
    assert not is_locked(tmp_path / "runs/a/lives/lock.json") and not is_locked(
        tmp_path / "nowhere"
    )
    shown = {
        line.split()[0]: line
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith("a/")
    }
    assert {name: line.split()[1:4] for name, line in shown.items()} == {
        "a/done": ["completed", "40", "4"],
        "a/fails": ["failed", "40", "4"],
        "a/lives": ["running", "40", "4"],
        "a/dead": ["ended", "40", "4"],
    }
    assert (
        "90.00" in shown["a/done"]
        and "ago" in shown["a/lives"]
        and "oom: out of memory out of" in shown["a/fails"]
    )
    for words in ([], ["a", "b"], [str(tmp_path / "run")]):
        with pytest.raises(ConfigError, match="watch"):
            watch(words)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (120, 30)])
def test_watch_fits_the_terminal_and_shows_why_a_run_failed(
    tmp_path: Path, width: int, height: int
) -> None:
    for number in range(30):
        leave_run(tmp_path / f"a_sweep_with_a_rather_long_name/{number}")
    failed = tmp_path / "a_sweep_with_a_rather_long_name/29"
    write_json(failed / "summary.json", {"status": "failed"})
    write_json(failed / "failure.json", {"kind": "oom", "detail": "out of memory " * 9})
    console = Console(
        width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None
    )
    runs = [glance(failed.with_name(str(number))) for number in range(30)]
    console.print(screen(tmp_path, runs, console))
    lines = console.file.getvalue().splitlines()  # type: ignore
    assert (
        len(lines) < height
        and max(map(len, lines)) <= width
        and lines[-1].startswith("Ctrl-C ends")
    )
    newest = next(line for line in lines if "long_name/29" in line)
    assert "failed" in newest and "oom: out of memory out of" in newest
    assert any("older runs not shown" in line for line in lines)


# --- a real run -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_its_page(tmp_path: Path) -> None:
    done = run(*SMALL, "train.epochs=3", "run_dir=r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "r/report.html").read_text()
    assert report_in(page)["state"] == "completed"
    assert section_of(page, "Loss")["chart"]["kind"] == "curves"
    assert {"hardware", "versions", "host"} <= json.loads(
        (tmp_path / "r/commands.jsonl").read_text()
    ).keys()
    assert len(read(tmp_path / "r", "timeline.json")["seconds"]) == 2
    chosen = section_of(page, "Settings that are not the default")["lines"]
    assert not any("launch.page" in line for line in chosen)


# --- a real browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if not installed():
        pytest.skip(NO_BROWSER)
    with browser() as page:
        yield page


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def looked_at(tab: Page, path: Path) -> None:
    """At both widths, light and dark: nothing is wider than the screen, all plots are drawn,
    nothing is reported."""
    tab.problems.clear()
    backgrounds = set()
    for width in (390, 1280):
        for dark in (False, True):
            tab.open(path, width, dark=dark)
            assert tab.ask(OVERFLOW) == 0, f"{path} is wider than {width} px"
            drawn = (
                "[...document.querySelectorAll('.frame')].map(f => f.querySelectorAll('svg"
                " path').length)"
            )
            assert all(tab.ask(drawn)), "each plot has lines"
            backgrounds.add(tab.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2 and tab.problems == []


@pytest.mark.slow
def test_a_browser_shows_the_page_of_a_run(tab: Page, tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r", epochs=12)
    path = folder / "report.html"
    path.write_text(as_page(run_page(read_run(folder), {"model": "mlp"})))
    looked_at(tab, path)
    first = "document.querySelector('tbody tr').cells[0].textContent"
    assert tab.ask(first) == "1"
    for expected in ("1", "12"):
        tab.click("th button")
        assert tab.ask(first) == expected
    tab.ask("window.scrollTo(0, 0)")
    middle = "const r = document.querySelector('.frame').getBoundingClientRect();"
    x, y = tab.ask(f"(() => {{ {middle} return [r.x + r.width / 2, r.y + r.height / 2] }})()")
    tab.move_to(x, y)
    assert "training:" in tab.ask("document.querySelector('.frame').textContent"), (
        "hovering names the values"
    )
    assert tab.problems == []


@pytest.mark.slow
def test_a_browser_shows_texts_of_others_as_text(tab: Page, tmp_path: Path) -> None:
    """Whatever a name or an error message may hold, wherever it may stand."""
    text = '<script>alert(1)</script><img src=x onerror=alert(2)> &amp; "q"'
    table = Table(text, [text, "n"], [[text, 1]], text)
    plot = Plot(text, bars([Bar(text, 1.0)], Axis(text)), text)
    lines = [Lines(text, [text], text), Lines(text, [text], text, folded=True)]
    sections = [table, plot, *lines]
    path = tmp_path / "report.html"
    report = Report(text, text, sections, {text: text}, [text], text, {text: text}, [text])
    path.write_text(as_page(report))
    looked_at(tab, path)
    assert tab.ask("document.querySelectorAll('main script, main img').length") == 0
    found = tab.ask("document.querySelector('main').textContent")
    # All but those of the axis, the bar and the name of the column, which are broken elsewhere.
    assert found.count(text) >= 17, found


@pytest.mark.slow
def test_a_browser_tells_ticks_and_events_apart(tab: Page, tmp_path: Path) -> None:
    """A schedule at its begin, a stop and a start at one step: no two words of a plot or a table
    lie on each other."""
    folder = leave_run(tmp_path / "r")
    lines = [
        {
            "kind": "train",
            "step": step,
            "epoch": 1,
            "time": 1.7e9 + step,
            "loss": 2 - step / 400,
            "samples_per_second": 9.0,
            "lr": 0.025 * (1 + math.cos(math.pi * step / 45_000)),
        }
        for step in range(1, 230)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts = [
        {"command": "python launch.py", "started": f"2023-11-14T22:{at}+00:00"}
        for at in ("13:20", "16:07")
    ]
    (folder / "commands.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    stop = {"kind": "stop", "time": 1.7e9 + 166, "step": None, "text": "stopped and saved"}
    write_json(folder / "timeline.json", {"seconds": [], "events": [stop]})
    path = folder / "report.html"
    path.write_text(as_page(run_page(read_run(folder), {})))
    looked_at(tab, path)
    for width in (390, 1280):
        tab.open(path, width)
        texts = (
            "[...document.querySelectorAll('.frame')].map(f =>"
            " [...f.querySelectorAll('text')].map(t => t.textContent))"
        )
        plots = tab.ask(texts)
        assert len(plots) == 3 and all(
            plot.count("stopped and saved, resumed") == 1 for plot in plots
        ), plots
        (ticks,) = (
            [text for text in plot if text.startswith("0.0")]
            for plot in plots
            if "learning rate" in plot
        )
        assert len(ticks) > 3 and len({*ticks}) == len(ticks), ticks
        cut = """[...document.querySelectorAll('.frame')].map(f => Math.min(...[...f.querySelectorAll('text')].map(
            t => t.getBoundingClientRect().left)) - f.getBoundingClientRect().left)"""
        assert min(tab.ask(cut)) >= 0, "labels are as wide as they were measured"
        wider = (
            "[...document.querySelectorAll('td, .wide')].filter(e => e.scrollWidth >"
            " e.clientWidth).length"
        )
        assert tab.ask(wider) == 0, "nothing is wider than its cell, or scrolls"


@pytest.mark.slow
def test_a_browser_shows_bars_bands_and_columns_on_demand(tab: Page, tmp_path: Path) -> None:
    """As pages of studies have them."""
    long = "a name that is far too long for the edge of a phone"
    name = "broken_with_a_rather_long_name"
    bars_of = [Bar("single", 2.0, 1.5, 2.5), Bar(long, 1.0), Bar(name, None, text="no GPU")]
    band = Curve("ddp", [1, 2, 4], [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5])
    names = [f"column {number}" for number in range(14)]
    table = Table("Wide", names, [[0.5 + number for number in range(14)]], first=names[:4])
    plots = [
        Plot("time", bars(bars_of[::2], Axis("s", whole=True), 2.0)),
        Plot("score", bars(bars_of, Axis("accuracy %"))),
        Plot("growth", curves([band], Axis("n", log=True, ticks=[1, 2, 4]), Axis("y", log=True))),
    ]
    path = tmp_path / "report.html"
    path.write_text(as_page(Report("Study", "", [table, *plots])))
    looked_at(tab, path)
    assert tab.ask("document.querySelector('.frame').textContent").count("no GPU") == 1
    tab.open(path, 1280)
    frame = "document.querySelector('.frame')"
    label = f"[...{frame}.querySelectorAll('text')].find(t => t.textContent == '{name}')"
    left = f"{label}.getBoundingClientRect().left - {frame}.getBoundingClientRect().left"
    assert tab.ask(left) >= 0, "the beginning of a name is there"
    shown = "[...document.querySelectorAll('th')].filter(cell => cell.offsetWidth).length"
    assert tab.ask(shown) == 4
    tab.click(".show")
    assert tab.ask(shown) == 14 and tab.ask(OVERFLOW) == 0


@pytest.mark.slow
def test_a_browser_shows_the_page_of_a_sweep(tab: Page, tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2, 0.3], model__hidden=[8, 16], seed=[0, 1])
    path = tmp_path / "report.html"
    path.write_text(as_page(page_of_sweep(tmp_path, rows)))
    looked_at(tab, path)
    tab.open(path, 390)
    left, right = tab.ask(
        "(() => { const r = document.querySelector('tbody tr').cells[1].getBoundingClientRect();"
        " return [r.left, r.right] })()"
    )
    assert 0 <= left < right <= 390, "the metric is in sight on a phone"
    path.write_text(
        as_page(
            page_of_sweep(tmp_path, sweep_rows(tmp_path / "rates", optimizer__lr=[0.01, 0.1, 0.3]))
        )
    )
    looked_at(tab, path)
    labels = dict(
        tab.ask(
            "[...document.querySelectorAll('.frame')[1].querySelectorAll('text')]"
            ".map(t => [t.textContent, t.getBoundingClientRect().right])"
        )
    )
    assert {"0.01", "0.1", "0.3"} <= {*labels} and "0.2" not in labels, "the axis names the tried"
    decade = labels["0.1"] - labels["0.01"]
    rest = labels["0.3"] - labels["0.1"]
    assert rest / decade == pytest.approx(math.log10(3), abs=0.05), "and is logarithmic"


@pytest.mark.slow
def test_a_browser_shows_long_names_and_the_objective_in_sight(tab: Page, tmp_path: Path) -> None:
    names = (
        "model__a_rather_long_name_of_a_parameter_of_this_network",
        "model__another_long_name_that_somebody_gave",
    )
    long = {name: [1, 2] for name in (*names, "optimizer__lr", "seed")}
    path = tmp_path / "report.html"
    path.write_text(as_page(page_of_sweep(tmp_path, sweep_rows(tmp_path, **long))))
    looked_at(tab, path)
    tab.open(path, 1280)
    assert tab.ask("(w => w.scrollWidth - w.clientWidth)(document.querySelector('.wide'))") == 0
    tab.open(path, 390)
    heights = tab.ask("[...document.querySelectorAll('thead')].map(head => head.offsetHeight)")
    assert heights[1] < 60, "no empty lines above the names of the table of seeds"
    chart = "[...document.querySelectorAll('.frame')].at(-1)"
    right = tab.ask(
        f"[...{chart}.querySelectorAll('text')].find(t => t.textContent == 'test.accuracy')"
        ".getBoundingClientRect().right"
    )
    assert right < 390, "the axis of the objective is in sight"
    colour = tab.ask("getComputedStyle(document.body).backgroundColor").replace(" ", "")
    fills = tab.ask(
        f"[...{chart}.querySelectorAll('path, rect')].map(p => getComputedStyle(p).fill)"
    )
    assert colour in {fill.replace(" ", "") for fill in fills}, (
        "values stand on the colour of the page, not behind lines"
    )


@pytest.mark.slow
def test_a_browser_says_when_nothing_has_written_a_page_of_a_run_for_long(
    tab: Page, tmp_path: Path
) -> None:
    folder = leave_run(tmp_path / "r")
    (folder / "summary.json").unlink()
    living = dataclasses.replace(read_run(folder), is_running=True)
    text = as_page(run_page(living, {}, refresh_seconds=60))
    state = "document.querySelector('.state').textContent"
    for written, expected in (
        (time.time(), ""),
        (time.time() - 3600, "No news for 60 minutes: if it was killed"),
    ):
        path = tmp_path / "report.html"
        path.write_text(re.sub('"written":[0-9.]+', f'"written":{written:.0f}', text))
        tab.open(path, 390)
        found = tab.ask(state)
        assert (
            found.startswith("running, step 40")
            and ("No news" in found) == bool(expected)
            and expected in found
        )
    assert tab.ask(OVERFLOW) == 0 and tab.problems == []
