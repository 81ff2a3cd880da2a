"""The page of a run that is not over."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddp_train.telemetry.pages.live import LivePage
from tests.support.pages import leave_run, report_in


def test_live_page_comes_seldom_and_warns_once_of_a_full_disk(
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
    assert capsys.readouterr().err.count("No space left on device; the run continues") == 1
    LivePage(folder, {}).write()
    assert capsys.readouterr().err.endswith("No space left on device\n"), (
        "nothing goes on after the last page"
    )
