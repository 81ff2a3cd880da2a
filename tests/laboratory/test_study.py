"""Studies: what their files mean, what their runs leave, what their reports say. The runs are real
commands."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.study import main, trials, variant_trials
from ddp_lab.study.provenance import conditions
from ddp_lab.study.request import Request, read_request
from ddp_lab.study.trials import Outcome, Trial, trial_session
from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.resilience import run_lock
from ddp_train.resilience.whole_files import write_json
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
from tests.support.studies import TINY, leave

CONF = ROOT / "ddp_train/conf"


# --- files and words ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_is_no_run(tmp_path: Path) -> None:
    """Neither its words without its mode, nor its mode in a sweep, nor under torchrun's
    environment."""
    for words, message in (
        (["study=tips"], "study=tips: acts only with mode=study"),
        (["-m", "mode=train,study"], "mode=study: cannot be set in a config file or a sweep"),
        (["+mode=study", "study=tips"], "acts only with mode=study"),
    ):
        done = run(*words, f"run_dir={tmp_path}/none")
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "none").exists()


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
            match=r"holds trials from other conditions: [\w-]+ was .*; use run_dir=.*_new",
        ):
            enter(request)
    write_json(record, {"words": [], "exit_code": 0, "seconds": 1.0, "conditions": here})
    enter(request)


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
