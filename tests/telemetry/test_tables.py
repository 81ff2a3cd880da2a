"""Tables in the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ddp_train.telemetry.pages.tables import Table, show


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
