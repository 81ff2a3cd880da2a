"""What validates, by what a run selects, when it stops for want of improvement, and what it says of
all that."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import shutil
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.model import built_in_tasks
from ddp_train.checkpoints.reader import described, find
from ddp_train.checkpoints.writer import Writer
from ddp_train.config import metrics
from ddp_train.config.bind import bind
from ddp_train.config.notices import notices
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.config import DigitsConfig, LinearRegressionDataConfig
from ddp_train.data.datasets import BatchSource
from ddp_train.data.image_folder.config import ImageFolderConfig
from ddp_train.data.splits import Splits, split_for_validation
from ddp_train.distributed.world import World
from ddp_train.engine.selection import Best, Selection
from ddp_train.engine.selection_hook import SelectionHook, TimeLimit
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.sweeps.outcomes import completed_outcome
from tests.checkpoints.test_checkpoint import snapshot
from tests.support.commands import ONE, SMALL, THREE, checkpoints, read, run, weights
from tests.support.commands import metrics as lines_of
from tests.support.jobs import config_of

# --- splits ---------------------------------------------------------------------------------------


def rows_of(source: BatchSource, epoch: int | None = None) -> set[bytes]:
    """What its samples are, byte by byte."""
    inputs = source.get_batch(np.arange(len(source)), epoch)[0]
    return {row.contiguous().numpy().tobytes() for row in inputs}


def test_a_split_is_keyed_by_seed_and_sample() -> None:
    train, validation = split_for_validation(1000, 0.1, seed=3)
    assert len(validation) == 100 and sorted([*train, *validation]) == list(range(1000))
    assert all(
        np.array_equal(*pair)
        for pair in zip(split_for_validation(1000, 0.1, 3), (train, validation), strict=True)
    )
    shared = set(validation) & set(split_for_validation(1000, 0.1, 4)[1])
    assert len(shared) < 30, "another seed, another part"
    assert set(validation) < set(split_for_validation(1000, 0.2, 3)[1]), (
        "a larger part holds the smaller one"
    )


def test_a_part_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"data\.validation=0\.01: of 20 samples, 0 would be for validation and 20 for training",
    ):
        split_for_validation(20, 0.01, 0)
    with pytest.raises(DataError, match="20 would be for validation and 0 for training"):
        split_for_validation(20, 0.99, 0)


def test_no_sample_both_trains_and_validates() -> None:
    whole, parts = (
        open_datasets(Config(data=DigitsConfig(validation=part))) for part in (None, 0.25)
    )
    assert whole.validation is None and whole.scored == ("test", whole.test)
    assert parts.validation is not None and parts.scored == ("validation", parts.validation)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (1433 - 358, 358, 364)
    # A few of the digits are there twice, to the pixel: each sample is counted, not each picture.
    assert rows_of(parts.train) | rows_of(parts.validation) == rows_of(whole.train)
    assert rows_of(parts.test) == rows_of(whole.test)
    assert parts.train.outputs == parts.validation.outputs == 10


def test_augmentation_is_for_training_alone() -> None:
    plain, moved = (
        open_datasets(Config(data=DigitsConfig(validation=0.1, augment=how)))
        for how in (False, True)
    )
    assert plain.validation is not None and moved.validation is not None
    assert rows_of(moved.validation) == rows_of(plain.validation)
    assert rows_of(moved.train, epoch=0) != rows_of(plain.train, epoch=0)


def test_a_limit_cuts_each_split_and_moves_no_sample() -> None:
    parts = open_datasets(Config(data=DigitsConfig(validation=0.1)))
    few = open_datasets(Config(data=DigitsConfig(validation=0.1, limit=30)))
    assert few.validation is not None and parts.validation is not None
    assert (len(few.train), len(few.validation), len(few.test)) == (30, 30, 30)
    assert rows_of(few.train) <= rows_of(parts.train) and rows_of(few.validation) <= rows_of(
        parts.validation
    )


def test_a_folder_of_images_is_split_too(tmp_path: Path) -> None:
    for number in range(12):
        for split in ("train", "val"):
            folder = tmp_path / split / f"class_{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (20 * number, 0, 0)).save(folder / f"{number}.png")
    section = ImageFolderConfig(
        root=str(tmp_path), image_size=16, decode="processes", validation=0.25
    )
    train, test, validation = open_datasets(Config(data=section))[:3]
    assert validation is not None and (len(train), len(validation), len(test)) == (9, 3, 12)
    crops, labels = validation.get_batch(np.arange(3), None)
    assert not rows_of(train) & rows_of(validation)
    assert [int(crop[0, 0, 0]) // 20 % 3 for crop in crops] == labels.tolist(), (
        "an image keeps its label"
    )


class Table(Dataset):
    """Ten rows of a split, which say where they are from."""

    OFFSETS: ClassVar[dict[str, float]] = {"train": 0.0, "validation": 100.0, "test": 200.0}

    def __init__(self, offset: float, augment: bool) -> None:
        self.offset = offset
        self.augment = augment

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[torch.Tensor, float]:
        row = torch.full((2,), self.offset + number)
        return row + torch.rand(2) / 2 if self.augment else row, 1.0


class BySplit(Table):
    def __init__(self, split: str) -> None:
        super().__init__(self.OFFSETS[split], augment=False)


class ByTrain(Table):
    def __init__(self, train: bool, augment: bool = True) -> None:
        super().__init__(self.OFFSETS["train" if train else "test"], augment and train)


class WithoutValidation(Table):
    def __init__(self, split: str) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"Unknown value '{split}' for argument split.")
        super().__init__(self.OFFSETS[split], augment=False)


class OtherSplit(Table):
    """As torchvision's EMNIST, whose `split` names a data set."""

    def __init__(self, split: str, train: bool) -> None:
        assert split == "letters"
        super().__init__(self.OFFSETS["train" if train else "test"], augment=False)


def own(name: str, validation: float | None = None, **arguments: Any) -> Splits:
    """The splits of one of the classes above."""
    section = CustomDataConfig(
        target=f"{__name__}.{name}", arguments=arguments, validation=validation
    )
    return open_datasets(Config(data=section))


def firsts(source: BatchSource | None) -> list[float]:
    assert source is not None
    return source.get_batch(np.arange(len(source)), None)[0][:, 0].tolist()


def test_a_class_with_split_gives_its_own_validation_set() -> None:
    train, test, validation = own("BySplit")[:3]
    assert [firsts(one)[0] for one in (train, validation, test)] == [0.0, 100.0, 200.0]
    assert own("BySplit", 0.0).validation is None, "0: none"
    parts = own("BySplit", 0.2)
    assert len(firsts(parts.train)) == 8 and max(firsts(parts.validation)) < 100, (
        "a part of the training set instead"
    )


def test_class_with_train_validates_without_augmentation() -> None:
    assert own("ByTrain").validation is None
    train, test, validation = own("ByTrain", 0.3)[:3]
    assert sorted(map(math.floor, firsts(train) + firsts(validation))) == list(range(10))
    assert all(number.is_integer() for number in firsts(validation)), (
        "called again with augment=False"
    )
    assert not any(number.is_integer() for number in firsts(train)) and firsts(test)[0] == 200.0
    assert all(
        number.is_integer() for number in firsts(own("ByTrain", 0.3, augment=True).validation)
    )


def test_a_class_that_has_no_validation_split_is_told_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"split='validation' failed: ValueError: Unk.*use data\.validation=0 for"
    ):
        own("WithoutValidation")
    assert own("WithoutValidation", 0.0).validation is None
    assert firsts(own("OtherSplit", split="letters").test)[0] == 200.0


# --- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", built_in_tasks())
def test_the_config_knows_the_metrics_of_the_built_in_tasks(name: str) -> None:
    known = OPTIONS["task"][name].metrics
    assert {metric for metric, better in known.items() if better == "max"} == set(
        built_in_tasks()[name].better
    )
    assert next(iter(known)) == "loss"


def best_of(scores: list[dict[str, Any]], metric: str = "auto", min_delta: float = 0.0) -> Best:
    better = {"accuracy": "max", "iou": "max"}
    best = Best(Selection("validation", metric, better), min_delta)
    for step, score in enumerate(scores, start=1):
        best.see(step, score)
    return best


def test_each_metric_is_selected_by_in_its_own_direction() -> None:
    scores = [
        {"loss": 2.0, "accuracy": 0.5, "iou": 0.1},
        {"loss": 1.0, "accuracy": 0.5, "iou": 0.3},
        {"loss": 3.0, "accuracy": 0.4, "iou": 0.2},
    ]
    assert best_of(scores).as_dict() == {
        "metric": "validation.accuracy",
        "better": "max",
        "value": 0.5,
        "step": 2,
    }
    assert best_of(scores, "iou").step == 2 and best_of(scores, "iou").waited == 1
    assert best_of(scores, "loss").as_dict() == {
        "metric": "validation.loss",
        "better": "min",
        "value": 1.0,
        "step": 2,
    }
    assert str(best_of([{"loss": 1.0}])) == "validation.loss", "auto, where there is no accuracy"
    assert best_of([{"loss": 1.0}, {"loss": 1.0}]).step == 1, "the earliest of equal ones"


def test_what_is_no_number_is_never_the_best() -> None:
    best = best_of([{"loss": math.nan}, {"loss": math.inf}, {"loss": None}])
    assert best.as_dict() is None and best.waited == 3
    best.see(4, {"loss": 9.0})
    assert (best.step, best.waited) == (4, 0)


def test_a_difference_up_to_min_delta_is_no_improvement() -> None:
    losses = [{"loss": value} for value in (1.0, 0.95, 0.91, 0.89)]
    assert best_of(losses, min_delta=0.1).step == 4, "compared with the last that counted"
    assert best_of(losses[:3], min_delta=0.1).waited == 2


def test_a_state_comes_back_unless_something_else_is_compared() -> None:
    best = best_of([{"loss": 1.0}, {"loss": 2.0}], "loss")
    again = best_of([], "loss")
    other = best_of([], "iou")
    for one in (again, other):
        one.load_state(copy.deepcopy(best.state()))
    assert again.state() == best.state() and again.waited == 1
    assert other.as_dict() is None and other.waited == 0


def test_the_link_leads_to_the_best_checkpoint_by_any_metric(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1, Selection("validation", "iou", {"iou": "max"}))
    link = tmp_path / "checkpoints/best"
    for step, iou in enumerate([0.1, 0.7, 0.3, math.nan, 0.8], start=1):
        by = {"split": "validation", "metric": "iou", "better": {"iou": "max"}}
        writer.submit(lambda: snapshot(step, validation={"loss": 0.0, "iou": iou}, best_by=by))  # noqa: B023  at once
        writer.finish()
        assert link.is_symlink() and link.resolve().name == f"step_{[1, 2, 2, 2, 5][step - 1]:08d}"
        if step == 4:
            assert checkpoints(tmp_path) == ["best", "step_00000002", "step_00000004"]
            assert find(str(tmp_path), tmp_path, "auto") == tmp_path / "checkpoints/step_00000002"
            assert find(str(tmp_path), tmp_path, "last") == tmp_path / "checkpoints/step_00000004"
            assert find(str(link), tmp_path) == tmp_path / "checkpoints/step_00000002"
            found = described(tmp_path / "checkpoints/step_00000002")
            assert (found["which"], found["metric"], found["value"]) == (
                "best",
                "validation.iou",
                0.7,
            )
            assert described(tmp_path / "checkpoints/step_00000004")["which"] == "last"
    (tmp_path / "checkpoints/best.part-1").symlink_to(
        "step_00000001"
    )  # a process was killed just then
    Writer(tmp_path, 1)
    assert checkpoints(tmp_path) == ["best", "step_00000005"]


def test_without_a_best_checkpoint_none_is_taken_for_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    writer.submit(lambda: snapshot(1, test={"loss": 1.0}))
    writer.finish()
    assert find(str(tmp_path), tmp_path, "auto") == tmp_path / "checkpoints/step_00000001"
    with pytest.raises(
        DataError, match=r"has no best checkpoint: it was trained without checkpoint\.best"
    ) as caught:
        find(str(tmp_path), tmp_path, "best")
    assert caught.value.remedy == "use checkpoint.which=last, or in Python which='last'"


@pytest.mark.parametrize(
    ("key", "value", "data", "expected"),
    [
        (
            "objective",
            "test.acuracy",
            {},
            "has no metric acuracy; it has loss, accuracy, top5; did you mean accuracy?",
        ),
        (
            "objective",
            "accuracy",
            {},
            "must be one of auto, samples_per_second, seconds, test.NAME, validation.NAME, validation/SET.NAME",
        ),
        (
            "objective",
            "validation.loss",
            {},
            "there is no validation set; add data.validation=0.1, or use objective=",
        ),
        ("objective", "test.loss", {"validation": 0.1}, ""),
        ("objective", "seconds", {}, ""),
        (
            "checkpoint.best_metric",
            "seconds",
            {},
            "must be one of auto, test.NAME, validation.NAME, validation/SET.NAME",
        ),
        (
            "checkpoint.best_metric",
            "test.loss",
            {"validation": 0.1},
            "scored at the end only; use checkpoint.best_m",
        ),
        ("train.early_stopping.metric", "validation.top5", {"validation": 0.1}, ""),
        (
            "train.early_stopping.metric",
            "validation.rmse",
            {"validation": 0.1},
            "has no metric rmse",
        ),
    ],
)
def test_a_metric_that_is_not_there_is_refused(
    key: str, value: str, data: dict[str, Any], expected: str
) -> None:
    config = Config(data=DigitsConfig(**data))
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    setattr(section, name, value)
    found = [str(problem) for problem in metrics.problems(config)]
    assert (
        (not found)
        if not expected
        else (found[0].startswith(f"{key}={value}: ") and expected in found[0])
    )


def test_what_only_the_task_knows_is_left_to_it() -> None:
    config, problems = bind(
        {
            "task": {"name": "custom", "_target_": "a.B"},
            "data": {"name": "custom", "_target_": "a.C"},
        }
    )
    config.objective = "validation.dice"
    assert not problems and config.data.has_validation() is None
    assert (
        list(metrics.named_problems(config, None)) == []
        and metrics.direction_of("validation.dice", config) is None
    )
    assert list(metrics.named_problems(config, False)), "once the data are open, it is known"
    regression = Config(data=LinearRegressionDataConfig(), objective="test.accuracy")
    assert [str(problem) for problem in metrics.named_problems(regression, False)] == [
        "objective=test.accuracy: data=linear_regression has no classes; use objective=test.loss"
    ]


def test_keys_without_effect_are_said_so() -> None:
    config = config_of(World())
    config.train.early_stopping.metric = "test.accuracy"
    assert any(
        "no effect without train.early_stopping.patience" in notice
        for notice in notices(RequestedRun(config, config, Hardware(cpus=2)))
    )


def test_the_objective_is_read_with_its_direction(tmp_path: Path) -> None:
    summary = {
        "test": {"loss": 1.0, "dice": 0.3},
        "validation": {"loss": 2.0, "dice": 0.4},
        "seconds": 3.0,
        "better": {"loss": "min", "dice": "max"},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    def row(objective: str) -> tuple[Any, ...]:
        found = completed_outcome(Config(run_dir=str(tmp_path), objective=objective))
        return found["objective_name"], found["objective"], found["better"]

    assert row("auto") == ("validation.loss", 2.0, "min") and row("test.dice") == (
        "test.dice",
        0.3,
        "max",
    )
    assert row("seconds") == ("seconds", 3.0, "min")
    with pytest.raises(
        ConfigError,
        match=r"objective=test\.iou: the run has no such number; it has validation\.loss",
    ):
        row("test.iou")


@pytest.mark.slow
def test_sweep_selects_by_validation_in_the_right_direction(tmp_path: Path) -> None:
    words = [*SMALL, ONE, "train.epochs=1", "data.validation=0.2", f"run_dir={tmp_path}/sweep"]
    done = run("-m", *words, "optimizer.lr=0.0001,0.3", "objective=validation.top5")
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "sweep/results.jsonl").read_text().splitlines()
    ]
    best = max(rows, key=lambda row: row["objective"])
    assert [row["better"] for row in rows] == ["max", "max"] and rows[0]["objective"] != rows[1][
        "objective"
    ]
    assert (
        best["objective"]
        == read(tmp_path / f"sweep/{best['trial']}", "summary.json")["validation"]["top5"]
    )
    assert (
        f"best trial {best['trial']}: optimizer.lr=" in done.stdout
        and "validation.top5" in done.stdout
    )
    assert "selects by the test set" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("optuna"), reason="needs the extra optuna")
def test_optuna_finds_the_trial_that_our_table_names(tmp_path: Path) -> None:
    words = [*SMALL, ONE, "train.epochs=2", f"run_dir={tmp_path}/sweep", "objective=test.accuracy"]
    interval = "optimizer.lr=tag(log,interval(0.0001,0.2))"
    done = run("-m", "hydra/sweeper=pool_optuna", "hydra.sweeper.n_trials=2", *words, interval)
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "sweep/results.jsonl").read_text().splitlines()
    ]
    found = (tmp_path / "sweep/optimization_results.yaml").read_text()
    assert f"best_value: {max(row['objective'] for row in rows)}" in found
    assert "note: objective=test.accuracy: selects by the test set" in done.stderr


# --- whole runs -----------------------------------------------------------------------------------

STOPS = (
    *SMALL,
    "train.epochs=8",
    "data.validation=0.2",
    "checkpoint.best=true",
    "checkpoint.keep=99",
    "checkpoint.every_steps=2",
    "train.early_stopping.patience=2",
    "train.early_stopping.min_delta=9",
    "train.log_every_steps=2",
)
"""The first evaluation, after step 3, is the best for early stopping: training ends after the
third, in step 9."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of three ranks that stopped early, and what it printed."""
    run_dir = tmp_path_factory.mktemp("validation") / "run"
    done = run(f"run_dir={run_dir}", THREE, *STOPS)
    assert done.returncode == 0, done.stderr
    return run_dir, done.stdout


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, but for the clock and the hardware."""
    return [
        {
            key: value
            for key, value in line.items()
            if key not in ("time", "figures", "samples_per_second")
        }
        for line in lines_of(run_dir)
    ]


@pytest.mark.slow
def test_three_ranks_stop_early_and_say_why(stopped: tuple[Path, str]) -> None:
    run_dir, said = stopped
    summary = read(run_dir, "summary.json")
    assert (summary["status"], summary["steps"], summary["stopped_early"]["step"]) == (
        "completed",
        9,
        9,
    )
    assert "validation.loss: no improvement on" in summary["stopped_early"]["reason"]
    assert "after step 3 in 2 evaluations" in summary["stopped_early"]["reason"]
    assert f"stopped early after step 9: {summary['stopped_early']['reason']}" in said
    assert "200 samples to train on, 200 to validate (0.2)" in said
    assert "selects by the test set" not in said


@pytest.mark.slow
def test_validation_is_scored_each_epoch_and_the_test_set_once(stopped: tuple[Path, str]) -> None:
    run_dir, _ = stopped
    lines = lines_of(run_dir)
    summary = read(run_dir, "summary.json")
    kinds = {
        kind: [line["step"] for line in lines if line["kind"] == kind]
        for kind in ("validation", "test")
    }
    assert kinds == {"validation": [3, 6, 9], "test": [9]}
    for kind in kinds:
        last = next(line for line in reversed(lines) if line["kind"] == kind)
        assert {name: last[name] for name in summary[kind]} == summary[kind]
    assert summary["better"] == {"loss": "min", "accuracy": "max", "top5": "max"}


@pytest.mark.slow
def test_the_summary_names_the_best_and_scores_it_too(
    stopped: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir, said = stopped
    best = read(run_dir, "summary.json")["best"]
    summary = read(run_dir, "summary.json")
    scores = {line["step"]: line for line in lines_of(run_dir) if line["kind"] == "validation"}
    step = max(scores, key=lambda step: (scores[step]["accuracy"], -scores[step]["loss"]))
    assert (best["metric"], best["step"], best["value"]) == (
        "validation.accuracy",
        step,
        scores[step]["accuracy"],
    )
    assert best["checkpoint"] == f"{run_dir}/checkpoints/step_{step:08d}"
    assert (run_dir / "checkpoints/best").resolve() == Path(best["checkpoint"])
    assert summary["checkpoint"] == f"{run_dir}/checkpoints/step_00000009"
    assert "test accuracy" in said and best["test"]["samples"] == summary["test"]["samples"] == 200
    for which, expected, name in (("auto", best["test"], "best"), ("last", summary["test"], "")):
        words = [
            "mode=evaluate",
            f"checkpoint.resume={run_dir}",
            f"run_dir={tmp_path}/{which}",
            THREE,
        ]
        done = run(*words, *([] if which == "auto" else [f"checkpoint.which={which}"]))
        assert done.returncode == 0, done.stderr
        found = read(tmp_path / which, "summary.json")
        assert found["test"] == expected and found["steps"] == (step if which == "auto" else 9)
        if name:
            assert (found["evaluated"]["which"], found["evaluated"]["metric"]) == (
                "best",
                "validation.accuracy",
            )
            assert (
                f"step {step}, the best of its run by validation.accuracy, {best['value']:.2%}"
                in done.stdout
            )


@pytest.mark.slow
def test_the_summary_says_what_ran_and_how_long(stopped: tuple[Path, str]) -> None:
    run_dir, _ = stopped
    summary = read(run_dir, "summary.json")
    lines = lines_of(run_dir)
    assert summary["command"].startswith(f"python launch.py run_dir={run_dir} {THREE} ")
    started = datetime.fromisoformat(summary["started"])
    assert started.utcoffset() is not None and time.time() - started.timestamp() < 3600
    assert summary["wall_seconds"] > summary["seconds"] > sum(summary["epoch_seconds"])
    assert summary["parameters"]["all"] == summary["parameters"]["trained"] > 1000
    assert summary["git_revision"] is None or len(summary["git_revision"]) == 40
    assert 0 < summary["samples_per_second_with_evaluation"] < summary["samples_per_second"]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert abs(lines[-1]["time"] - started.timestamp()) < summary["wall_seconds"] + 1
    last = [line for line in lines if line["kind"] == "train" and line["epoch"] == 3]
    assert (
        min(line["loss"] for line in last)
        <= summary["train"]["loss"]
        <= max(line["loss"] for line in last)
    )
    assert "grad_norm" not in last[0] and last[0]["lrs"] == [last[0]["lr"]]


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6])
def test_early_stopping_is_exact_after_a_resume(
    stopped: tuple[Path, str], tmp_path: Path, step: int
) -> None:
    """Lost between two evaluations, or after one."""
    run_dir, _ = stopped
    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    for place in (tmp_path / "run/checkpoints").glob("step_*"):
        if int(place.name.removeprefix("step_")) > step:
            shutil.rmtree(place)
    done = run(f"run_dir={tmp_path}/run", THREE, *STOPS)
    assert done.returncode == 0, done.stderr
    assert f"from step {step}" in done.stdout
    ours, theirs = (read(place, "summary.json") for place in (tmp_path / "run", run_dir))
    for name in ("status", "steps", "stopped_early", "validation", "test", "train"):
        assert ours[name] == theirs[name]
    assert {**ours["best"], "checkpoint": None} == {**theirs["best"], "checkpoint": None}
    assert timeless(tmp_path / "run") == timeless(run_dir)
    assert weights(tmp_path / "run") == weights(run_dir)
    assert (tmp_path / "run/checkpoints/best").readlink() == (
        run_dir / "checkpoints/best"
    ).readlink()


@pytest.mark.slow
def test_run_that_stopped_early_is_over_until_it_may_wait(
    stopped: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir, _ = stopped
    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    done = run(f"run_dir={tmp_path}/run", THREE, *STOPS)
    assert done.returncode == 0 and "nothing is left to train: 9 steps done" in done.stdout
    before, after = (read(place, "summary.json") for place in (run_dir, tmp_path / "run"))
    assert [after[name] for name in ("stopped_early", "test", "validation", "train")] == [
        before[name] for name in ("stopped_early", "test", "validation", "train")
    ]
    done = run(f"run_dir={tmp_path}/run", THREE, *STOPS, "train.early_stopping.patience=3")
    assert (
        done.returncode == 0
        and read(tmp_path / "run", "summary.json")["stopped_early"]["step"] == 12
    )


@pytest.mark.parametrize(
    ("slow", "late"),
    [
        ({}, 0.35),
        ({1: 20.0}, 0.35),
        ({1: 20.0, 300: 8.0, 540: 8.0}, 0.35),
        (dict.fromkeys(range(100, 1000, 100), 40.0), 40.0),
    ],
)
def test_a_time_limit_is_kept_with_few_looks(slow: dict[int, float], late: float) -> None:
    """slow: seconds that single steps take, for a compilation or an evaluation; all others take a
    tenth."""
    record: Any = SimpleNamespace(seconds=0.0, seconds_before=0.0)
    job: Any = SimpleNamespace(step=0, scores={}, stepper=SimpleNamespace(device="cpu"))
    job.plan = BatchPlan(1000, 10, 1, 10_000, 0)
    best = Best(Selection("test", "loss", {}))
    hook = SelectionHook(best, time_limit=TimeLimit(1.0, record))
    looks = 0
    while job.step < job.plan.steps:
        until = hook.due(job)
        while job.step < min(until, job.plan.steps):
            job.step += 1
            record.seconds += slow.get(job.step, 0.1)
        hook.act(job)
        looks += 1
    assert 60 <= record.seconds < 60 + late and hook.stopped_early is not None
    assert hook.stopped_early == {"step": job.step, "reason": "train.max_minutes=1 are over"}
    assert looks < 40, "one at the end of each epoch of 100 steps, and few more"
    record.seconds_before = 59.0
    job.plan = BatchPlan(1000, 10, 1, 10_000, 0)
    resumed = SelectionHook(best, time_limit=TimeLimit(1.0, record))
    resumed.stop_if_due(job)
    assert resumed.stopped_early is None
    record.seconds_before = 60.0
    resumed.stop_if_due(job)
    assert job.plan.steps == job.step, "nothing is left to train"


@pytest.mark.slow
def test_three_ranks_end_when_the_time_is_over(tmp_path: Path) -> None:
    words = (
        f"run_dir={tmp_path}/run",
        THREE,
        *SMALL,
        "train.epochs=100000",
        "train.evaluate_every_epochs=100",
    )
    done = run(*words, "train.max_minutes=0.02")
    assert done.returncode == 0, done.stderr
    summary = read(tmp_path / "run", "summary.json")
    assert (
        summary["status"] == "completed"
        and summary["test"]["samples"] == 200
        and summary["steps"] < 300_000
    )
    assert (
        f"stopped early after step {summary['steps']:,}: train.max_minutes=0.02 are over"
        in done.stdout
    )
    assert "at most 0.02 minutes" in done.stdout
    assert 1.2 <= summary["seconds"] < 2.4, "of training, with the last evaluation"
    assert checkpoints(tmp_path / "run")[-1] == f"step_{summary['steps']:08d}"


@pytest.mark.slow
def test_one_rank_validates_on_the_same_samples(stopped: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = stopped
    done = run(
        f"run_dir={tmp_path}/run",
        ONE,
        *STOPS,
        "train.max_grad_norm=1000",
        "optimizer.decay_norm_and_bias=false",
    )
    assert done.returncode == 0, done.stderr
    one, three = (read(place, "summary.json") for place in (tmp_path / "run", run_dir))
    assert one["stopped_early"]["step"] == three["stopped_early"]["step"]
    for split in ("validation", "test"):
        assert one[split]["samples"] == three[split]["samples"]
        assert one[split]["loss"] == pytest.approx(three[split]["loss"], abs=1e-5)
    trained = [line for line in lines_of(tmp_path / "run") if line["kind"] == "train"]
    assert all(0 < line["grad_norm"] < 1000 and len(line["lrs"]) == 2 for line in trained)


@pytest.mark.parametrize(
    ("data", "remedy"), [("digits", "data.validation=0.1"), ("text", "another text")]
)
def test_advice_against_selection_by_test_fits_the_data(data: str, remedy: str) -> None:
    assert remedy in metrics.by_test(Config(data=OPTIONS["data"][data]()))


@pytest.mark.slow
def test_without_validation_the_test_set_selects_with_a_note(tmp_path: Path) -> None:
    done = run(f"run_dir={tmp_path}/run", ONE, *SMALL, "train.epochs=2", "checkpoint.best=true")
    assert done.returncode == 0, done.stderr
    assert "note: checkpoint.best=true: selects by the test set" in done.stdout
    summary = read(tmp_path / "run", "summary.json")
    assert summary["validation"] is None and "test" not in summary["best"]
    assert summary["best"]["metric"] == "test.accuracy" and summary["stopped_early"] is None
    assert [line["step"] for line in lines_of(tmp_path / "run") if line["kind"] == "test"] == [3, 6]


OWN = '''
import torch
from ddp_train.tasks.builtin import Classification
from torch.utils.data import Dataset


class Rows(Dataset):
    """Ten of each split."""

    classes = ("left", "right")

    def __init__(self, split):
        assert split in ("train", "validation", "test")

    def __len__(self):
        return 10

    def __getitem__(self, number):
        return torch.randn(64, generator=torch.Generator().manual_seed(number)) + number % 2, number % 2


class Halves(Classification):
    """Its `margin` is the better the larger; the loss the smaller."""

    better = {"margin": "max"}

    def score(self, model, batch):
        outputs, targets = self.outputs_and_targets(model, batch)
        chosen = outputs.gather(1, targets[:, None]).sum()
        return {"margin": (chosen * 2 - outputs.sum(), len(targets))}
'''


@pytest.mark.slow
def test_data_and_tasks_of_ones_own_select_by_their_own_metric(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    env = {"PYTHONPATH": str(tmp_path)}
    words = [
        "data._target_=mine.Rows",
        "task._target_=mine.Halves",
        "model=mlp",
        "train.epochs=3",
        "train.global_batch_size=6",
        "checkpoint.best=true",
        f"run_dir={tmp_path}/run",
    ]
    done = run(*words, ONE, "checkpoint.best_metric=validation.margn", env=env)
    assert done.returncode == 2
    assert (
        "checkpoint.best_metric=validation.margn: the task has no metric margn; it has loss, margin"
        in done.stderr
    )
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "typo.py").write_text(OWN.replace('"margin": "max"', '"margn": "max"'))
    done = run(*words, THREE, "task._target_=typo.Halves", env=env)
    assert done.returncode == 2
    problem = (
        "task._target_=typo.Halves: better['margn']: there is no metric margn; there are loss, margin;"
        " did you mean margin?"
    )
    assert done.stderr.count(problem) == 1 and "Traceback" not in done.stderr
    shutil.rmtree(tmp_path / "run")
    done = run(*words, THREE, "checkpoint.best_metric=validation.margin", env=env)
    assert done.returncode == 0, done.stderr
    summary = read(tmp_path / "run", "summary.json")
    margins = {
        line["step"]: line["margin"]
        for line in lines_of(tmp_path / "run")
        if line["kind"] == "validation"
    }
    step = max(margins, key=lambda step: margins[step])
    assert (summary["best"]["metric"], summary["best"]["step"]) == ("validation.margin", step)
    assert summary["better"] == {"loss": "min", "margin": "max"}
