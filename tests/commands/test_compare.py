"""`ddp-train compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from ddp_train.commands.compare import compare
from ddp_train.errors import ConfigError
from tests.support.pages import compared, leave_run, report_in


def test_compare_names_all_that_is_no_run_in_one_error(
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
    assert len(error.value.problems) == 2 and "no run was found" in str(error.value)
    with pytest.raises(
        ConfigError, match=r"compare --metric f2: not all runs have this number; all"
    ):
        compare([str(tmp_path / "runs"), "--metric=f2"])
    for words in ([], ["--what"], [str(tmp_path / "runs/0_0")], ["--metric"]):
        with pytest.raises(ConfigError, match="compare RUN RUN"):
            compare(words)


@pytest.mark.parametrize("count", [2, 3, 13])
@pytest.mark.slow
def test_comparison_in_80_columns_shows_what_differs(
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


@pytest.mark.parametrize(("asked", "width"), [("60", 60), (None, 100)])
def test_comparison_in_a_pipe_is_folded_and_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str | None,
    width: int,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if asked:
        monkeypatch.setenv("COLUMNS", asked)
    for number in range(8):
        leave_run(tmp_path / f"runs/a_run_with_a_name_{number}")
    assert compare([str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width and "\x1b" not in out
    assert {"samples/s", "state"} <= {*out.split()} and "not shown" not in out
