"""Numbers that are none: what is counted, warned of and written."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ddp_train.resilience.whole_files import write_json, write_text
from ddp_train.tasks.score import Scorer
from ddp_train.tasks.task import BatchScore
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.metrics_log import MetricsFile

NUMBERS = "epoch 10/3000  loss 0.1234  57,000 samples/s  1.9 cores 0.6 GiB"


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_test_loss_that_is_no_number_is_warned_of(
    loss: float, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = Scorer(2, "cpu")
    scorer.add(
        0, BatchScore({"loss": (torch.tensor(loss), 2), "accuracy": (torch.tensor(1), 2)}), 2
    )
    scorer.add(1, BatchScore({"loss": (torch.tensor(3.0), 2), "accuracy": (torch.tensor(2), 2)}), 2)
    score = scorer.result()
    assert (
        score
        and not math.isfinite(score.loss)
        and (score.counts["accuracy"], score.samples) == (3, 4)
    )
    (record,) = caplog.records
    assert (
        record.levelname == "WARNING"
        and f"the loss of an evaluation is {loss}" in record.getMessage()
    )


def test_a_damaged_line_of_metrics_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [{"kind": "train", "step": step} for step in (1, 2, 3)]
    damaged = [
        b"xx}\n",
        b"\xff\x00\n",
        b"[1]\n",
        b'{"kind": "train"}\n',
        b'{"kind": "train", "step": "2"}\n',
    ]
    lines = [json.dumps(line).encode() + b"\n" for line in good]
    path.write_bytes(
        b"".join([lines[0], *damaged, *lines[1:]]) + b'{"kind": "tr'
    )  # the last one by a killed process
    log = MetricsFile(tmp_path, True, first_step=2)
    assert log.kept == good[:2]
    assert path.read_bytes() == b"".join(lines[:2])
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"".join(damaged)
    assert caplog.messages == [
        f"{path}: line 2 is damaged; damaged lines were moved to {path}.damaged"
    ]
    MetricsFile(tmp_path, True, first_step=2)
    assert len(caplog.messages) == 1


def test_failed_replacement_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_text(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_files_hold_no_number_that_json_has_not(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"test": {"loss": math.nan, "of": [1.5, math.inf]}, "steps": 3})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    written = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert written == {"test": {"loss": None, "of": [1.5, None]}, "steps": 3}


@pytest.mark.parametrize(
    ("width", "shown", "label"),
    [
        (60, NUMBERS[:26], ""),
        (80, NUMBERS[:44], ""),
        (100, NUMBERS, ""),
        (120, NUMBERS, "training"),
    ],
)
def test_no_number_beside_the_progress_bar_is_cut(width: int, shown: str, label: str) -> None:
    console, seen = (
        Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        for _ in range(2)
    )
    display = Display(active=True)
    display.console = console
    display.start(45_000, lambda: 158)
    display.numbers = NUMBERS
    try:
        assert display.bar
        seen.print(*display.bar.get_renderables())
    finally:
        display.stop()
    line = seen.file.getvalue()  # type: ignore
    assert (
        line.split("158/")[0].strip() == label and f" 158/45000 {shown} -:--:-- left\n" in line
    ), line
