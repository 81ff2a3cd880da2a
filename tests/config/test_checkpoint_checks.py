"""What a run resumes from must fit it."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest

from ddp_train.config.auto import resolve
from ddp_train.config.prepare import prepare
from ddp_train.config.validate import check
from ddp_train.hardware import Hardware
from ddp_train.options.schema import RequestedRun
from tests.support.commands import PROGRAM
from tests.support.configs import (
    checkpoint_of,
    composed,
    problems_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_a_mirror_without_its_package_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ImportError("Install s3fs to access S3")
    missing.__cause__ = ModuleNotFoundError("No module named 's3fs'", name="s3fs")
    monkeypatch.setattr("fsspec.get_filesystem_class", mock.Mock(side_effect=missing))
    (problem,) = problems_of("checkpoint.mirror=s3://x/y")
    assert problem.startswith("checkpoint.mirror=s3://x/y: needs the package s3fs; run ")
    assert problem.endswith(" -m pip install s3fs")


@pytest.mark.slow
def test_another_run_cannot_take_up_a_state_that_does_not_fit_it(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "one", "model=mlp")
    for place in ("one", "one/checkpoints/step_00000010"):
        words = ["model=mlp", f"checkpoint.resume={place}", "run_dir=two"]
        problems = problems_of(*words, "optimizer=adamw", "train.global_batch_size=48")
        assert sorted(problems) == [
            (
                f"optimizer=adamw: the run in checkpoint.resume={place} has optimizer=sgd; "
                "use optimizer=sgd; for a new run use checkpoint.resume=never"
            ),
            (
                f"train.global_batch_size=48: the run in checkpoint.resume={place} has"
                " train.global_batch_size=96; use train.global_batch_size=96; for a new run use"
                " checkpoint.resume=never"
            ),
        ]
    (problem,) = problems_of(
        "model=mlp", "checkpoint.resume=one", "run_dir=two", "optimizer.decay_norm_and_bias=false"
    )
    assert (
        "the run in checkpoint.resume=one has optimizer.decay_norm_and_bias=true" in problem
    )  # parameters renumbered
    prepare(
        PROGRAM,
        ["model=mlp", "checkpoint.resume=one", "run_dir=two", "tuning.precision=bf16"],
        None,
    )
    on_gpu = composed("model=mlp", "checkpoint.resume=one", "tuning.precision=fp16")
    gpu = Hardware(cpus=2, gpus=1, compute_capability=(9, 0))
    (problem,) = check(RequestedRun(on_gpu, resolve(on_gpu, gpu, None), gpu, None))
    assert (
        "tuning.precision=fp16: the run in checkpoint.resume=one has tuning.precision=fp32"
        in problem
    )


@pytest.mark.slow
def test_weights_of_a_file_that_a_checkpoint_would_replace_are_refused(tmp_path: Path) -> None:
    (tmp_path / "first.pt").touch()
    checkpoint_of(tmp_path / "one", "model=mlp", "model.init_from=first.pt")
    found = (
        "model.init_from=other.pt: has no effect, since the weights are those of"
        " checkpoint.resume=one; leave model.init_from out"
    )
    words = ["model=mlp", "checkpoint.resume=one", "run_dir=two"]
    (problem,) = problems_of(*words, "model.init_from=other.pt")
    assert problem == (
        f"{found}, or leave checkpoint.resume out to begin with the weights of that file"
    )
    (problem,) = problems_of("mode=evaluate", "checkpoint.resume=one", "model.init_from=other.pt")
    assert problem == found
    for given in ([*words, "model.init_from=first.pt"], [*words], ["mode=evaluate", words[1]]):
        prepare(PROGRAM, given, None).lock.release()


@pytest.mark.slow
def test_another_option_of_a_group_is_one_mistake(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", "model=cnn")
    (problem,) = problems_of("run_dir=run", "model=mlp")
    assert (
        problem
        == "model=mlp: the run in run_dir=run has model=cnn; use model=cnn; for a new run use run_dir=run_new"
    )
    (problem,) = problems_of("run_dir=run", "model.channels=8")
    assert (
        problem == "model.channels=8: the run in run_dir=run has model.channels=32; use"
        " model.channels=32; for a new run use run_dir=run_new"
    )


@pytest.mark.slow
def test_a_run_that_goes_on_otherwise_says_so(tmp_path: Path) -> None:
    tuned = [
        "strategy.sync_bn=true",
        "tuning.buckets=large",
        "tuning.precision=bf16",
        "tuning.num_workers=1",
    ]
    words = [
        "model=mlp",
        "optimizer.lr=0.3",
        "schedule=constant",
        *tuned,
        f"run_dir={tmp_path}/run",
    ]
    checkpoint_of(tmp_path / "run", *words)
    same = prepare(PROGRAM, words, None)
    assert not any("resumes with" in notice for notice in same.notices)
    assert same.lock
    same.lock.release()
    other = prepare(PROGRAM, ["model=mlp", "train.epochs=3", words[-1]], None)
    (notice,) = (notice for notice in other.notices if "resumes with" in notice)
    for change in (
        "train.epochs=3 (was null)",
        "optimizer.lr=0.05 (was 0.3)",
        "schedule=cosine (was constant)",
    ):
        assert change in notice
    digits = (
        "strategy.sync_bn=false (was true), tuning.precision=fp32 (was bf16),"
        " tuning.buckets=default (was large)"
    )
    assert notice.endswith(f", {digits}"), "loader processes change no number"


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_longer_run_says_that_its_schedule_is_stretched(tmp_path: Path, schedule: str) -> None:
    words = ["model=mlp", f"schedule={schedule}", f"run_dir={tmp_path}/run"]
    checkpoint_of(tmp_path / "run", *words, "train.epochs=2")
    told = []
    for epochs in (2, 4):
        resumed = prepare(PROGRAM, [*words, f"train.epochs={epochs}"], None)
        assert resumed.lock
        resumed.lock.release()
        told += [notice for notice in resumed.notices if "is stretched" in notice]
    note = (
        "train.epochs=4 (was 2): schedule=cosine is stretched over the new length, so the learning"
        " rate may jump where the run resumes"
    )
    assert told == [note] * (schedule == "cosine")


def test_checkpoint_copied_from_another_run_is_noticed(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", "model=mlp")
    other = checkpoint_of(tmp_path / "other", "model=mlp", "seed=3")
    shutil.copytree(other, tmp_path / "run/checkpoints/step_00000020")
    (problem,) = problems_of("model=mlp", "run_dir=run")
    assert (
        problem
        == "seed=0: the run in run_dir=run has seed=3; use seed=3; for a new run use run_dir=run_new"
    )
