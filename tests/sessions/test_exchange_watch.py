"""Processes of a session that enter different exchanges."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_train.resilience.heartbeat import KEPT_EXCHANGES, RankStatus
from ddp_train.sessions.exchange_watch import BACKWARD, CHECKPOINT, SUM, ExchangeWatch
from ddp_train.sessions.settings import UsageError
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment, fatal_lines

SCRIPT = """
import sys
import torch
import ddp_train

kind = sys.argv[1]
with ddp_train.session("run", device="cpu", timeout_seconds=60) as run:
    model = run.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(list(torch.ones(10, 2)), global_batch_size=4)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        is_late = kind == "all" and epoch == 1
        for batch in loader:
            is_odd = run.step == 1 and run.rank == 1
            if kind == "skip" and len(batch) == 0:
                continue
            if kind == "all" and run.step == 1:
                continue
            optimizer.zero_grad()
            losses = model(batch).sum(1)
            if kind == "norm" and is_odd:
                model(batch)
            if kind == "break" and is_odd:
                break
            loss = run.mean(losses)
            if not is_late:
                loss.backward()
                optimizer.step()
            if kind == "save" and is_odd:
                run.save()
        if is_late:
            loss.backward()
        run.sum(len(loader))
"""


def two_watches() -> tuple[ExchangeWatch, ExchangeWatch]:
    statuses = [RankStatus(), RankStatus()]
    first, second = (ExchangeWatch(status, rank) for rank, status in enumerate(statuses))
    first.watch(statuses)
    second.watch(statuses)
    return first, second


def test_the_one_who_comes_second_is_told() -> None:
    for order in (1, -1):
        early, late = two_watches()[::order]
        early.enter(BACKWARD, 3)
        with pytest.raises(UsageError) as raised:
            late.enter(SUM)
        assert f"rank {late.rank} is in run.sum, but rank {early.rank} is in" in str(raised.value)
        assert "in backward() of step 3. Each of the two" in str(raised.value)


def test_backward_of_another_step_is_another_exchange() -> None:
    first, second = two_watches()
    first.enter(BACKWARD, 3)
    with pytest.raises(UsageError, match=r"rank 1 is in backward\(\) of step 4, but rank 0 is in"):
        second.enter(BACKWARD, 4)


def test_a_process_that_went_on_is_told_of_an_earlier_one() -> None:
    first, second = two_watches()
    for step in range(10):
        first.enter(BACKWARD, step)
    for step in range(5):
        second.enter(BACKWARD, step)
    with pytest.raises(
        UsageError, match=r"rank 1 is saving a checkpoint, but rank 0 is in backward"
    ):
        second.enter(CHECKPOINT)


def test_the_same_order_is_right_however_far_apart() -> None:
    watches = two_watches()
    for begin in range(0, 5 * KEPT_EXCHANGES, 2 * KEPT_EXCHANGES):
        for watch in watches:
            for step in range(begin, begin + 2 * KEPT_EXCHANGES):
                watch.enter(BACKWARD, step)
                watch.enter(SUM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("skip", "batch norm"),
        ("norm", "batch norm"),
        ("break", "run.sum"),
        ("save", "a checkpoint"),
        ("all", ""),
    ],
)
def test_a_process_in_another_exchange_is_named(kind: str, exchange: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    more = {"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": "3"}
    argv = [sys.executable, str(script), kind]
    done = zygote.run(argv, LIMIT_SECONDS, cwd=tmp_path, env=environment(more), text=True)
    assert (done.returncode != 0) is bool(exchange), done.stderr
    if exchange:
        (line,) = fatal_lines(done.stderr)
        assert "Each of the two waits for all processes" in line
        assert exchange in line
        assert ("called in a loop over samples" in done.stderr) is ("batch norm" in line)
