"""A process of a session that leaves out a step of the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.step_watch import StepWatch
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment, fatal_lines

SCRIPT = """
import sys
import torch
import ddp_train

with ddp_train.session("run", device="cpu") as run:
    model = run.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(list(torch.ones(10, 2)), global_batch_size=4)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for batch in loader:
            if sys.argv[1] == "skip" and len(batch) == 0:
                continue
            if sys.argv[1] == "break" and run.step == 1 and run.rank == 1:
                break
            if sys.argv[1] == "all" and run.step in (1, 4):
                continue
            optimizer.zero_grad()
            loss = run.mean(model(batch).sum(1))
            if sys.argv[1] != "late":
                loss.backward()
                optimizer.step()
        if sys.argv[1] == "late":
            loss.backward()
"""


def two_watches() -> tuple[StepWatch, StepWatch]:
    statuses = [RankStatus(), RankStatus()]
    first, second = (StepWatch(status, rank) for rank, status in enumerate(statuses))
    first.statuses = second.statuses = statuses
    return first, second


def test_the_one_who_comes_second_is_told() -> None:
    for skips_first in (True, False):
        first, second = two_watches()
        calls = [(first.see_backward, 3), (second.see_left_out, 3)]
        if skips_first:
            calls.reverse()
        (early, _), (late, _) = calls
        early(0, 3)
        with pytest.raises(UsageError, match="rank 1 made no backward pass in step 3, and rank 0"):
            late(0, 3)


def test_a_process_that_went_on_is_told_too() -> None:
    first, second = two_watches()
    for watch in (first, second):
        watch.see_left_out(0, 1)
        watch.see_backward(0, 2)
    for step in (3, 4, 5):
        second.see_left_out(0, step)
    second.see_backward(0, 6)
    with pytest.raises(UsageError, match="rank 1 made no backward pass in step 3"):
        first.see_backward(0, 3)


def test_a_step_that_all_leave_out_or_take_is_right() -> None:
    first, second = two_watches()
    for watch in (first, second):
        watch.see_left_out(0, 0)
    for watch in (first, second):
        watch.see_backward(0, 1)
        watch.see_left_out(0, 2)  # the end of the epoch
    for watch in (first, second):
        watch.see_backward(1, 2)
    for watch in (first, second):
        watch.see_left_out(1, 2)  # of a loss behind the loop


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_told"), [("skip", True), ("break", True), ("all", False)])
def test_a_process_that_leaves_out_a_step_is_named(
    kind: str, is_told: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    more = {"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": "3"}
    argv = [sys.executable, str(script), kind]
    done = zygote.run(argv, LIMIT_SECONDS, cwd=tmp_path, env=environment(more), text=True)
    assert (done.returncode != 0) is is_told, done.stderr
    if is_told:
        (line,) = fatal_lines(done.stderr)
        assert "made no backward pass in step" in line
