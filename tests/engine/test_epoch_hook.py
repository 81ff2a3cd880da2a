"""When a model is scored, and the lines of epochs and evaluations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.distributed.world import World
from ddp_train.engine.epoch_hook import EpochHook
from ddp_train.engine.loop import fit
from ddp_train.engine.metrics_hook import Intervals, MetricsHook
from ddp_train.engine.selection import Best, Selection
from ddp_train.engine.selection_hook import EarlyStopping, SelectionHook
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile
from tests.support.jobs import config_of, job_of, table
from tests.support.ranks import on_ranks


def evaluated(intervals: Intervals, steps: int = 25) -> list[int]:
    """The steps after which a run is scored; each must be due."""
    plan = BatchPlan(samples=100, global_batch_size=10, accumulation_steps=1, steps=steps, seed=0)
    job: Any = SimpleNamespace(plan=plan, step=0)
    found = []
    while job.step < steps:
        due = min(intervals.next_evaluation(job), plan.epoch_end(job.step))
        job.step += 1
        if intervals.include_evaluation(job):
            assert job.step == due
            found.append(job.step)
        else:
            job.step = max(job.step, due - 1)
    return found


def test_evaluations_are_by_epochs_or_by_steps() -> None:
    assert evaluated(Intervals(3, 50)) == [10, 20, 25]
    assert evaluated(Intervals(3, 50, evaluate_every_epochs=2)) == [20, 25]
    assert evaluated(Intervals(None, 50, evaluate_every_steps=7)) == [7, 14, 21, 25]
    assert evaluated(Intervals(None, 50, evaluate_every_steps=100)) == [25]


def test_max_steps_alone_is_a_run_by_steps() -> None:
    def steps(**train: Any) -> int:
        train = {"global_batch_size": 8, **train}
        config = config_of(World(), model={"name": "mlp"}, train=train)
        return job_of(config, World(), (table(24), table(12))).plan.steps

    assert steps() == 90, "30 epochs"
    assert steps(max_steps=1000) == 1000, "more than 30 epochs"
    assert steps(max_steps=2) == 2
    assert steps(epochs=2, max_steps=1000) == 6
    assert steps(epochs=2, max_steps=5) == 5


def trained(world: World, every_steps: int | None) -> dict[str, torch.Tensor]:
    """The state of a net with batch norm and dropout, and of the generator, after five steps."""
    train = {"global_batch_size": 16, "max_steps": 5, "evaluate_every_steps": every_steps}
    data = {"name": "digits", "limit": 40}
    config = config_of(world, model={"name": "cnn"}, train=train, data=data)
    job = job_of(config, world)
    intervals = Intervals(None, 50, evaluate_every_steps=every_steps)
    lines = MetricsFile(Path("nowhere"), active=False, first_step=0)
    record = MetricsHook(mock.Mock(), lines, HardwareMonitor(), intervals)
    job.hooks = [record]
    scored = mock.Mock(side_effect=record.write_score)
    record.write_score = scored
    fit(job)
    state = {**job.module.model.state_dict(), "generator": torch.get_rng_state()}
    state["scored"] = torch.tensor(scored.call_count)
    return state


@pytest.mark.slow
def test_evaluations_within_an_epoch_change_nothing_of_training() -> None:
    """Weights, statistics of batch norm, draws of dropout: on three ranks, to the bit."""
    often, seldom = on_ranks(3, both)[0]
    assert often.pop("scored") == 5 and seldom.pop("scored") == 1
    assert all(torch.equal(often[name], seldom[name]) for name in seldom)


def both(world: World) -> list[dict[str, torch.Tensor]]:
    return [trained(world, every_steps) for every_steps in (1, 100)]


def test_an_epoch_that_early_stopping_cuts_is_closed(tmp_path: Path) -> None:
    train = {"global_batch_size": 8, "epochs": 4, "evaluate_every_steps": 2}
    config = config_of(World(), strategy={"name": "single"}, model={"name": "mlp"}, train=train)
    job = job_of(config, World(), (table(24), table(12)))
    display = mock.Mock()
    lines = MetricsFile(tmp_path, active=True, first_step=0)
    intervals = Intervals(4, 50, evaluate_every_steps=2)
    record = MetricsHook(display, lines, HardwareMonitor(), intervals)
    loss = Selection("test", "loss")
    stopping = EarlyStopping(Best(loss, min_delta=100.0), patience=1)
    selection = SelectionHook(Best(loss), stopping)
    job.hooks = [record, selection, EpochHook(record)]
    fit(job)
    assert job.step == job.plan.steps == 4
    assert len(record.epoch_seconds) == 2
    shown = [call.args[0] for call in display.line.call_args_list]
    assert [line.partition("  loss")[0] for line in shown] == [
        "step  2/12",
        "epoch 1/4",
        "epoch 2/4  cut to 1 of 3 steps",
    ]
    assert [" test " in line for line in shown] == [True, False, True]
