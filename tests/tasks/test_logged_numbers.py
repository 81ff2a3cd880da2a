"""Numbers of the user's own: exact over processes, with one exchange in an interval."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

import ddp_train
from ddp_train.checkpoints.layout import places
from ddp_train.commands.watch import table_of
from ddp_train.data.batch_plan import epoch_order
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit
from ddp_train.errors import LogError
from ddp_train.tasks.logged_numbers import (
    HOOK_LOG,
    LogCall,
    LoggedNumbers,
    Moment,
    Rule,
    no_numbers,
)
from ddp_train.telemetry.metrics_log import METRICS, read_metrics
from ddp_train.telemetry.own_numbers import OF_TRAINING, check_name
from ddp_train.telemetry.pages.compare_page import compare_page
from ddp_train.telemetry.pages.run_files import read_run
from tests.support.commands import SMALL, THREE, environment, run
from tests.support.jobs import config_of, job_of
from tests.support.ranks import on_ranks

SAMPLES = 29
GLOBAL_BATCH = 14
"""The last batch of an epoch has one sample: on three and four processes some have none."""
STEPS = 6
"""Two epochs of three steps."""


def table() -> ArraySource:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    return ArraySource(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


class Logs:
    """A task that logs numbers of every kind."""

    units_are_samples = True

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        outputs = model(inputs)
        losses = functional.cross_entropy(outputs, labels, reduction="none")
        ddp_train.log("right", outputs.argmax(1) == labels)
        ddp_train.log("loss/each", losses)
        ones = torch.eq(labels, 1)
        ddp_train.log("loss/of_ones", losses[ones].sum(), over=ones.sum())
        ddp_train.log("labels", labels, how="sum")
        ddp_train.log("weight", model.weight.flatten()[0], how="last")
        ddp_train.log("nan", losses * math.nan)
        if labels[0] == 2:  # on some processes alone
            ddp_train.log("first", inputs[:1, 0])
        return losses.sum(), len(labels)


def job_that_logs(world: World, accumulation: int) -> Any:
    config = config_of(
        world,
        task={"_target_": "tests.tasks.test_logged_numbers.Logs"},
        model={"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
        data={"_target_": "tests.support.task_samples.Ragged"},
        train={
            "global_batch_size": GLOBAL_BATCH,
            "accumulation_steps": accumulation,
            "epochs": 2,
            "max_steps": STEPS,
        },
        optimizer={"name": "sgd", "lr": 0.1},
        schedule={"name": "constant"},
        tuning={"precision": "fp64", "num_workers": 0},
    )
    return job_of(config, world, (table(), table()))


def logged(world: World, accumulation: int) -> dict[str, float]:
    job = job_that_logs(world, accumulation)
    numbers = job.stepper.logged
    with numbers.open():
        fit(job)
        job.stepper.mean_loss(numbers)
    return numbers.take()


def logged_by_hand() -> dict[str, float]:
    """The same of a plain loop in float64, without the package."""
    model = job_that_logs(World(), 1).module.model
    inputs, labels = table().get_batch(torch.arange(SAMPLES).numpy(), 0)
    inputs = inputs.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    right: list[float] = []
    each: list[float] = []
    ones: list[float] = []
    sum_of_labels = 0
    weight = math.nan
    for epoch in range(2):
        for share in torch.as_tensor(epoch_order(0, epoch, SAMPLES)).split(GLOBAL_BATCH):
            optimizer.zero_grad()
            outputs = model(inputs[share])
            losses = functional.cross_entropy(outputs, labels[share], reduction="none")
            right += (outputs.argmax(1) == labels[share]).tolist()
            each += losses.tolist()
            ones += losses[labels[share] == 1].tolist()
            sum_of_labels += int(labels[share].sum())
            weight = model.weight.flatten()[0].item()
            losses.mean().backward()
            optimizer.step()
    return {
        "right": math.fsum(right) / len(right),
        "loss/each": math.fsum(each) / len(each),
        "loss/of_ones": math.fsum(ones) / len(ones),
        "labels": float(sum_of_labels),
        "weight": weight,
    }


def test_numbers_are_those_of_a_plain_loop() -> None:
    expected = logged_by_hand()
    for ranks, accumulation in ((1, 1), (3, 1), (4, 2)):
        of_ranks = on_ranks(ranks, logged, accumulation)
        assert all(str(found) == str(of_ranks[0]) for found in of_ranks), "all know the same"
        found = of_ranks[0]
        assert math.isnan(found.pop("nan"))
        assert math.isfinite(found.pop("first"))
        assert found == pytest.approx(expected, rel=1e-12), (ranks, accumulation)


def of_uneven_ranks(world: World) -> tuple[Any, ...]:
    """Names, moments and rules that differ between ranks."""
    numbers = LoggedNumbers("cpu")

    def exchange() -> None:
        content = torch.tensor(numbers.collect(), dtype=torch.float64)
        gathered = [torch.empty_like(content) for _ in range(world.size)]
        dist.all_gather(gathered, content)
        numbers.deliver([row.tolist() for row in gathered])

    def add(step: int, *arguments: Any, counts: bool = True) -> None:
        numbers.pending.append(LogCall(*arguments).entry())  # type: ignore[arg-type]
        numbers.count_pass(step, counts)

    rank = float(world.rank)
    for step in range(2):
        add(step, "all", rank, 1 + rank, Rule.MEAN)
        if world.rank == step:
            add(step, "one", 5.0, None, Rule.LAST)
            numbers.add_at(Moment("hook", step), LogCall("norm", 2.0, None, Rule.MEAN).entry())
        add(step, "all", math.nan, 1, Rule.MEAN, counts=False)
        exchange()
    state = numbers.state()
    first = numbers.take(), numbers.take_moments(), numbers.take()
    numbers.load_state(state)
    exchange()
    again = numbers.take()
    if world.rank == 1:
        add(2, "mixed", 1.0, None, Rule.SUM)
    else:
        add(2, "mixed", 1.0, 1.0, Rule.MEAN)
    with pytest.raises(LogError) as refused:
        exchange()
    return *first, again, str(refused.value)


def test_ranks_that_log_different_names_agree() -> None:
    hooks = [(Moment("hook", step), {"norm": 2.0}) for step in (0, 1)]
    numbers = {"all": 2 * 3.0 / (2 * 6.0), "one": 5.0}
    for first, moments, rest, again, refused in on_ranks(3, of_uneven_ranks):
        assert first == again == numbers and moments == hooks and rest == {}
        assert refused == "log('mixed'): how=mean on rank 0, how=sum on rank 1, how=mean on rank 2"


def test_numbers_that_no_exchange_has_are_kept_with_their_moments() -> None:
    of_ranks = []
    for rank in range(3):
        numbers = LoggedNumbers("cpu")
        numbers.add(4, LogCall("share", 1.0 + rank, 2.0, Rule.MEAN).entry())
        if rank == 1:
            numbers.add_at(Moment("hook", 3), LogCall("norm", 2.0, None, Rule.MEAN).entry())
        of_ranks.append(numbers.kept())
    rescued = LoggedNumbers("cpu")
    rescued.add_kept(of_ranks)
    resumed = LoggedNumbers("cpu")
    resumed.load_state(json.loads(json.dumps(rescued.state())))
    assert resumed.take_moments() == [(Moment("hook", 3), {"norm": 2.0})]
    assert resumed.take() == {"share": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("loss", torch.ones(2)), "metrics.jsonl already have a field of that name"),
        (("tokens_per_second", torch.ones(2)), "names ending in _per_second"),
        (("a//b", torch.ones(2)), "this name is not allowed"),
        (("kl\n", torch.ones(2)), "this name is not allowed"),
        (("k" * 101, torch.ones(2)), "the name has 101 characters"),
        (("kl", torch.tensor(1.0)), "one number is not enough for a mean"),
        (("kl", 0.5), "one number is not enough for a mean"),
        (("kl", "0.5"), "a str cannot be logged"),
        (("kl", torch.ones(2, dtype=torch.complex64)), "a Tensor cannot be logged"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(LogError, match=message) as refused:
        ddp_train.log(*arguments)
    assert refused.value.remedy
    _, _, other = refused.value.remedy.partition("use another name: ")
    if other:
        check_name("log", other, OF_TRAINING)


def test_a_rule_and_its_arguments_must_fit() -> None:
    for options, message in (
        ({"how": "max"}, "how='max' must be one of mean, sum, last"),
        ({"how": "sum", "over": 2}, "over= is the count of a mean"),
        ({"how": "last"}, "how=last with 2 numbers"),
    ):
        with pytest.raises(LogError, match=message):
            ddp_train.log("kl", torch.ones(2), **options)  # type: ignore[arg-type]
    numbers = LoggedNumbers("cpu")
    numbers.check(HOOK_LOG, "kl", Rule.MEAN)
    with pytest.raises(LogError, match="logged with how=mean before, and with how=sum now"):
        numbers.check(HOOK_LOG, "kl", Rule.SUM)
    with pytest.raises(LogError, match="500 names were logged already"):
        for step in range(501):
            numbers.check(HOOK_LOG, f"step{step}", Rule.MEAN)


def test_a_pass_that_does_not_count_logs_nothing() -> None:
    """An evaluation, a trial, and what activation checkpointing repeats in a backward pass."""
    job = job_that_logs(World(), 1)
    numbers = job.stepper.logged
    inputs, labels = table().get_batch(torch.arange(4).numpy(), 0)
    with numbers.open():
        job.module((inputs.double(), labels))
        assert not numbers.pending
        batch = next(iter(job.batches))
        with job.strategy.sync_gradients(batch.micro_batch):
            calls = len(logged_names(numbers, job.module, batch.data))
            repeated = torch.utils.checkpoint.checkpoint(  # pyright: ignore
                lambda data: job.module(data)[0], batch.data, use_reentrant=False
            )
            assert len(numbers.pending) == calls
            repeated.backward()
            assert len(numbers.pending) == calls


def logged_names(numbers: LoggedNumbers, module: nn.Module, data: Any) -> list[str]:
    module(data)
    names = [entry.name for entry in numbers.pending]
    numbers.pending.clear()
    return names


@pytest.mark.nightly
def test_a_compiled_step_logs_as_any_other() -> None:
    job = job_that_logs(World(), 1)
    job.module.compile(backend="eager")
    numbers = job.stepper.logged
    with numbers.open():
        fit(job)
        job.stepper.mean_loss(numbers)
    compiled = numbers.take()
    del compiled["nan"]
    plain = logged(World(), 1)
    del plain["nan"]
    assert compiled == pytest.approx(plain, rel=1e-12)


MINE = """
import ddp_train
from torch.nn import functional


class Task:
    units_are_samples = True
    better = {"mine": "max"}

    def loss(self, model, batch):
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        ddp_train.log("mine/loss", losses)
        return losses.sum(), len(losses)

    def score(self, model, batch):
        right = model(batch[0]).argmax(1) == batch[1]
        return {"mine": (right.sum(), len(right))}


class Hook:
    def __init__(self, job, run_dir, world):
        self.rank = world.rank

    def due(self, job):
        return job.step + 2 - job.step % 2

    def act(self, job):
        job.log("hooks/rank", self.rank)
        job.log_text("note", f"of rank {self.rank}")
        if self.rank == 0:
            ddp_train.log("hooks/steps", job.step, how="last")


class Sheet(ddp_train.Tracker):
    def open(self, run, run_id):
        self.file = run.run_dir / "sheet.txt"
        return "1"

    def write(self, step, scalars):
        with self.file.open("a") as file:
            file.write(f"{step} {' '.join(scalars)}\\n")

    def write_text(self, step, name, text):
        self.write(step, [name, text])

    def close(self, status, summary):
        pass
"""


@pytest.mark.slow
def test_resumed_run_has_the_lines_of_an_undisturbed_one(tmp_path: Path) -> None:
    """It resumes between two lines: the checkpoint has what was logged since the first."""
    (tmp_path / "mine.py").write_text(MINE)
    env = environment({"PYTHONPATH": str(tmp_path)})
    words = [
        *(*SMALL, THREE, "task._target_=mine.Task", "hooks=[mine.Hook]", "tracker=mine.Sheet"),
        *("train.epochs=2", "train.global_batch_size=51", "train.log_every_steps=3"),
        *("checkpoint.every_steps=2", "checkpoint.keep=9", "tuning.precision=fp64"),
    ]
    calm = tmp_path / "calm"
    done = run(*words, f"run_dir={calm}", env=env)
    assert done.returncode == 0, done.stderr
    lines = lines_of(calm)
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("hook", 2), ("train", 3), ("train", 4), ("test", 4), ("hook", 4), ("train", 6)),
        *(("hook", 6), ("train", 8), ("test", 8), ("hook", 8)),
    ]
    for line in lines:
        if line["kind"] == "train":
            assert line["mine/loss"] == pytest.approx(line["loss"], rel=1e-12)
        elif line["kind"] == "hook":
            assert (line["hooks/rank"], line["hooks/steps"]) == (1.0, line["step"])
    sheet = (calm / "sheet.txt").read_text()
    assert "train/mine/loss" in sheet and "8 hook/epoch hook/hooks/rank hook/hooks/steps" in sheet
    assert "8 note of rank 0" in sheet and "of rank 1" not in sheet
    assert "mine/loss" in (calm / "report.html").read_text()

    resumed = tmp_path / "resumed"
    shutil.copytree(calm, resumed)
    for place in places(resumed):
        if place.name > "step_00000002":
            shutil.rmtree(place)
    (resumed / "summary.json").unlink()
    done = run(*words, f"run_dir={resumed}", env=env)
    assert done.returncode == 0 and "step 2" in done.stdout, done.stderr
    assert lines_of(resumed) == lines

    report = compare_page([read_run(calm), read_run(resumed)], "")
    (table, *_) = report.tables
    names = ("test.mine, last", "test.mine, best", "train.mine/loss, last", "hook.hooks/rank, last")
    assert {*names} <= {*table.columns}
    watched = table_of(tmp_path, [read_run(calm)]).columns
    assert {"test.mine", "train.mine/loss", "hook.hooks/steps"} <= {*watched}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measures."""
    measured = ("time", "figures", "samples_per_second", "flops_per_second", "mfu")
    return [
        {name: value for name, value in line.items() if name not in measured}
        for line in read_metrics(run_dir / METRICS)
    ]


def test_evaluations_that_end_in_the_order_of_their_begin_leave_logging_on() -> None:
    numbers = LoggedNumbers("cpu")
    first = no_numbers()
    second = no_numbers()
    with numbers.open(), TrainingStep():
        for evaluation in (first, second):
            evaluation.__enter__()
        ddp_train.log("scored", 1.0, how="sum")
        for evaluation in (first, second):
            evaluation.__exit__(None, None, None)
        ddp_train.log("trained", 1.0, how="sum")
    assert [entry.name for entry in numbers.pending] == ["trained"]
