"""Rows of results.jsonl."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from ddp_train.sweeps.results import (
    RESULTS,
    ResultsWriter,
    append_row,
    ended_row,
    read_rows,
    rows_of_sweep,
)
from ddp_train.sweeps.trial_numbers import TrialNumbers


def test_full_disk_ends_no_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / RESULTS
    rows = [{"trial": number, "status": "completed"} for number in (5, 6, 7)]
    writer = ResultsWriter(tmp_path)
    numbers = TrialNumbers(tmp_path, 3, "one")
    writer.add(rows[0])
    assert read_rows(tmp_path) == rows[:1]

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (results.stat().st_size + 10, before[1]))
    try:
        writer.add(rows[1])
        assert [numbers.number_of(0, ["a=1"]), numbers.number_of(1, ["a=1"])] == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    content = results.read_text()
    assert content.count("\n") == 1 and content.endswith("\n"), "no half of a row is left"

    writer.add(rows[2])
    assert read_rows(tmp_path) == rows, "nothing is lost"
    notes = capsys.readouterr().err
    assert notes.count("note: ") == 1
    assert "File too large; writing is tried again after the next trial" in notes


def test_a_row_after_a_torn_one_is_found(tmp_path: Path) -> None:
    append_row(tmp_path, {"trial": 0, "status": "completed", "words": ["a=1"]})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"trial": 1, "status": "comp')
    append_row(tmp_path, {"trial": 1, "status": "failed", "words": ["a=2"]})
    assert [row["trial"] for row in read_rows(tmp_path)] == [0, 1]
    assert (ended_row(tmp_path, ["a=1"], True) or {})["trial"] == 0
    assert ended_row(tmp_path, ["a=2"], True) is None, "it failed: it is tried again"


def test_the_rows_of_other_words_are_of_another_sweep() -> None:
    def row(trial: int, *words: str) -> dict[str, Any]:
        return {"trial": trial, "overrides": ["lr=1"], "words": ["++lr=1", *words]}

    rows = [
        row(0, "++a=[1, 2]", "launch.x=1"),
        row(1, "++a=[1,3]"),
        row(2),
        row(3, "++a=[1,2]") | {"alone": 0},
    ]
    assert [
        one["trial"] for one in rows_of_sweep(rows, frozenset({"lr"}), frozenset({"a=[1,2]"}))
    ] == [0]
