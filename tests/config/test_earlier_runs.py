"""The config of an earlier run is resumed, used, or changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_train.config.auto import resolve
from ddp_train.config.composition import read_config
from ddp_train.config.freeze import FILE, load_frozen
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare, read_run
from ddp_train.config.validate import check
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomModelConfig
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.text import dotted
from tests.support.commands import PROGRAM
from tests.support.configs import (
    accepted,
    checkpoint_of,
    composed,
    launch,
    own_presets,
    problems_of,
    write_manifest,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
EARLIER_RUN = (
    "optimizer=adamw",
    "optimizer.lr=0.003",
    "seed=3",
    "train.epochs=7",
    "data.limit=200",
    "launch.nproc_per_node=1",
    "checkpoint.resume=never",
)


def read_again(*words: str) -> Config:
    """As `composed`, of a run that may go on."""
    config, problems = read_run(PROGRAM, read_overrides(PROGRAM, list(words)))
    assert problems == []
    return config


@pytest.mark.slow
def test_a_run_directory_alone_goes_on_with_its_run_as_it_was() -> None:
    checkpoint_of(Path("earlier"), *EARLIER_RUN, "model=mlp", "model.hidden=12")
    before = load_frozen(Path("earlier/config.yaml").read_text())
    again = read_again("run_dir=earlier")
    assert (
        again.checkpoint.resume == "auto" and again.run_dir == "earlier" and again.mode == "train"
    )
    assert (again.data.limit, before.data.placement, again.data.placement) == (
        200,
        "device",
        "auto",
    )
    for section in ("model", "optimizer", "schedule", "train", "seed"):
        assert getattr(again, section) == getattr(before, section), section
    assert again.launch == dataclasses.replace(
        before.launch, threads_per_process="auto", backend="auto"
    ), "one was typed"
    assert (before.device, again.device) == (
        "cpu",
        "auto",
    ), "begun without a GPU, it may go on with one"
    assert before.tuning.num_workers == 0 and again.tuning.num_workers == "auto", (
        "for the hardware of today"
    )
    other = read_again("run_dir=earlier", "train.epochs=9", "optimizer.lr=0.1", "seed=4")
    assert (other.train.epochs, other.optimizer.lr, other.optimizer.name, other.seed) == (
        9,
        0.1,
        "adamw",
        4,
    )
    for words in (
        ["optimizer=adamw"],
        ["experiment=gpt_tiny"],
        ["mode=doctor"],
    ):
        assert read_again("run_dir=earlier", *words).train.epochs != 7, "the words say all of it"
    anew = read_again("run_dir=earlier", "checkpoint.resume=never")
    assert (anew.checkpoint.resume, anew.train.epochs, anew.model) == ("never", 7, before.model)
    under_torchrun = prepare(PROGRAM, ["run_dir=earlier"], World(0, 3, 0, 3, 0)).config
    assert under_torchrun.launch.nproc_per_node == 3 and under_torchrun.optimizer.lr == 0.003


@pytest.mark.parametrize("between", [["run_dir=earlier", "checkpoint.resume=never"], []])
def test_what_the_first_command_typed_stays(between: list[str]) -> None:
    """Whatever commands came after it, in that folder or from its config in another one."""
    typed = {
        "device": "cpu",
        "launch.nproc_per_node": "3",
        "launch.backend": "gloo",
        "data.placement": "host",
        "tuning.num_workers": "1",
    }
    words = [f"{key}={value}" for key, value in typed.items()]
    accepted("model=mlp", *words, "run_dir=earlier")
    accepted(*between or ["config=earlier", "run_dir=later"])
    again = read_again("run_dir=earlier" if between else "run_dir=later")
    found = dotted(dataclasses.asdict(again))
    assert {key: str(found[key]) for key in typed} == typed
    assert found["launch.threads_per_process"] == "auto", "which nobody typed"


@pytest.mark.parametrize("began", ["auto", "never"])
def test_a_run_before_its_first_checkpoint_is_the_same_job_again(began: str) -> None:
    """Killed early, or failed while it was built."""
    words = ["model=mlp", "optimizer=adamw", "train.epochs=7", "launch.nproc_per_node=2"]
    accepted(*words, f"checkpoint.resume={began}", "run_dir=earlier")
    for resume in ("auto", "never"):
        again = read_again("run_dir=earlier", "optimizer.lr=0.5", f"checkpoint.resume={resume}")
        assert (again.model.name, again.optimizer.name, again.optimizer.lr) == ("mlp", "adamw", 0.5)
        assert (again.train.epochs, again.launch.nproc_per_node) == (7, 2)
        assert again.tuning.num_workers == "auto", "for the hardware of today"
        assert again.checkpoint.resume == resume
    assert read_again("run_dir=earlier").checkpoint.resume == "auto", "it may go on from now on"
    assert read_again("run_dir=earlier", "model=cnn").train.epochs != 7, "the words say all of it"
    assert read_again("run_dir=earleir").model.name == "cnn", "a new run"
    accepted("run_dir=earlier")
    assert load_frozen(Path("earlier/config.yaml").read_text()).optimizer.name == "adamw"


def test_a_run_that_began_elsewhere_begins_there_again(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "first", "model=mlp")
    accepted("model=mlp", "checkpoint.resume=first", "run_dir=second")
    assert read_again("run_dir=second").checkpoint.resume == "first"
    assert read_again("run_dir=second", "checkpoint.resume=never").checkpoint.resume == "never"


def test_a_config_file_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", "model=mlp")
    accepted("mode=evaluate", "checkpoint.resume=run", "run_dir=scores")
    assert problems_of("run_dir=scores") == [
        "run_dir=scores: its config.yaml has mode=evaluate, which does not train; to train, use"
        " run_dir=scores_new"
    ]
    Path("mine").mkdir()
    for text in ("port: 80\n", "a: [", "- 1\n"):
        Path("mine/config.yaml").write_text(text)
        assert problems_of("run_dir=mine", "train.epochs=1") == [
            "run_dir=mine: its config.yaml is not the config of a run, and the command does not say"
            " what to train; to resume a run, give that run's folder as run_dir; to train here, add"
            " model=NAME or experiment=NAME"
        ]


@pytest.mark.parametrize("form", ["custom", "_target_"])
def test_the_config_of_a_run_is_a_command(form: str) -> None:
    """Whether the class stands there as in a frozen config or as on a command line."""
    checkpoint_of(
        Path("earlier"), *EARLIER_RUN, "model._target_=torch.nn.Linear", "model.in_features=64"
    )
    values = yaml.safe_load(Path("earlier/config.yaml").read_text())
    values |= {"run_dir": "earlier", "trusted_modules": ["os"], "mode": "evaluate"}
    if form == "_target_":
        values["model"] = {"_target_": "torch.nn.Linear", "in_features": 64}
    Path("earlier/config.yaml").write_text(yaml.safe_dump(values))
    for word in ("config=earlier/config.yaml", "config=earlier"):
        again = read_again(word, "optimizer.lr=0.1", "model.out_features=10")
        linear = {"in_features": 64, "out_features": 10}
        assert again.model == CustomModelConfig(target="torch.nn.Linear", arguments=linear)
        assert (again.optimizer.name, again.optimizer.lr, again.train.epochs) == ("adamw", 0.1, 7)
        assert (again.run_dir, again.mode, again.trusted_modules) == (
            None,
            "train",
            [],
        ), "of that run alone"
    assert composed(word, "model=cnn").model == composed("model=cnn").model
    values["hooks"], values["model"] = (
        ["antigravity.Hook"],
        {"_target_": "os.system", "command": "true"},
    )
    Path("earlier/config.yaml").write_text(yaml.safe_dump(values))
    refused = [problem.partition("; ")[0] for problem in problems_of(word)]
    assert refused == [
        "model._target_=os.system: loads code from outside the packages trusted by default",
        "hooks=[antigravity.Hook]: loads code from outside ddp_lab.study",
    ], "a file of a run is data, as its checkpoints are"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "config=nowhere",
            "config=nowhere: nowhere cannot be read (No such file or directory); name",
        ),
        (
            "config=list.yaml",
            "config=list.yaml: is not the config of a whole run; name the config.yaml of a run, or for",
        ),
        (
            "config=broken.yaml",
            "config=broken.yaml: is not plain YAML; name the config.yaml of a run",
        ),
        (
            "config=nowhere debug=tiny",
            "debug=tiny: contradicts config=nowhere, which is a whole config; give one of them",
        ),
    ],
)
def test_what_is_no_config_of_a_run_is_named(words: str, message: str) -> None:
    Path("list.yaml").write_text("[1]")
    Path("broken.yaml").write_text("a: [")
    assert any(problem.startswith(message) for problem in problems_of(*words.split()))
    assert (
        launch("--cfg", "job", "config=list.yaml").returncode == 2
        if words == "config=list.yaml"
        else True
    )


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "seed: 77\n", "model: {name: cnn}\n", "- 1\n"])
def test_checkpoint_overrides_its_config_file(text: str | None, tmp_path: Path) -> None:
    words = [
        "model=mlp",
        "train.epochs=2",
        "data._target_=torchvision.datasets.FakeData",
        "+data.size={1:2}",
    ]
    checkpoint_of(tmp_path / "run", *words)
    accepted(*words, "run_dir=run")  # a mapping whose keys are numbers is another one in JSON
    (
        (tmp_path / "run" / FILE).unlink(missing_ok=True)
        if text is None
        else (tmp_path / "run" / FILE).write_text(text)
    )
    accepted(*words, "run_dir=run")
    assert problems_of(
        *words, "run_dir=run", "seed=5", "optimizer=adam", "train.global_batch_size=48"
    ) == [
        f"{key}={now}: the run in run_dir=run has {key}={then}; use {key}={then}; for a new run use run_dir=run_new"
        for key, now, then in (
            ("seed", 5, 0),
            ("optimizer", "adam", "sgd"),
            ("train.global_batch_size", 48, 96),
        )
    ]
    (problem,) = problems_of("mode=evaluate", "checkpoint.resume=run", "run_dir=run")
    assert "holds a training run" in problem


@pytest.mark.slow
def test_keys_may_change_on_a_resume_as_the_page_says(tmp_path: Path) -> None:
    """docs/guides/checkpoints.md has them in a table."""
    words = ["model=mlp", "run_dir=run"]
    checkpoint_of(tmp_path / "run", *words)
    accepted(
        *words,
        "train.accumulation_steps=2",
        "train.epochs=9",
        "optimizer.lr=0.01",
        "optimizer.momentum=0.5",
        "schedule=constant",
        "task=classification",
        "task.label_smoothing=0.1",
        "checkpoint.keep=9",
        "launch.nproc_per_node=3",
        "data.placement=host",
        "tuning.precision=bf16",
        "strategy.bucket_cap_mb=5",
    )
    for change in (
        "train.global_batch_size=48",
        "optimizer=adamw",
        "optimizer.decay_norm_and_bias=false",
        "optimizer.groups=[{match:layers.0.*,lr:0.01}]",
        "seed=5",
        "model.hidden=32",
        "model.freeze=[layers.0.*]",
        "data.validation=0.1",
        "data.mixup=0.2",
        "strategy=ordered",
    ):
        problems = problems_of(*words, change)
        assert problems, change
        assert all("the run in run_dir=run has" in problem for problem in problems), problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        [],
        5,
        {"step": 10},
        {"step": "x", "config": {}},
        {"step": 10, "config": []},
        {"step": 10, "config": {"data": [], "train": 5, "seed": {}}},
    ],
)
def test_a_manifest_of_odd_content_is_no_traceback(content: Any, tmp_path: Path) -> None:
    place = checkpoint_of(tmp_path / "run", "model=mlp")
    if isinstance(content, dict):
        write_manifest(place, content)
    else:
        (place / "manifest.json").write_text(json.dumps(content))
    for words in (
        ["run_dir=run"],
        ["run_dir=two", "checkpoint.resume=run"],
        ["mode=evaluate", "checkpoint.resume=run"],
    ):
        read_run(PROGRAM, read_overrides(PROGRAM, words))
        with contextlib.suppress(ConfigError):
            accepted("model=mlp", *words)
    (place / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    accepted("model=mlp", "run_dir=run")


@pytest.mark.slow
def test_a_run_goes_on_wherever_its_data_are_held(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", "model=mlp")
    machine = Hardware(cpus=2)
    for word in ("tuning.num_workers=2", "data.placement=host", "data.placement=device"):
        asked = composed("run_dir=run", "model=mlp", word)
        assert check(RequestedRun(asked, resolve(asked, machine, None), machine, None)) == []


@pytest.mark.slow
def test_a_run_keeps_its_decoder_and_an_evaluation_has_its_own(tmp_path: Path) -> None:
    words = ["data=image_folder", "data.root=images"]
    for split in ("train", "val"):
        (tmp_path / "images" / split / "a").mkdir(parents=True)
    checkpoint_of(tmp_path / "run", *words, "data.decode=pil")
    again, _ = read_run(PROGRAM, read_overrides(PROGRAM, ["run_dir=run", *words]))
    anew, _ = read_run(
        PROGRAM, read_overrides(PROGRAM, ["run_dir=run", "checkpoint.resume=never", *words])
    )
    evaluation, _ = read_run(
        PROGRAM, read_overrides(PROGRAM, ["mode=evaluate", "checkpoint.resume=run"])
    )
    assert [config.data.decode for config in (again, anew, evaluation)] == ["pil", "auto", "auto"]
    assert evaluation.data.name == "image_folder"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", "run/checkpoints/step_00000010"])
def test_evaluation_adopts_model_and_data_of_checkpoint(place: str, tmp_path: Path) -> None:
    words = [
        "model._target_=torch.nn.Linear",
        "model.in_features=64",
        "data=synthetic",
        "data.samples=100",
    ]
    checkpoint_of(tmp_path / "run", *words)
    (note,) = prepare(
        PROGRAM,
        ["mode=evaluate", f"checkpoint.resume={place}", "run_dir=noted", "experiment=mnist"],
        None,
    ).notices
    assert note.startswith(
        "experiment=mnist with mode=evaluate: model, task, data and metrics come from the check"
    )
    config = prepare(
        PROGRAM, ["mode=evaluate", f"checkpoint.resume={place}", "run_dir=out"], None
    ).config
    assert (config.model.target, config.model.arguments) == ("torch.nn.Linear", {"in_features": 64})
    assert (config.data.name, config.data.samples) == ("synthetic", 100)
    other = prepare(
        PROGRAM, ["mode=evaluate", f"checkpoint.resume={place}", "run_dir=out", "model=mlp"], None
    ).config
    assert (other.model.name, other.data.samples) == ("mlp", 100)


@pytest.mark.slow
def test_an_evaluation_may_change_a_key_of_the_data_it_adopts(tmp_path: Path) -> None:
    checkpoint_of(
        tmp_path / "run", "data=synthetic", "model._target_=torch.nn.Linear", "model.in_features=64"
    )
    words = ["mode=evaluate", "checkpoint.resume=run", "run_dir=out"]
    config = prepare(PROGRAM, [*words, "data.samples=1600", "model.out_features=3"], None).config
    assert config.data.samples == 1600
    assert config.model.arguments == {"in_features": 64, "out_features": 3}
    (problem,) = problems_of(*words, "data.augment=true")
    assert problem.startswith("data.augment=true: no such key in data=synthetic; ")


def test_a_preset_is_no_config_of_a_run() -> None:
    preset = (
        "# @package _global_\ndefaults: [override /optimizer: adam]\nmodel: {}\ndata:"
        " {}\noptimizer: {}\ntrain: {}\n"
    )
    program = own_presets(experiment__mine=preset)
    Path("mine.yaml").write_text(preset)
    for file, first in (
        ("conf/experiment/mine.yaml", ""),
        ("mine.yaml", "move it to conf/experiment/, and "),
    ):
        _, problems = read_config(program, read_overrides(program, [f"config={file}"]))
        assert problems == [f"config={file}: is a preset; {first}choose it by experiment=mine"]


@pytest.mark.slow
def test_resume_keeps_the_strategy_and_places_anew(tmp_path: Path) -> None:
    words = ["model=mlp", "data.limit=200", "train.global_batch_size=48", "run_dir=run"]
    ordered = [*words, "strategy=ordered", "launch.nproc_per_node=2"]
    config = prepare(PROGRAM, [*ordered, "data.placement=host"], None)
    assert config.lock
    config.lock.release()
    place = tmp_path / "run" / "checkpoints" / "step_00000006"
    place.mkdir(parents=True)
    write_manifest(place, {"step": 6, "config": yaml.safe_load(config.text)})
    prepared = prepare(PROGRAM, ordered, None)
    assert prepared.lock
    prepared.lock.release()
    (problem,) = problems_of(*words)
    assert (
        problem
        == "strategy=ddp: the run in run_dir=run has strategy=ordered; use strategy=ordered; for a new run use run_dir=run_new"
    )
    evaluation = prepare(
        PROGRAM, ["mode=evaluate", "checkpoint.resume=run", "run_dir=out"], None
    ).config
    assert (evaluation.model.name, evaluation.data.limit, evaluation.data.placement) == (
        "mlp",
        200,
        "device",
    )
