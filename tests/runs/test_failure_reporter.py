"""Who reports a failure, and in whose words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_train.distributed.world import World
from ddp_train.errors import DataError, LaunchError, NonFiniteLossError
from ddp_train.resilience.failure_report import FILE, SUMMARY
from ddp_train.runs.failure_reporter import FailureReporter
from ddp_train.runs.worker_process import WorkerProcess

RANK_0_OF_2 = World(0, 2, 0, 2)


def reporter_in(run_dir: Path, **options: Any) -> FailureReporter:
    worker = WorkerProcess(run_dir, RANK_0_OF_2)
    worker.status.step = 7
    return FailureReporter(worker, {"mode": "train"}, **options)


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_failure_of_this_rank_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = reporter_in(tmp_path).report(DataError("a file is gone", "look for it"))
    assert code == DataError.exit_code
    assert read(tmp_path / FILE)["rank"] == 0
    assert read(tmp_path / SUMMARY) == {"status": "failed", "mode": "train", "steps": 7}
    output = capfd.readouterr().err
    assert output.startswith("FATAL data (rank 0 on ")
    assert "a file is gone\n  remedy: look for it\n" in output


def test_report_names_a_log_that_exists(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("none", "begun"):
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "begun/logs/rank_0.log").touch()
    reporter_in(tmp_path / "none").report(DataError("a file is gone"))
    assert "log:" not in capfd.readouterr().err
    reporter_in(tmp_path / "begun").report(DataError("a file is gone"))
    assert f"log: {tmp_path}/begun/logs/rank_0.log\n" in capfd.readouterr().err


def test_report_has_the_users_words(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path, translate=lambda text: text.replace("launch.", ""))
    reporter.report(LaunchError("launch.seed=1", "set launch.seed"))
    failure = read(tmp_path / FILE)
    assert failure["detail"] == "seed=1"
    assert failure["remedy"] == "set seed"


def test_failure_of_another_rank_is_left_to_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).write_text('{"rank": 1}')
    error = NonFiniteLossError("the loss is NaN", "lower the rate", rank=1, step=6)
    assert reporter_in(tmp_path).report(error) == LaunchError.exit_code
    assert read(tmp_path / FILE) == {"rank": 1}
    assert capfd.readouterr().err == ""


def test_failure_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter_in(tmp_path).report(DataError("first"))
    reporter_in(tmp_path).report(DataError("second"))
    assert read(tmp_path / FILE)["detail"] == "first"
    assert "second" not in capfd.readouterr().err


def test_exit_code_is_announced_with_the_report(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path)
    code = reporter.log_and_report(DataError("a file is gone"), grace_seconds=1.0)
    assert reporter.status.believed(code) == code == DataError.exit_code
