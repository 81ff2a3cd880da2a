"""The split of a step against known truths: a data set with a delay, an exchange with a delay, a
rank with a delay."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.study import gradients, scaling, trials, variants
from ddp_lab.study.scaling_report import Cell, Measurements, efficiency_table
from ddp_lab.study.step_breakdown import StepBreakdown, read_breakdown, verdict
from ddp_lab.study.step_times import StepTimes
from ddp_lab.study.trials import Outcome, Trial
from ddp_lab.study.trials import run as run_trial
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.hook_context import HookContext
from ddp_train.engine.loop import fit
from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from tests.support.jobs import config_of, job_of, table
from tests.support.ranks import on_ranks
from tests.support.studies import asked, leave, value

DELAY = 0.1
"""Seconds, in each step: much more than a step of so small a model takes on a busy machine."""
STEPS = 12


class SlowSource(ArraySource):
    def get_batch(self, ids: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        time.sleep(DELAY)
        return super().get_batch(ids, epoch)


def slow_all_reduce(_: object, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and wants classes
    time.sleep(DELAY)
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() / dist.get_world_size())
    return done


def all_timed(world: World, folder: str, cases: dict[str, int]) -> None:
    for where, accumulation in cases.items():
        timed(world, str(Path(folder, where)), where, accumulation)


def timed(world: World, run_dir: str, where: str, accumulation: int) -> None:
    train: dict[str, Any] = {
        "global_batch_size": 12 * accumulation,
        "accumulation_steps": accumulation,
        "epochs": 9,
    }
    config = config_of(
        world,
        model={"name": "mlp", "hidden": 8},
        train=train | {"max_steps": STEPS},
        data={"name": "digits", "placement": "host"},
        tuning={"num_workers": 0},
    )
    train_source = table(400)
    if where == "data":
        train_source = SlowSource(train_source.inputs, train_source.targets)
    job = job_of(config, world, (train_source, table(10)))
    if where == "exchange":
        wrapped = job.wrapped
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        wrapped.register_comm_hook(None, slow_all_reduce)
    if where == "rank 1" and world.rank == 1:
        job.module.model.register_forward_pre_hook(lambda *_: time.sleep(DELAY))
    if where == "host":
        seed_step = job.seed_step
        job.seed_step = lambda step: (time.sleep(DELAY), seed_step(step))[1]
    with StepTimes(HookContext(job, Path(run_dir), world), Path(run_dir), world):
        fit(job)
    assert job.step == STEPS


DELAYED = {"data": 2, "exchange": 1, "rank 1": 1, "host": 1}
"""Where, and the passes of a step."""


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three processes: a run directory for each place of a delay."""
    folder = tmp_path_factory.mktemp("delayed")
    for where in DELAYED:
        (folder / where).mkdir()
    on_ranks(3, all_timed, str(folder), DELAYED, timeout_seconds=100.0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "part", "said"),
    [
        ("data", "data", "data-bound"),
        ("exchange", "exchange", "communication-bound"),
        ("rank 1", "waiting", "imbalanced: the others wait for rank 1"),
        ("host", "host", "host-bound"),
    ],
)
def test_a_delay_is_found_where_it_is(delayed: Path, where: str, part: str, said: str) -> None:
    split = read_breakdown(delayed / where)
    delay = DELAYED[where] * DELAY * (2 / 3 if part == "waiting" else 1)  # two of three ranks wait
    assert getattr(split, part) == pytest.approx(delay, rel=0.35)
    others = {
        name: getattr(split, name)
        for name in ("data", "exchange", "waiting", "host")
        if name != part
    }
    assert max(others.values()) < delay / 2, (
        others
    )  # on a busy machine ranks wait for each other besides
    assert said in verdict(split, 3, 3)
    if part == "waiting":
        assert split.slowest == 1


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    began = time.perf_counter()
    on_ranks(1, timed, str(tmp_path), "nowhere", 1)
    steps = json.loads((tmp_path / "probe" / "step_times_rank_0.json").read_text())["steps"]
    assert len(steps) == STEPS - 1, "the last step has no next one to end at"
    assert 0 < sum(sum(step.values()) for step in steps) < time.perf_counter() - began
    assert all(step["compute"] > 0 and step["exposed"] >= 0 for step in steps)


def test_a_gpu_that_waits_for_its_host_is_told() -> None:
    split = StepBreakdown(0.0, 1.0, 0.0, 0.0, 0.0, 0, 0.0, gpu_waits_for_host=0.9)
    assert verdict(split, 1, None).startswith("launch-bound")
    assert (
        verdict(StepBreakdown(0.0, 1.0, 0.01, 0.02, 0.0, 0, 0.0, 0.1), 1, None)
        == "compute-bound: little overhead"
    )
    several = StepBreakdown(
        data=0.001,
        compute=0.8,
        exchange=0.09,
        waiting=0.085,
        host=0.02,
        slowest=0,
        slowest_share=0.5,
        gpu_waits_for_host=None,
    )
    assert (
        verdict(several, 2, 2)
        == "compute-bound; smaller parts: exchange 9 %, waiting 9 %, host 2 %"
    )


def measured(samples_per_second: float) -> Outcome:
    line = {"kind": "train", "samples_per_second": samples_per_second}
    return Outcome(0, 1.0, {}, [line])


def test_without_a_run_of_one_process_there_is_no_speed_up() -> None:
    cells = [Cell(number, 96, ("strong",)) for number in (1, 2, 4)]
    failed = Outcome(70, 1.0, {}, reason="oom: 4.00 GiB")
    columns = ["processes", "samples/s", "speed-up", "efficiency, %", "failed"]

    def rows(*outcomes: Outcome) -> list[list[Any]]:
        by_cell = {cell: [outcome] for cell, outcome in zip(cells, outcomes, strict=True)}
        table = efficiency_table("strong", Measurements(cells, by_cell))
        return [
            [row[table.columns.index(name)] for name in columns if name in table.columns]
            for row in table.rows
        ]

    assert rows(measured(100.0), measured(180.0), measured(200.0)) == [
        [1, 100, 1, 100],
        [2, 180, 1.8, 90],
        [4, 200, 2, 50],
    ]
    assert rows(failed, measured(180.0), measured(200.0)) == [
        [1, None, None, None, "oom: 4.00 GiB"],
        [2, 180, None, None, ""],
        [4, 200, None, None, ""],
    ]


WORDS = ("study=scaling", "study.steps=20", "study.processes=2", "model=mlp")


def some_runs(trial: Trial, script: Path, stop: StopRequests) -> Outcome | None:
    """The run of two processes with its steps split is a real one."""
    processes, batch = (
        int(value(trial, key)) for key in ("launch.nproc_per_node", "train.global_batch_size")
    )
    if "hooks=[ddp_lab.study.step_times.StepTimes]" in trial.overrides and processes == 2:
        return run_trial(trial, script, stop)
    rate = {(1, 48): 100.0, (2, 96): 180.0, (1, 96): 120.0}[processes, batch]
    left = leave(trial, script, [{"kind": "train", "samples_per_second": rate}])
    if "hooks=[ddp_lab.study.step_times.StepTimes]" in trial.overrides:
        steps = [{"data": 0.1, "compute": 0.8, "exposed": 0.0, "host": 0.1}] * 20
        (trial.run_dir / "probe").mkdir()
        (trial.run_dir / "probe/step_times_rank_0.json").write_text(
            json.dumps({"steps": steps, "gpu_waits_for_host": None})
        )
    return left


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_a_study_runs_both_ways_and_splits_the_steps_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(trials, "run", some_runs)
    report, code = scaling.study(asked(*WORDS, f"run_dir={tmp_path}"))
    weak, strong, where = (table.rows for table in report.tables)
    assert code == 0, where
    assert weak == [[1, 48, 48, 100, 1, 100], [2, 96, 48, 180, 1.8, 90]]
    assert strong == [[1, 96, 96, 120, 1, 100], [2, 96, 48, 180, 1.5, 75]]
    assert [row[:2] for row in where] == [[1, 48], [1, 96], [2, 48]]
    for row in where:
        assert row[2] == pytest.approx(sum(row[3:8])) and row[3] > 0 and row[8], row


@pytest.mark.parametrize("study", ["scaling", "gradients", "strategies"])
def test_processes_must_be_a_number_or_auto(study: str) -> None:
    module = {"scaling": scaling.study, "gradients": gradients.study, "strategies": variants.plan}[
        study
    ]
    with pytest.raises(ConfigError, match=r"study\.processes=many: must be a whole number or auto"):
        module(asked(f"study={study}", "study.processes=many"))


def test_indivisible_batch_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        scaling.study(asked("study=scaling", "study.processes=5"))
    assert str(caught.value).count("train.global_batch_size=96") == 1
