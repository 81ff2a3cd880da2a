"""The conditions under which a trial ran, and what they leave out."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from ddp_lab.study.provenance import load_at_start, source_digest
from tests.support.commands import (
    PROGRAM,
    ROOT,
)


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
