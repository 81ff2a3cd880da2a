"""The configuration: every file composes, every mistake is named, what was frozen comes back, and
no mistake costs more than reading its message: no worker, no import of torch, no file."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import pty
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddp_train import __version__
from ddp_train.assembly.plan import build_plan, warmup_steps
from ddp_train.checkpoints.layout import digest_of
from ddp_train.commands.flags import suggestion_for
from ddp_train.commands.help import usage, wrapped
from ddp_train.config import host_checks
from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.config.composition import compose_options, read_config
from ddp_train.config.freeze import FILE, freeze, load_frozen
from ddp_train.config.keys import all_keys
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare, read_run
from ddp_train.config.program import Program, find_program
from ddp_train.config.validate import check, check_rules
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import Code, CustomModelConfig, CustomOption
from ddp_train.options.registry import OPTIONS, TRACKERS
from ddp_train.options.schema import SECTIONS, Config, RequestedRun, schema_of
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from ddp_train.sweeps.outcomes import completed_outcome
from ddp_train.sweeps.plan import SweepPlan, plan_sweep
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.sweep import finish
from ddp_train.sweeps.sweep_state import SweepState
from ddp_train.tasks.builtin import Classification
from ddp_train.telemetry.pages import page
from ddp_train.text import shown
from tests.support.commands import PROGRAM, run

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "ddp_train/conf"
FILES = sorted(
    path.relative_to(CONF).with_suffix("").as_posix()
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "study"  # not composed into a run: tests/laboratory/test_study.py
)
WHOLE_RUNS = ("experiment", "debug")
SEVERAL = ("tracker",)
"""Groups whose options are added to each other; what they have in common is in the main file."""
CPU = Hardware(cpus=2)


@pytest.fixture(autouse=True)
def no_gpu_and_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", ""
    )  # the messages are those of a host without GPUs, wherever we run
    monkeypatch.chdir(tmp_path)


def composed(*words: str) -> Config:
    """The config of some words; they are right."""
    config, problems = read_config(PROGRAM, read_overrides(PROGRAM, list(words)))
    assert problems == []
    return config


COMPOSED: dict[str, Any] = {}


def composed_once(program: Program, arguments: list[str]) -> Any:
    """In place of `compose_options`, which takes 0.2 s: Hydra composes each choice once."""
    key = shlex.join(arguments)
    COMPOSED[key] = COMPOSED.get(key) or compose_options(program, arguments)
    return copy.deepcopy(COMPOSED[key])


def problems_of(*words: str) -> list[str]:
    """The problems that the entry reports for some words; they are wrong."""
    with (
        mock.patch("ddp_train.config.composition.compose_options", composed_once),
        pytest.raises(ConfigError) as caught,
    ):
        prepare(PROGRAM, list(words), None)
    return caught.value.problems


def accepted(*words: str) -> None:
    """Prepares a run, which may use its directory again."""
    prepared = prepare(PROGRAM, list(words), None)
    assert prepared.lock
    prepared.lock.release()


def launch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, in the current folder."""
    return run(*words, cwd=Path.cwd(), env=env)


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_file_composes_and_keeps_the_rules(name: str) -> None:
    group, option = name.split("/")
    words = [f"{group}={option}"]
    if option == "custom":
        words.append(f"{group}._target_=torch.nn.Linear")
    config = composed(*words)
    assert check_rules(config) == []
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    if group in SEVERAL:
        assert vars(getattr(config, group)).items() >= content.items()
        return
    assert group in WHOLE_RUNS or getattr(config, group).name == content["name"]


@pytest.mark.parametrize("name", [name for name in FILES if name.split("/")[0] in WHOLE_RUNS])
def test_a_whole_run_means_what_its_file_says(name: str) -> None:
    config = composed(name.replace("/", "="))
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    for override in content.pop("defaults", []):
        ((key, option),) = override.items()
        group = key.removeprefix("override /")
        named = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())[
            "name"
        ]  # resnet50 is a torchvision
        assert getattr(config, group).name == named
    for key, value in content.items():
        section = getattr(config, key)
        if isinstance(section, CustomOption):
            own = {"_target_": section.target, **section.arguments}
        else:
            own = {}
        for field, expected in value.items() if isinstance(value, dict) else [("", value)]:
            assert own.get(field, getattr(section, field, section)) == expected, f"{key}.{field}"


@pytest.mark.slow
@pytest.mark.parametrize("section", OPTIONS)
def test_a_chosen_option_has_the_defaults_of_its_schema(section: str) -> None:
    for option, schema in OPTIONS[section].items():
        if issubclass(schema, CustomOption):
            target = [f"{section}._target_=torch.nn.Linear"]
        else:
            target = []
        expected = dataclasses.replace(
            schema(), **({"target": "torch.nn.Linear"} if target else {})
        )
        assert getattr(composed(*(target or [f"{section}={option}"])), section) == expected


def test_the_main_file_has_the_defaults_of_the_schema() -> None:
    assert composed() == Config()
    assert set(yaml.safe_load((CONF / "config.yaml").read_text())) == {"defaults", "hydra"}


def test_files_hold_only_what_they_change() -> None:
    for name in FILES:
        group, _ = name.split("/")
        if group in (*WHOLE_RUNS, *SEVERAL):
            continue
        content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        schema = schema_of(group, content.pop("name"))
        assert schema, name
        defaults = dataclasses.asdict(schema())
        content.pop("_target_", None)  # data=shards is a class by its path
        assert content.keys() <= defaults.keys(), name
        repeated = {key for key, value in content.items() if value == defaults[key]}
        assert not repeated - {"arch"}, name  # model=resnet18 says what it is


def test_every_option_has_its_file() -> None:
    for section, options in OPTIONS.items():
        assert set(options) <= {path.stem for path in (CONF / section).glob("*.yaml")}
    trackers = {path.stem for path in (CONF / "tracker").glob("*.yaml")}
    assert trackers == {"none", *TRACKERS}
    for name, tracker in TRACKERS.items():
        path = f"{tracker.__module__}.{tracker.__name__}"
        assert composed(f"tracker={name}").tracker.classes == {name: {"_target_": path}}


# --- mistakes -------------------------------------------------------------------------------------

REFUSED = "must be one of"
BAD: dict[str, list[str]] = {
    # keys that do not exist
    "optimizer.momentun=0.1": ["no such key; did you mean optimizer.momentum?"],
    "++optimizer.momentun=0.1": [
        "optimizer.momentun=0.1: no such key; did you mean optimizer.momentum?"
    ],
    "+foo=1": ["foo=1: no such key"],
    "foo.bar=1": ["foo.bar=1: no such key"],
    "tarin.epochs=3": ["tarin.epochs=3: no such key; did you mean train"],
    "fooo.api_key=hunter2": ["fooo.api_key=(hidden): no such key"],
    "+model=mlp": ["+model=mlp: model has a value already; use model=mlp"],
    "optimizer={lr:0.1}": ["optimizer={lr:0.1}: set one key: optimizer.lr=0.1"],
    "launch.rdzv_endpoint=foo": ["has an effect only with several hosts"],
    "train.epoch=3": ["did you mean train.epochs?"],
    "launch.nproc=2": ["no such key"],
    "data.rooot=x": ["did you mean data.root?"],
    "schedule.warmup=3": ["did you mean schedule.warmup_steps?"],
    "tuning.num_worker=3": ["did you mean tuning.num_workers?"],
    "checkpoint.evry_steps=3": ["did you mean checkpoint.every_steps?"],
    "strategy.bucket_cap=3": ["did you mean strategy.bucket_cap_mb?"],
    "model.chanels=3": ["did you mean model.channels?"],
    "lr=0.3": ["did you mean optimizer.lr?"],
    "optimizer.betas=0.3": [
        "did you mean optimizer.beta2? optimizer=adam and adamw and lamb and muon have it"
    ],
    "optimizr=adam": ["did you mean optimizer?"],
    "model.hidden=3": [
        "no such key in model=cnn; model=mlp and gelu_mlp have it",
        "channels, norm, dropout",
    ],
    "optimizer.beta1=0.3": [
        "no such key in optimizer=sgd; optimizer=adam and adamw and lamb and muon have it"
    ],
    "schedule.step_size=3": ["no such key in schedule=cosine; schedule=step has it"],
    "strategy=single strategy.sync_bn=true": [
        "strategy.sync_bn=true",
        "no such key in strategy=single",
    ],
    "data.samples=3": ["no such key in data=digits; data=synthetic and linear_regression have it"],
    "model.target=a.b": ["no such key; did you mean model._target_?"],
    "model=custom model.target=a.b": ["the key is model._target_; use model._target_=a.b"],
    "hydra.verbose=false": ["Hydra's own keys act on sweeps only; add -m, or leave it out"],
    "hydra/sweeper=optuna": ["Hydra's own keys act on sweeps only; add -m, or leave it out"],
    "schedule._target_=a.b": ["schedule._target_=a.b", "no such key"],
    "train._target_=a.b": ["train._target_=a.b", "no such key"],
    # options that do not exist
    "optimizer=AdamW": [REFUSED, "did you mean adamw?"],
    "model=Resnet50": [REFUSED, "did you mean resnet50?"],
    "tracker=wandb,tensorboard": [
        "for several at once, use tracker=[wandb,tensorboard]; for a sweep, add -m"
    ],
    "optimizer=admw": [REFUSED, "did you mean adamw?"],
    "optimizer=lbfgs": [REFUSED],
    "model=my_pkg.Net": [REFUSED, "for your own class use model._target_=my_pkg.Net"],
    "model={_target_:my_pkg.Net}": [REFUSED, "for your own class use model._target_=my_pkg.Net"],
    "model=resnet51": [REFUSED, "did you mean resnet50?"],
    "data=mnst": [REFUSED, "did you mean mnist?"],
    "schedule=cosin": [REFUSED, "did you mean cosine?"],
    "strategy=ddpp": [REFUSED, "ddp, dp, ordered, single", "did you mean ddp?"],
    "tuning=recomended": [REFUSED, "did you mean recommended?"],
    "experiment=minst": [REFUSED, "did you mean mnist?"],
    "debug=tny": [REFUSED, "did you mean tiny?"],
    "optimizer=null": [REFUSED],
    "model=": [REFUSED],
    "model=[cnn,mlp]": [REFUSED],
    "optimizer.name=adam": ["optimizer=adam"],
    "strategy.name=dp": ["strategy=dp"],
    "tuning.name=mine": ["tuning=mine"],
    # words that are no override
    "train.epochs": ["train.epochs: not of the form key=value, '=' is missing"],
    "inti": ["inti: not of the form key=value, '=' is missing; did you mean init?"],
    "expermient=base": ["expermient=base: no such key; did you mean experiment?"],
    "run_dir=~/x": ["run_dir=~/x: no shell expands ~ there; use run_dir=$HOME/x"],
    "run_dir=/a/x=y": ["the value needs quotes; use \"run_dir='/a/x=y'\""],
    "run_dir=/a;b": ["the value needs quotes; use \"run_dir='/a;b'\""],
    "seed=${oc.decode:${oc.env:X}}": [
        "the value needs quotes; use 'seed=\"${oc.decode:${oc.env:X}}\"'"
    ],
    "=3": ["not of the form key=value"],
    "train.epochs=[": ["not of the form key=value, ']' is missing at its end"],
    "optimizer.betas=[0.9,0.99": ["not of the form key=value, ']' is missing at its end"],
    "optimizer.betas=[0.9,": [
        "']' is missing at its end; put quotes around a word with spaces, for the shell"
    ],
    "hooks=[{_target_:a.b]": ["'}' is missing before ']'"],
    "hooks=[a]]": ["']' closes nothing"],
    "name='abc": ["a quote is never closed"],
    "optimizer.lr=0.1,0.2": ["several values; add -m"],
    "optimizer=sgd,adam": ["several values; add -m"],
    "train.epochs=range(1,4)": ["several values; add -m"],
    "optimizer.lr=${sed}": ["optimizer.lr", "'sed' not found"],
    # values of the wrong type
    "train.epochs=": ["must be a whole number"],
    "train.epochs=ten": ["must be a whole number"],
    "train.epochs=1.5": ["must be a whole number"],
    "train.epochs=true": ["must be a whole number"],
    "train.epochs=[1,2]": ["must be a whole number"],
    "train.epochs=null": ["must be a whole number"],
    "train.max_steps=1.5": ["must be a whole number or null"],
    "launch.nproc_per_node=1.5": ["must be a whole number or auto"],
    "launch.nproc_per_node=many": ["must be a whole number or auto"],
    "launch.threads_per_process=many": ["must be a whole number or auto"],
    "tuning.num_workers=many": ["must be a whole number or auto"],
    "tuning.pin_memory=maybe": ["must be true, false or auto"],
    "deterministic=maybe": ["must be true, false or auto"],
    "optimizer.nesterov=maybe": ["must be true or false"],
    "optimizer.nesterov=3": ["must be true or false"],
    "optimizer.lr=fast": ["must be a number"],
    "optimizer.lr=null": ["must be a number"],
    "optimizer.lr=true": ["must be a number"],
    "seed=abc": ["must be a whole number"],
    "name=null": ["must be text"],
    "trusted_modules=foo": ["must be a list like [a,b]"],
    "trusted_modules={a:1}": ["trusted_modules={a:1}: must be a list like [a,b]"],
    "hooks={a:1}": [
        "hooks={a:1}: must be a list like [package.Name] or [{_target_: package.Name, argument: 1}]"
    ],
    "hooks.a=1": ["hooks.a=1: hooks must be a list like [package.Name]"],
    "hooks=[ddp_lab.study.step_times.StepTimes] hooks.a=1": [
        "hooks.a=1: hooks must be a list like [package.Name]"
    ],
    "hooks.0=a.b": ["the list has no such item; give it whole"],
    "metrics={a:1}": ["metrics={a:1}: must be a list like [{_target_: package.Name"],
    "optimizer.groups={a:1}": ["must be a list like [{match: head.*, lr: 0.01}]"],
    "data._target_=torch.a data.fields.a=1": [
        "data.fields.a=1: data.fields must be a list like [a,b]"
    ],
    "strategy.bucket_cap_mb_list=3": ["must be a list like [a,b] or null"],
    "train=3": ["is a section; set one of its keys, train.global_batch_size=..."],
    "train=5 train.max_steps=3": [
        "train=5: is a section; set one of its keys, train.global_batch_size=..."
    ],
    "train.max_steps=3 train=[1,2]": [
        "is a section; set one of its keys, train.global_batch_size=..."
    ],
    "train.early_stopping=[5]": [
        "is a section; set one of its keys, train.early_stopping.patience=..."
    ],
    "train.early_stopping.patience=2 train.early_stopping=5": ["is a section; set one of its keys"],
    "launch=null": ["is a section; set one of its keys, launch.nproc_per_node=..."],
    # numbers out of range, words out of choice
    "train.epochs=0": ["must be at least 1"],
    "train.epochs=-1": ["must be at least 1"],
    "seed=-1": ["must be at least 0"],
    "seed=9223372036854775808": ["must be below 9223372036854775808"],
    "optimizer.lr=0": ["must be above 0"],
    "optimizer.lr=nan": ["must be a finite number"],
    "optimizer.lr=inf": ["must be a finite number"],
    "optimizer.momentum=1": ["must be below 1"],
    "optimizer.weight_decay=-1": ["must be at least 0"],
    "strategy.bucket_cap_mb=0": ["must be above 0"],
    "strategy.bucket_cap_mb_list=[1,0]": ["must be above 0"],
    "strategy.bucket_cap_mb_list=[1,nan]": ["must be a finite number"],
    "strategy.comm_hook=fp8": [REFUSED, "none, fp16, bf16, powersgd"],
    "launch.backend=mpi": [REFUSED, "auto, nccl, gloo"],
    "launch.nproc_per_node=0": ["must be at least 1"],
    "launch.max_restarts=-1": ["must be at least 0"],
    "launch.timeout_seconds=0": ["must be above 0"],
    "launch.join_timeout_seconds=0": ["must be at least 1"],
    "launch.timeout_seconds=1e300": ["must be at most"],  # timedelta overflows in the workers
    "train.max_grad_norm=0": ["must be above 0"],
    "task=classification task.label_smoothing=1": ["must be below 1"],
    "task=regression task.loss=hinge": [REFUSED, "mse, mae, huber, smooth_l1"],
    "task=clasification": [REFUSED, "did you mean classification?"],
    "task.label_smoothing=0.1": ["task=auto", "task=classification has it"],
    "tuning.precision=fp8": [REFUSED, "auto, fp32, bf16, fp16, fp64"],
    "tuning.num_workers=-1": ["must be at least 0"],
    "tuning.prefetch_factor=0": ["must be at least 1"],
    "tuning.prefetch_factor=1000000000": ["must be at most 10000"],
    "checkpoint.keep=0": ["must be at least 1"],
    "schedule=step schedule.gamma=1.5": ["schedule.gamma=1.5", "must be at most 1"],
    "schedule=one_cycle schedule.pct_start=1": ["schedule.pct_start=1", "must be below 1"],
    "data=synthetic data.classes=1": ["data.classes=1", "must be at least 2"],
    "model.norm=layer": [REFUSED, "none, batch, group"],
    "mode=trian": [REFUSED, "did you mean train?"],
    "optimizer.lr_scaling=auto": [REFUSED, "none, linear, sqrt"],
    "schedule.warmup_epochs=0": ["must be above 0"],
    "objective=accuracy": [REFUSED, "did you mean test.accuracy?"],
    "device=gpu": [REFUSED, "auto, cuda, cpu"],
    # contradictions
    "launch.backend=nccl": ["no GPU is visible", "use launch.backend=gloo"],
    "device=cuda": ["no GPU is visible on this host; use device=cpu"],
    "tuning.precision=fp16": ["needs a GPU; use tuning.precision=bf16 or fp32"],
    "train.global_batch_size=97": [
        "2 processes x 1 accumulation step;",
        "96 or 98, or a range, launch.nproc_per_node=1:2,",
    ],
    "launch.nproc_per_node=8 train.global_batch_size=3": [
        "global_batch_size=3",
        "use train.global_batch_size=8",
    ],
    "train.accumulation_steps=3 train.global_batch_size=100": [
        "2 processes x 3 accumulation steps",
        "96 or 102",
    ],
    "launch.nproc_per_node=2 strategy=dp": [
        "strategy=dp: runs in one process, and 2 were asked for; use strategy=ddp"
    ],
    "launch.nproc_per_node=2 strategy=single": [
        "strategy=single: runs in one process",
        "launch.nproc_per_node=1",
    ],
    "optimizer.momentum=0 optimizer.nesterov=true": [
        "nesterov=true: needs optimizer.momentum above 0"
    ],
    "train.max_steps=10 schedule.warmup_steps=10": [
        "schedule.warmup_steps=10",
        "train.max_steps=10; use less than 10",
    ],
    "train.epochs=3 schedule.warmup_epochs=3": [
        "must end before the run, which has train.epochs=3; use less than 3"
    ],
    "schedule.warmup_steps=9 schedule.warmup_epochs=1": [
        "contradicts schedule.warmup_steps=9; give one of them"
    ],
    "optimizer.lr_base_batch=512": ["only with optimizer.lr_scaling=linear or sqrt"],
    "optimizer=adadelta tuning.optimizer=fused": [
        "no fused adadelta; use tuning.optimizer=foreach"
    ],
    "strategy.bucket_cap_mb=1 strategy.bucket_cap_mb_list=[1,2]": [
        "contradicts strategy.bucket_cap_mb=1"
    ],
    "tuning.buckets=large strategy.bucket_cap_mb=5": [
        "contradicts tuning.buckets=large; give one of them"
    ],
    "tuning.buckets=by_flops strategy.bucket_cap_mb=5": [
        "contradicts tuning.buckets=by_flops; give one of them"
    ],
    "tuning.buckets=one strategy.bucket_cap_mb_list=[]": [
        "contradicts tuning.buckets=one; give one of them"
    ],
    "strategy.powersgd_rank=2": ["only with strategy.comm_hook=powersgd"],
    "strategy.static_graph=true strategy.comm_hook=powersgd": ["use strategy.static_graph=false"],
    "strategy.static_graph=true strategy.find_unused_parameters=true": ["give one of them"],
    "train.accumulation_steps=2 strategy.static_graph=true": [
        "train.accumulation_steps=2; use strategy.static_graph=f"
    ],
    "strategy.skip_all_reduce_unused_params=true": ["needs strategy.find_unused_parameters=true"],
    "tuning.precision=fp64 strategy.comm_hook=fp16": ["would undo tuning.precision=fp64"],
    "reasons.compile=mine": ["reasons.compile=mine: no such key"],
    "data=image_folder data.decode=threads": [REFUSED, "auto, pil, processes, gpu"],
    "strategy=sorted": [REFUSED, "ordered"],
    "strategy.virtual_shards=4": ["no such key in strategy=ddp; strategy=ordered has it"],
    "strategy=ordered strategy.sync_bn=true": [
        "no such key in strategy=ordered; strategy=ddp has it"
    ],
    "strategy=ordered strategy.virtual_shards=6": ["must be a power of two; use 4 or 8"],
    "strategy=ordered launch.nproc_per_node=3": [
        "8 virtual shards evenly among 3",
        "a power of two up to 8",
    ],
    "strategy=ordered launch.nproc_per_node=16": ["16 processes; use strategy.virtual_shards=16"],
    "strategy=ordered train.global_batch_size=50": [
        "over 8 virtual shards; use train.global_batch_size=48 or 56"
    ],
    "strategy=ordered train.accumulation_steps=2": [
        "needs train.accumulation_steps=1; raise strategy.virtual_shards"
    ],
    "strategy=ordered deterministic=false": ["needs deterministic=true"],
    "strategy=ordered launch.threads_per_process=2": ["needs launch.threads_per_process=1"],
    "strategy=ordered tuning.compile=true": ["needs tuning.compile=false"],
    "strategy=dp tuning.compile=true": ["tuning.compile=true: DataParallel's replicas"],
    "tuning.compile_mode=fast": [
        REFUSED,
        "default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs",
    ],
    "train.accumulation_steps=2 tuning.compile=true tuning.compile_mode=reduce-overhead": [
        "overwrite gradients that are still being accumulated",
        "or train.accumulation_steps=1",
    ],
    "tuning.activation_checkpointing=Bottleneck": ["must be a list"],
    "strategy=ordered model=gelu_mlp model.fused=true": ["needs model.fused=false"],
    "deterministic=true tuning.cudnn_benchmark=true": ["which deterministic=true forbids"],
    "data=linear_regression": ["model=cnn: needs images", "use model=linear_regression or mlp"],
    "experiment=linear_regression task=classification": [
        "has numbers as targets",
        "use task=regression",
    ],
    "experiment=linear_regression objective=test.accuracy": ["no classes; use objective=test.loss"],
    "task=regression": ["data=digits has class labels", "use task=classification"],
    "run_dir=here launch.nnodes=2": ["add launch.rdzv_endpoint=HOST:PORT"],
    "launch.rdzv_endpoint=host:29500": ["add launch.nnodes=2, or leave it out"],
    "launch.nnodes=2 launch.rdzv_endpoint=host:29500": ["add run_dir=PATH on a shared file system"],
    "run_dir=here launch.nnodes=2 launch.rdzv_endpoint=host": ["must be HOST:PORT"],
    "model=mlp model._target_=torch.nn.Linear": ["model._target_=torch.nn.Linear", "model=mlp"],
    # what lies outside the config
    "data=mnist data.root=empty": ["data.root=empty", "is missing; add data.download=true"],
    "data=cifar10 data.root=empty": ["empty/cifar-10-batches-py/data_batch_1 is missing"],
    "data=image_folder data.decode=gpu": [
        "data.decode=gpu: needs a GPU; use data.decode=processes"
    ],
    "data=image_folder data.root=nowhere": ["nowhere/train must hold a folder per class"],
    "model=resnet50 model.arch=resnet_50": ["no classifier of that name; did you mean resnet50?"],
    "checkpoint.resume=/nowhere": ["no such folder; use auto, never, or the path"],
    "checkpoint.resume=.": ["holds no checkpoint; use the path of a run or a checkpoint"],
    "mode=evaluate checkpoint.resume=.": ["holds no checkpoint"],
    "checkpoint.resume=": ["must not be empty"],
    "mode=evaluate": ["needs a checkpoint", "add checkpoint.resume=PATH"],
    "mode=evaluate checkpoint.resume=never": ["needs a checkpoint", "add checkpoint.resume=PATH"],
    "mode=evaluate checkpoint.resume=/nowhere": ["no such folder"],
    "run_dir=/etc/passwd/x": [
        "cannot be written (/etc/passwd is not a folder); name a folder that can"
    ],
    "run_dir=": ["must not be empty"],
    "name=a/b": ["must be usable as the name of a folder"],
    "model._target_=torch": ["must be a dotted path, package.Name"],
    "model._target_=torch.nn..Linear": ["must be a dotted path, package.Name"],
    "optimizer._target_=nosuch.Thing": ["no module nosuch in"],
    "hooks=[nosuch.Hook]": ["no module nosuch in"],
    "hooks=[{every:5}]": ["hooks[0]._target_=: must be a dotted path, package.Name"],
    "hooks=[{_target_:nosuch.Hook,every:5}]": [
        "hooks[0]._target_=nosuch.Hook: no module nosuch in"
    ],
    "hooks=[{_target_:json.JSONDecoder,api_key:abc}]": [
        "hooks[0].api_key=(hidden): the config is written to files"
    ],
    "hooks=[nosuch]": ["must be a dotted path, package.Name"],
    "tuning.optimizer=foreach optimizer._target_=torch.optim.NAdam": [
        "has no effect",
        "optimizer.foreach=true",
    ],
    "model=custom": ["model._target_=null: must be a dotted path"],
    "hydra.sweeper._target_=os.system": ["loads code from outside hydra: os.system"],
    "train.token=hunter2": ["train.token=(hidden): no such key"],
}
"""Command lines with one mistake, and what the one line about it must say besides the key and the
value."""

STARTS = {
    "train=5 train.max_steps=3": "train=5",
    "fooo.api_key=hunter2": "fooo.api_key=(hidden)",
    "+model=mlp": "+model=mlp",
    "train.token=hunter2": "train.token=(hidden)",
    "model=custom": "model._target_=null",
    "tuning.optimizer=foreach optimizer._target_=torch.optim.NAdam": "tuning.optimizer=foreach",
    "model=custom model.target=a.b": "model.target=a.b",
    "optimizer.lr=${sed}": "optimizer.lr",
    "strategy.bucket_cap_mb_list=[1,0]": "strategy.bucket_cap_mb_list=[1.0,0.0]",
    "strategy.bucket_cap_mb_list=[1,nan]": "strategy.bucket_cap_mb_list=[1.0,nan]",
    "strategy.bucket_cap_mb=1 strategy.bucket_cap_mb_list=[1,2]": (
        "strategy.bucket_cap_mb_list=[1.0,2.0]"
    ),
    "tuning.buckets=one strategy.bucket_cap_mb_list=[]": "strategy.bucket_cap_mb_list=[]",
    "tuning.buckets=large strategy.bucket_cap_mb=5": "strategy.bucket_cap_mb=5.0",
    "launch.timeout_seconds=1e300": "launch.timeout_seconds=1e+300",
    "data=linear_regression": "model=cnn",
    "launch.nnodes=2 launch.rdzv_endpoint=host:29500": "launch.nnodes=2",
    "mode=evaluate checkpoint.resume=never": "mode=evaluate",
    "hooks=[{every:5}]": "hooks[0]._target_=",
    "hooks=[{_target_:nosuch.Hook,every:5}]": "hooks[0]._target_=nosuch.Hook",
    "hooks=[{_target_:json.JSONDecoder,api_key:abc}]": "hooks[0].api_key=(hidden)",
}
"""Where the message does not begin with the last word as it was typed."""


@pytest.mark.parametrize("line", BAD)
def test_one_mistake_is_one_message(line: str, tmp_path: Path) -> None:
    problems = problems_of(*line.split(" "))
    assert len(problems) == 1, problems
    (problem,) = problems
    assert "\n" not in problem
    assert problem.startswith(STARTS.get(line, line.split(" ")[-1].lstrip("+")))
    for expected in BAD[line]:
        assert expected in problem
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key", ["train.epochs", "mode", "train.early_stopping", "train.foo", "strategy.comm_hook"]
)
def test_wrong_environment_value_is_shown_as_typed(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    (problem,) = problems_of(f"{key}=${{oc.env:MY_SECRET}}")
    assert problem.startswith(f"{key}=${{oc.env:MY_SECRET}}: ") and "hunter2" not in problem


def test_a_mirror_without_its_package_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ImportError("Install s3fs to access S3")
    missing.__cause__ = ModuleNotFoundError("No module named 's3fs'", name="s3fs")
    monkeypatch.setattr("fsspec.get_filesystem_class", mock.Mock(side_effect=missing))
    (problem,) = problems_of("checkpoint.mirror=s3://x/y")
    assert problem.startswith("checkpoint.mirror=s3://x/y: needs the package s3fs; run ")
    assert problem.endswith(" -m pip install s3fs")


@pytest.mark.parametrize(
    ("run_dir", "what"), [("/", "root"), ("~", "home"), (".", "working"), ("a/..", "working")]
)
def test_a_run_fills_no_folder_that_is_another_ones(
    run_dir: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/mine").mkdir(parents=True)
    given = run_dir.replace("~", str(tmp_path / "home"))
    (problem,) = problems_of(f"run_dir={given}")
    assert (
        f"run_dir={given}: a run would put its files into the {what} folder; name one of its own,"
        " run_dir=" in problem
    )


def test_run_begins_and_resumes_in_an_empty_folder(tmp_path: Path) -> None:
    accepted("run_dir=.", "model=mlp")
    assert (tmp_path / "config.yaml").exists()
    accepted("run_dir=.", "model=mlp")


def test_values_from_the_environment_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    words = (
        "train.max_steps=${oc.env:STEPS}",
        "optimizer.groups=[{match:a,lr:${oc.env:STEPS}}]",
        "seed=${oc.env:NO,3}",
    )
    config = composed(
        *words, "data.image_size=${oc.env:STEPS}", "data=synthetic", "name=${oc.env:STEPS}"
    )
    assert (config.train.max_steps, config.seed, config.data.image_size, config.name) == (
        7,
        3,
        7,
        "7",
    )
    assert config.optimizer.groups == [{"match": "a", "lr": "7"}]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    words = [
        "optimizer.momentun=0.1",
        "model=resnet51",
        "train.epochs=ten",
        "data.limit=0",
        "foo=1",
        "seed=-1",
    ]
    problems = problems_of(*words)
    assert sorted(problem.split(":")[0] for problem in problems) == sorted(words)
    with pytest.raises(ConfigError, match=r"^6 problems in the configuration:\n  - "):
        prepare(PROGRAM, words, None)
    assert list(tmp_path.iterdir()) == []


def test_contradictions_are_reported_together() -> None:
    words = [
        "launch.backend=nccl",
        "train.global_batch_size=97",
        "tuning.precision=fp16",
        "optimizer.nesterov=true",
    ]
    problems = problems_of(*words, "optimizer.momentum=0", "data=mnist", "data.root=empty")
    named = [problem.split(":")[0] for problem in problems]
    assert sorted(named) == sorted([*words, "data.root=empty"])


@pytest.mark.slow
def test_torch_is_not_imported_to_find_mistakes(tmp_path: Path) -> None:
    lines = [
        "optimizer.momentun=0.1",
        "device=cuda",
        "model._target_=nosuch.Thing",
        "strategy=ordered strategy.sync_bn=true",
        "model=resnet50 model.arch=resnet_50",
        "data=mnist data.root=empty",
        "checkpoint.resume=/nowhere",
    ]
    code = (
        "import sys\n"
        "from ddp_train.config.prepare import prepare\n"
        "from ddp_train.config.program import Program\n"
        "from ddp_train.errors import ConfigError\n"
        f"for line in {lines!r}:\n"
        "    try:\n"
        "        prepare(Program(), line.split(' '), None)\n"
        "        sys.exit(f'{line}: accepted')\n"
        "    except ConfigError:\n"
        "        assert not {'torch', 'torchvision'} & set(sys.modules), line\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "launch.backend=nccl",
        "train.global_batch_size=97",
        "model._target_=nosuch.Thing",
        "train.epochs=0 model=resnet51 foo=1",
        "-m optimizer.lr=0.1,oops",
        "-m launch.nnodes=2",
        "-m optimizer.lr=0.1,0.2 nonsense",
        "--cfg job optimizer.momentun=0.1",
        "--hlep",
        "--resolve",
    ],
)
def test_the_command_refuses_once(line: str, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    done = launch(*line.split(" "), "run_dir=run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    heading, *messages = done.stderr.splitlines()
    assert heading.endswith("in the configuration:")
    assert len(messages) == int(heading.split()[0]) == len(set(messages))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evil.py"
    ]  # no run directory: no worker was started


@pytest.mark.true_command
def test_the_command_refuses_quickly(tmp_path: Path) -> None:
    began = time.monotonic()
    assert launch("optimizer.momentun=0.1").returncode == 2
    assert time.monotonic() - began < 15, "0.7 s on an idle machine: nothing is waited for"
    assert list(tmp_path.iterdir()) == []


def test_trusted_code_is_imported_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_train.config.user_code import instantiate

    (tmp_path / "mine_alone.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\nThing = dict\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "model._target_=mine_alone.Thing",
        "model.size=3",
        "trusted_modules=[mine_alone]",
        "run_dir=run",
    ]
    config = prepare(PROGRAM, words, None).config
    assert config.words_to_resume == "run_dir=run trusted_modules=[mine_alone]", "typed again"
    odd = dataclasses.replace(config, run_dir="a run=(1)", trusted_modules=[])
    assert shlex.split(odd.words_to_resume) == ['run_dir="a run=(1)"'], (
        "as Hydra reads it, behind a shell"
    )
    assert not (tmp_path / "imported").exists()
    assert instantiate("model", config.model) == {"size": 3}
    assert (tmp_path / "imported").exists()
    with pytest.raises(ConfigError, match="mine_alone has no Thin; did you mean Thing"):
        instantiate("model", dataclasses.replace(config.model, target="mine_alone.Thin"))


def test_arguments_are_judged_by_the_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_train.config.user_code import instantiate

    (tmp_path / "mine_broken.py").write_text(
        "Dict, SIZE = dict, 3\nclass Thing:\n    def __init__(self, size):\n        len(size)\n"
    )
    (tmp_path / "mine_lacking.py").write_text("import nosuch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be called with size=1, width=3: .*'width'"):
        instantiate("model", Code(target="mine_broken.Thing", arguments={"size": 1, "width": 3}))
    with pytest.raises(
        ConfigError, match=r"cannot be called with siez=1: .*'size'; did you mean size\?"
    ):
        instantiate("model", Code(target="mine_broken.Thing", arguments={"siez": 1}))
    with pytest.raises(
        ConfigError,
        match=r"model._target_=mine_broken.SIZE: must be a class or function, and is of type int",
    ):
        instantiate("model", Code(target="mine_broken.SIZE"))
    with pytest.raises(TypeError, match="not iterable") as raised:  # dict has no signature
        instantiate("model", Code(target="mine_broken.Dict"), 3)
    assert not raised.value.__context__
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        instantiate("model", Code(target="mine_broken.Thing", arguments={"size": 3}))
    with pytest.raises(ModuleNotFoundError, match="nosuch"):
        instantiate("model", Code(target="mine_lacking.Thing"))
    with pytest.raises(ConfigError, match="No module named 'mine_nowhere'"):
        instantiate("model", Code(target="mine_nowhere.Thing"))


# --- a run that is continued ----------------------------------------------------------------------


HOOKS = """
import contextlib
from elsewhere import Other
raise AssertionError("imported")

def watch(job, run_dir, world): pass

@contextlib.contextmanager
def managed(*_): yield

short = lambda *_: None
SIZE = 3

class Closed:
    def close(self): pass

class Acts:
    def act(self, job): pass

class Whole:
    def __enter__(self): pass
    def __exit__(self, *_): pass

class Derived(Other): pass

def Assigned(): pass
Assigned = Other
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("watch", "a function"),
        ("managed", "a function"),
        ("short", "a function"),
        ("SIZE", "a value"),
        ("Closed", "a class without them"),
        ("Whole", ""),
        ("Acts", ""),
        ("Derived", ""),  # what the source alone does not show is left to the workers
        ("Assigned", ""),
        ("Other", ""),
    ],
)
@pytest.mark.parametrize("module", ["my_hooks", "my_tools.parts.hooks"])
def test_what_is_no_hook_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, found: str
) -> None:
    write_source(tmp_path, module, HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [f"hooks=[{module}.{name}]", "run_dir=run"]
    if not found:
        assert prepare(PROGRAM, words, None).config.hooks == [f"{module}.{name}"]
        return
    rule = (
        "must be a class with a method act, or __enter__ and __exit__, called as Class(job,"
        " run_dir, world)"
    )
    assert problems_of(*words) == [f"hooks=[{module}.{name}]: {rule}, and is {found}"]


def write_source(folder: Path, module: str, source: str) -> None:
    """Writes a module, in a package that cannot be imported if it is in one."""
    path = folder / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent != folder:
        package = folder / module.partition(".")[0]
        (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    path.write_text(source)


OWN_TRACKERS = """
from ddp_train import Tracker
raise AssertionError("imported")

class Mine(Tracker):
    pass

class Closed:
    def close(self): pass
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Mien", "{module} has no Mien; did you mean Mine?"),
        (
            "Closed",
            "must be a class derived from ddp_train.Tracker, with the methods open, write and close,"
            " and is a class without them",
        ),
    ],
)
@pytest.mark.parametrize("module", ["my_trackers", "my_tools.parts.trackers"])
def test_wrong_tracker_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, problem: str
) -> None:
    write_source(tmp_path, module, OWN_TRACKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    trusted = f"trusted_modules=[{module.partition('.')[0]}]"
    target = f"tracker.classes.mine._target_={module}.{name}"
    problems = problems_of(f"+{target}", trusted, "run_dir=run")
    assert problems == [f"{target}: {problem.format(module=module)}"]


def test_mistyped_hook_is_answered_with_a_likely_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(tmp_path, "my_hooks", HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "hooks=[my_hooks.Actts]"
    assert problems_of(target) == [f"{target}: my_hooks has no Actts; did you mean Acts?"]


def test_workers_refuse_what_the_source_does_not_show() -> None:
    from ddp_train.config.user_code import build_hooks

    for path in ("json.JSONDecoder", "json.dumps"):
        with pytest.raises(
            ConfigError, match=rf"hooks=\[{path}\]: must be a class with a method act, or __enter__"
        ):
            build_hooks([path])
    with pytest.raises(ConfigError, match="has no StepTime; did you mean StepTimes"):
        build_hooks(["ddp_lab.study.step_times.StepTime"])


def checkpoint_of(run_dir: Path, *words: str) -> Path:
    """A run that looks as if it had been trained with these words, up to its manifest."""
    config = prepare(PROGRAM, [*words, f"run_dir={run_dir}"], None).config
    place = run_dir / "checkpoints/step_00000010"
    place.mkdir(parents=True)
    write_manifest(
        place, {"step": 10, "config": json.loads(json.dumps(dataclasses.asdict(config)))}
    )
    return place


def write_manifest(place: Path, manifest: Any) -> None:
    (place / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


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
    Path("earlier/commands.jsonl").unlink()
    assert read_again("run_dir=earlier").launch == before.launch, "nobody knows what was typed"
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
        ["checkpoint.resume=never"],
        ["mode=doctor"],
    ):
        assert read_again("run_dir=earlier", *words).train.epochs != 7, "the words say all of it"
    under_torchrun = prepare(PROGRAM, ["run_dir=earlier"], World(0, 3, 0, 3, 0)).config
    assert under_torchrun.launch.nproc_per_node == 3 and under_torchrun.optimizer.lr == 0.003


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
        (
            "model._target_=os.system: loads code from outside the modules trusted by default"
            " (SECURITY.md)"
        ),
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
            "config=list.yaml: is no whole config; name the config.yaml of a run, or for",
        ),
        (
            "config=broken.yaml",
            "config=broken.yaml: is not plain YAML; name the config.yaml of a run",
        ),
        (
            "config=nowhere debug=tiny",
            "debug=tiny: contradicts config=nowhere, which is a whole run; give one of them",
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
def test_another_run_cannot_take_up_a_state_that_does_not_fit_it(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "one", "model=mlp")
    for place in ("one", "one/checkpoints/step_00000010"):
        words = ["model=mlp", f"checkpoint.resume={place}", "run_dir=two"]
        problems = problems_of(*words, "optimizer=adamw", "train.global_batch_size=48")
        assert sorted(problems) == [
            (
                f"optimizer=adamw: the run in checkpoint.resume={place} has optimizer=sgd; "
                "use that, or checkpoint.resume=never"
            ),
            (
                f"train.global_batch_size=48: the run in checkpoint.resume={place} has"
                " train.global_batch_size=96; use that, or checkpoint.resume=never"
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
def test_another_option_of_a_group_is_one_mistake(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", "model=cnn")
    (problem,) = problems_of("run_dir=run", "model=mlp")
    assert (
        problem == "model=mlp: the run in run_dir=run has model=cnn; use that, or another run_dir"
    )
    (problem,) = problems_of("run_dir=run", "model.channels=8")
    assert (
        problem
        == "model.channels=8: the run in run_dir=run has model.channels=32; use that, or another"
        " run_dir"
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
        "train.epochs=3 (was 30)",
        "optimizer.lr=0.05 (was 0.3)",
        "schedule=cosine (was constant)",
    ):
        assert change in notice
    digits = (
        "strategy.sync_bn=false (was true), tuning.precision=fp32 (was bf16),"
        " tuning.buckets=default (was large)"
    )
    assert notice.endswith(f", {digits}"), "loader processes change no number"


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
        f"{key}={now}: the run in run_dir=run has {key}={then}; use that, or another run_dir"
        for key, now, then in (
            ("seed", 5, 0),
            ("optimizer", "adam", "sgd"),
            ("train.global_batch_size", 48, 96),
        )
    ]
    (problem,) = problems_of("mode=evaluate", "checkpoint.resume=run", "run_dir=run")
    assert "holds a training run" in problem


def test_checkpoint_copied_from_another_run_is_noticed(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", "model=mlp")
    other = checkpoint_of(tmp_path / "other", "model=mlp", "seed=3")
    shutil.copytree(other, tmp_path / "run/checkpoints/step_00000020")
    (problem,) = problems_of("model=mlp", "run_dir=run")
    assert problem == "seed=0: the run in run_dir=run has seed=3; use that, or another run_dir"


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


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"seed={'9' * 400}", "must be below 9223372036854775808"),
        (f"train.epochs={'9' * 400}", "must be below 9223372036854775808"),
        (f"seed={'9' * 5000}", "not of the form key=value"),
        ("train.epochs=glob(*)", "glob() chooses options of a group, and train.epochs is none"),
        ("model=glob(*)", "several values; add -m"),
        (f"train.epochs={'[' * 1000}{']' * 1000}", "(2,013 characters): not of the form key=value"),
        (f"train.{'a' * 300}=1", "(308 characters): no such key"),
        (f"{'a' * 300}=1", "(302 characters): no such key"),
        (f"run_dir={'/aaaaaaaaa' * 420}", "is too long: a name may have 255 bytes, a path 4,095"),
        (f"checkpoint.resume={'a' * 300}", "is too long"),
        ("name=Größe,b", "the value needs quotes; use \"name='Größe,b'\""),
        ("tuning.num_workers=1000000", "would be 1,000,000 on this host, which has"),
        ("launch.threads_per_process=100000000", "would be 100,000,000 on this host, which has"),
    ],
    ids=lambda text: text[:20],
)
def test_overrides_of_any_length_and_depth_get_a_message(
    word: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(PROGRAM, ["model=mlp", "launch.nproc_per_node=1", word], None)
    (problem,) = caught.value.problems
    assert problem.startswith(word.partition("=")[0][:100]) and expected in problem


def test_letters_outside_of_ascii_need_no_quotes() -> None:
    config, problems = read_run(
        PROGRAM, read_overrides(PROGRAM, ["name=Größe", "run_dir='ünï/a b'"])
    )
    assert (problems, config.name, config.run_dir) == ([], "Größe", "ünï/a b")


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
        "experiment=mnist with mode=evaluate: model, task, data and metrics are those of the check"
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


def test_a_preset_can_be_shortened(tmp_path: Path) -> None:
    words = [
        "experiment=mnist",
        "data.download=true",
        "data.limit=6000",
        "train.epochs=1",
        "run_dir=run",
    ]
    config = prepare(PROGRAM, words, None).config
    for samples, steps in ((5_952, 10), (60_000, 100)):
        assert warmup_steps(config.schedule, build_plan(config, World(), samples)) == steps
    for words, samples, steps in (
        ("experiment=gpt_tiny train.max_steps=50", 20_000, 25),
        ("experiment=mnist train.max_steps=20 data.download=true", 60_000, 10),
        ("experiment=mnist train.epochs=1 schedule.warmup_steps=30 data.download=true", 60_000, 30),
        ("experiment=gpt_tiny schedule.warmup_epochs=0.1", 4_000, 50),
    ):
        config = prepare(PROGRAM, [*words.split(), "run_dir=run"], None).config
        plan = build_plan(config, World(), samples)
        assert warmup_steps(config.schedule, plan) == steps, words
        task = Classification(10)
        rows = plan_rows(PlanFacts(config, plan, task, base_lr=0.1, warmup_steps=steps))
        is_cut = "(cut from 200: schedule.warmup_at_most=0.5" in rows["optimizer"]
        assert is_cut == (steps == 25)
    words = ["experiment=resnet50", "data.root=.", "train.epochs=2"]
    assert not [problem for problem in problems_of(*words) if problem.startswith("schedule.")]


def test_the_summary_of_an_earlier_run_goes_when_the_next_begins(tmp_path: Path) -> None:
    """And what a process that was killed has half written."""
    names = ("summary.json", "failure.json", "failure.json.part-77", "metrics.jsonl.part")
    for name in names:
        (tmp_path / name).write_text("{}")
    freeze(resolve(composed(f"run_dir={tmp_path}"), CPU, None))
    assert not any((tmp_path / name).exists() for name in names)


def test_a_number_of_the_environment_may_stand_beside_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, found in (("3", 3), ("2:4", "2:4"), ("auto", "auto")):
        monkeypatch.setenv("GPUS", text)
        assert composed("launch.nproc_per_node=${oc.env:GPUS}").launch.nproc_per_node == found


def test_too_few_open_files_are_told_before_a_process_hangs() -> None:
    with mock.patch("resource.getrlimit", return_value=(24, 4096)):
        (problem,) = host_checks.open_files()
    assert str(problem).startswith("a process may open 24 files (ulimit -n), too few")
    assert not list(host_checks.open_files())


def test_an_optimizer_of_torch_is_known_by_its_name() -> None:
    for name in ("nadam", "NAdam"):
        read = read_overrides(PROGRAM, [f"optimizer={name}", "optimizer.lr=0.002"])
        config, problems = read_config(PROGRAM, read)
        assert not problems
        assert (config.optimizer.target, config.optimizer.arguments) == (
            "torch.optim.NAdam",
            {"lr": 0.002},
        )
    (problem,) = read_overrides(PROGRAM, ["optimizer=adamw,nadam,radam"], sweep=True).problems
    assert problem.endswith(
        "sweep over torch's own by optimizer._target_=torch.optim.NAdam,torch.optim.RAdam"
    )


def own_presets(**contents: str) -> Program:
    """With presets of one's own, `group/option` and its content, in conf/ of the working folder."""
    for name, content in contents.items():
        path = Path("conf", name.replace("__", "/")).with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return dataclasses.replace(PROGRAM, own=Path("conf"))


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [override /tracker: null, _self_]\n",
        "defaults: [override /optimizer: adamw.yaml, _self_]\n",
        "defaults: [model: a, _self_]\n",
    ],
)
def test_what_hydra_takes_in_a_preset_is_taken(text: str) -> None:
    program = own_presets(experiment__mine=f"# @package _global_\n{text}")
    Path("conf/experiment/model").mkdir()
    Path("conf/experiment/model/a.yaml").write_text("# @package _global_\nseed: 5\n")
    assert read_config(program, read_overrides(program, ["experiment=mine"]))[1] == []


def test_what_is_no_key_is_no_traceback() -> None:
    program = own_presets(experiment__mine="# @package _global_\ntrain: {1: a, '1': b}\n")
    _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert problems[0] == "train.1=a: no such key (in conf/experiment/mine.yaml)"
    program = own_presets(experiment__mine="# @package _global_\ntrain:\n  epochs: {{epochs}}\n")
    _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    assert problems == ["conf/experiment/mine.yaml: line 3: cannot be read: found unhashable key"]


def test_files_of_others_stop_no_command() -> None:
    program = own_presets(
        experiment__mine="# @package _global_\nseed: 4\n", models__gpt="port: 1\n"
    )
    Path("conf/experiment/mine.yml").write_text("old: 1\n")
    Path("conf/experiment/.#mine.yaml").symlink_to("nowhere")  # as Emacs does
    assert program.unused() == {}
    assert (
        read_config(
            program, read_overrides(program, ["experiment=mine", "model=gpt", "data=text"])
        )[0].seed
        == 4
    )


def test_file_that_does_not_act_is_named_to_who_chooses_it() -> None:
    program = own_presets(
        experiment__late="# late\n# @package _global_\nseed: 5\n",
        optimizers__mine="name: sgd\n",
        schedule__mine="name: cosine\n",
        nginx__a="port: 80\n",
        traces__a="port: 80\n",
        experiment__other="# @package _global_\ndefaults: [override /optimizer: mine]\n",
    )
    Path("conf/schedule/mine.yaml").rename("conf/schedule/mine.yml")
    misspelt = "conf/optimizers/mine.yaml: there is no group optimizers; did you mean optimizer?"
    not_read = "conf/schedule/mine.yml: only *.yaml is read; rename it to mine.yaml"
    late = (
        "conf/experiment/late.yaml: its first line must be `# @package _global_`, to set keys of"
        " a run"
    )
    assert list(program.unused().values()) == [late, misspelt, not_read]
    assert read_overrides(program, ["optimizer=mine"]).problems == [misspelt]
    assert read_overrides(program, ["schedule=mine"]).problems == [not_read]
    assert read_config(program, read_overrides(program, ["experiment=other"]))[1] == [misspelt]
    assert read_config(program, read_overrides(program, ["experiment=late"]))[1] == [late]
    assert read_config(program, read_overrides(program, ["optimizer=sgd"]))[1] == []
    assert find_program(None, [])[0].notes == (
        f"{late}; not used until then, nor are 2 others; if conf belongs to another program, name"
        " presets of yours with --config-dir=FOLDER",
    )


def test_a_file_that_gives_a_wrong_value_is_named() -> None:
    program = own_presets(
        schedule__mine="name: cosine\nwarmup_steps: many\n",
        experiment__mine="# @package _global_\ntrain: {epoch: 3}\n",
    )
    _, problems = read_config(
        program, read_overrides(program, ["experiment=mine", "schedule=mine"])
    )
    assert problems == [
        "train.epoch=3: no such key; did you mean train.epochs? (in conf/experiment/mine.yaml)",
        "schedule.warmup_steps=many: must be a whole number (in conf/schedule/mine.yaml)",
    ]
    own_presets(
        schedule__cosine="name: cosine\n",
        config="train: {epochs: 3}\n",
        model__no_name="width: 3\n",
    )
    with pytest.raises(ConfigError) as refused:
        program.check()
    assert refused.value.problems == [
        "conf/config.yaml: ddp_train has a config.yaml of its own; put what it sets into"
        " conf/experiment/NAME.yaml, and choose that: experiment=NAME"
    ]
    _, problems = read_config(program, read_overrides(program, []))
    assert problems == [
        "conf/schedule/cosine.yaml: ddp_train has schedule=cosine of its own; rename it"
    ]
    assert read_config(program, read_overrides(program, ["schedule=step"]))[1] == []
    own_presets(
        experiment__late="# late\n# @package _global_\nseed: 5\n",
        experiment__early="\n#@package  _global_\nseed: 5\n",
        nginx__a="port: 80\n",
    )
    for ours in ("conf/config.yaml", "conf/schedule/cosine.yaml"):
        Path(ours).unlink()
    program.check()
    _, problems = read_config(program, read_overrides(program, ["experiment=late"]))
    assert problems == [
        "conf/experiment/late.yaml: its first line must be `# @package _global_`, to set keys of"
        " a run"
    ]
    assert read_config(program, read_overrides(program, ["experiment=early"]))[1] == []
    (problem,) = read_overrides(program, ["nginx=a"]).problems
    assert problem.startswith(
        "nginx=a: conf/nginx is not a group; a folder of your own is a group only if it"
    )
    _, problems = read_config(program, read_overrides(program, ["model=no_name"]))
    assert problems == [
        "conf/model/no_name.yaml: names none of cnn, mlp, linear_regression, gelu_mlp, gpt,"
        " torchvision, custom; add `name: cnn`, or `_target_: package.Name`"
    ]


TWICE = "conf/optimizer/twice.yaml: line 3: lr stands there twice; keep one of them"
USE = "an option is chosen by `- override /GROUP: OPTION`"


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "optimizer:\n  lr: 0.1\n  lr: 0.2",
            "conf/experiment/mine.yaml: line 4: lr stands there twice; keep one of them",
        ),
        ("defaults: [override /optimizer: twice]", TWICE),
        (
            "defaults: [optimizer: adamw]",
            "conf/experiment/mine.yaml: defaults: experiment/optimizer: adamw: no such file; "
            + USE,
        ),
        (
            "defaults: [/optimizer: adamw]",
            "conf/experiment/mine.yaml: Multiple values for optimizer. .*; " + USE,
        ),
        (
            "defaults: [override /optimizer: adamww]",
            "adamww: must be one of adadelta, adam, adamw, custom, .*sgd, twice; ",
        ),
        (
            "defaults: [override /optimizer: adamww]",
            "conf/experiment/mine.yaml: .*; did you mean adamw?",
        ),
        (
            "defaults: [override /optimizr: sgd]",
            "mine.yaml: In 'experiment/mine': Could not override 'optimizr'. .*mean optimizer?; "
            + USE,
        ),
        (
            "defaults: [bass]",
            "conf/experiment/mine.yaml: defaults: experiment: bass: .*; did you mean base?",
        ),
        (
            "defaults: {optimizer: adamw}",
            "conf/experiment/mine.yaml: .*defaults must be a list (got mapping); " + USE,
        ),
        (
            "defaults: [5]",
            "conf/experiment/mine.yaml: Unsupported type in defaults : int; " + USE,
        ),
        (
            "hooks: {a: 1}",
            "hooks={a:1}: must be a list like [package.Name] or .* (in conf/experiment/mine.yaml)",
        ),
        (
            "optimizer: {groups: {a: 1}}",
            "optimizer.groups={a:1}: must be a list like .* (in conf/experiment/mine.yaml)",
        ),
        (
            "train: [3]",
            "train=[3]: is a section; it holds keys and values, .* (in conf/experiment/mine.yaml)",
        ),
        (
            "optimizer: adamw",
            (
                "optimizer=adamw: an option is chosen in `defaults`, by `- override /optimizer:"
                " adamw` (in"
            ),
        ),
        (
            "optimizer: {lr: '${oc.env'}",
            "optimizer.lr: .*'${oc.env'; use a reference like .* (in conf/experiment/mine.yaml)",
        ),
        ("- a", "must hold keys and values, KEY: VALUE (in conf/experiment/mine.yaml)"),
        (
            (
                "defaults: [base, /experiment/base, _self_, override /tracker:"
                " [tensorboard]]\nname: 2024-01-01"
            ),
            "",
        ),
        (
            (
                "defaults: [/optimizer/sgd@optimizer, override /model: mlp, override"
                " /hydra/sweeper: basic]"
            ),
            "",
        ),
    ],
)
def test_a_wrong_preset_is_one_problem_that_names_it(preset: str, expected: str) -> None:
    program = own_presets(
        experiment__mine=f"# @package _global_\n{preset}\n",
        experiment__base="# @package _global_\nseed: 5\n",
        optimizer__twice="name: sgd\nlr: 1\nlr: 2\n",
    )
    try:
        _, problems = read_config(program, read_overrides(program, ["experiment=mine"]))
    except ConfigError as error:
        problems = error.problems
    assert len(problems) == bool(expected), problems
    assert re.search(re.escape(expected).replace(r"\.\*", ".*"), "".join(problems))
    assert read_config(program, read_overrides(program, ["experiment=base"]))[1] == [], (
        "it does not stop others"
    )


def test_a_preset_is_no_config_of_a_run() -> None:
    preset = (
        "# @package _global_\ndefaults: [override /optimizer: adam]\nmodel: {}\ndata:"
        " {}\noptimizer: {}\ntrain: {}\n"
    )
    program = own_presets(experiment__mine=preset)
    Path("mine.yaml").write_text(preset)
    for file, where in (
        ("conf/experiment/mine.yaml", ""),
        ("mine.yaml", ", from conf/experiment/"),
    ):
        _, problems = read_config(program, read_overrides(program, [f"config={file}"]))
        assert problems == [f"config={file}: is a preset; choose it by experiment=mine{where}"]


@pytest.mark.parametrize(
    ("script", "argv0", "typed", "torchrun"),
    [
        (ROOT / "launch.py", "launch.py", "python launch.py", "launch.py"),
        (
            ROOT / "launch.py",
            str(ROOT / "launch.py"),
            f"python {ROOT}/launch.py",
            f"{ROOT}/launch.py",
        ),
        (None, "/somewhere/bin/ddp-train", "ddp-train", "-m ddp_train"),
        (None, str(ROOT / "ddp_train/__main__.py"), "python -m ddp_train", "-m ddp_train"),
    ],
)
def test_commands_are_shown_as_they_were_typed(
    script: Path | None, argv0: str, typed: str, torchrun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [argv0])
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("mine").mkdir()
    program, words = find_program(script, ["-cd", "mine", "seed=1", "-m"])
    assert (
        words == ["seed=1", "-m"]
        and program.own == Path("mine")
        and sys.path[-1] == str(Path.cwd())
    )
    assert program.command(words) == f"{typed} --config-dir=mine seed=1 -m"
    assert program.again(["seed=1"])[2:] == ["--config-dir=mine", "seed=1"]
    assert f"torchrun --nproc_per_node=N {torchrun} [key=value ...]  " in usage(typed)
    beside = None if script is None else Path(os.path.relpath(ROOT / "conf"))
    assert (find_program(script, [])[0].own, find_program(script, [])[0].notes) == (beside, ())
    Path("conf").mkdir()
    assert find_program(script, [])[0].own == Path("conf")
    Path("conf/config.yaml").touch()
    other = find_program(script, [])[0]
    assert other.own == beside, "another program's"
    assert other.notes == (
        (
            "conf is another program's, for it has a config.yaml: not used; name presets of yours"
            " with --config-dir=FOLDER"
        ),
    )
    assert find_program(script, ["-cd", "mine"])[0].notes == ()
    for flag in (["--config-dir"], ["-cd", "seed=1"], ["-cd="]):
        with pytest.raises(ConfigError, match="needs a folder; use"):
            find_program(script, flag)


def test_launch_py_says_what_its_help_says() -> None:
    assert usage("python launch.py") == (
        ast.get_docstring(ast.parse((ROOT / "launch.py").read_text())) or ""
    )


def test_an_old_python_is_told_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 4))  # as far back as it goes
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert ", and 3.11 or newer is needed; make PYTHON=/path/to/python3.11" in said


def test_hidden_module_of_the_folder_is_named(tmp_path: Path) -> None:
    Path("yaml.py").touch()
    (problem,) = problems_of("model._target_=yaml.Net")
    assert problem.startswith("model._target_=yaml.Net: yaml.py in this folder is hidden by ")
    assert problem.endswith("/yaml/__init__.py; rename it, or set PYTHONPATH=.")


def test_only_what_is_alike_is_suggested() -> None:
    assert problems_of("data.crop=32") == ["data.crop=32: no such key"]
    assert not any("did you mean" in problem for problem in problems_of("optimizer=null"))


def test_no_file_is_blamed_for_what_the_command_line_said() -> None:
    for words in (["model.channels.x=3"], ["optimizer={lr:0.1}"], ["schedule.name=cosin"]):
        assert "(in conf/" not in " ".join(problems_of(*words))


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (
            "optimizer.decay_norm_and_bias=false",
            "optimizer.decay_norm_and_bias=false has no effect: optimizer.weight",
        ),
        (
            "strategy=single launch.backend=gloo",
            "launch.backend=gloo has no effect: strategy=single",
        ),
        (
            "launch.nproc_per_node=1 strategy.bucket_cap_mb=3",
            "strategy.bucket_cap_mb=3.0 has no effect: one process",
        ),
        (
            "model=mlp tuning.channels_last=true",
            "tuning.channels_last=true has no effect: model=mlp has no convolution",
        ),
        (
            "tuning.compile_mode=max-autotune",
            "tuning.compile_mode=max-autotune has no effect: tuning.compile=false",
        ),
        (
            "tuning.buckets=one strategy=single",
            "tuning.buckets=one has no effect: strategy=single has no buckets",
        ),
        (
            "tuning.buckets=large strategy.comm_hook=powersgd launch.nproc_per_node=3",
            (
                "tuning.buckets=large has no effect: strategy.comm_hook=powersgd over gloo needs"
                " all gradients in one"
            ),
        ),
        (
            "tuning.buckets=by_flops strategy.comm_hook=powersgd launch.nproc_per_node=3",
            (
                "tuning.buckets=by_flops has no effect: strategy.comm_hook=powersgd over gloo needs"
                " all gradients in one"
            ),
        ),
        (
            "tuning.buckets=by_flops launch.nproc_per_node=1",
            "tuning.buckets=by_flops has no effect: one process exchanges nothing",
        ),
    ],
)
def test_a_switch_without_effect_is_noted(line: str, notice: str) -> None:
    (told,) = prepare(PROGRAM, [*line.split(" "), "run_dir=run"], None).notices
    assert told.startswith(notice)


@pytest.mark.slow
def test_an_evaluation_says_that_it_enters_no_hooks(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run")
    words = ["mode=evaluate", "checkpoint.resume=run", "run_dir=out"]
    hooks = "hooks=[ddp_lab.study.step_times.StepTimes]"
    notices = prepare(PROGRAM, [*words, hooks], None).notices
    assert notices == [f"{hooks} has no effect: mode=evaluate does not train"]


def test_no_tip_is_on_in_tuning_none() -> None:
    tips = dataclasses.asdict(composed("tuning=none").tuning)
    del tips["prefetch_factor"]
    off = (False, 0, [], "default")
    assert {name for name, value in tips.items() if value not in off} == {
        "name",
        "precision",
        "optimizer",
    }
    assert (tips["precision"], tips["optimizer"]) == ("fp32", "loop")


# --- freezing -------------------------------------------------------------------------------------

CUSTOM = {
    "model": "model._target_=torch.nn.Linear model.in_features=64 model.out_features=10",
    "task": "task._target_=my_package.Contrastive task.temperature=0.1",
    "data": "data._target_=torchvision.datasets.FakeData data.size=8 data.image_size=[3,8,8]",
    "optimizer": "optimizer._target_=torch.optim.SGD optimizer.lr=0.1",
}
EVERY_OPTION = {
    section: [
        CUSTOM[section] if option == "custom" else f"{section}={option}" for option in options
    ]
    for section, options in OPTIONS.items()
}


@pytest.mark.parametrize(
    "line",
    [
        *(
            " ".join(line)
            for line in itertools.zip_longest(*EVERY_OPTION.values(), fillvalue="seed=1")
        ),
        (
            "tuning=none name='null' trusted_modules=[a,b] optimizer.lr=1e-5"
            " strategy.bucket_cap_mb_list=[1,2.5] seed=3"
        ),
        (
            "seed=9223372036854775807 launch.nproc_per_node=4 launch.rdzv_endpoint=host:1 name='1'"
            " run_dir='yes:~no'"
        ),
    ],
)
def test_what_is_frozen_comes_back(line: str, tmp_path: Path) -> None:
    config = resolve(composed(*line.replace("~", "\t").split(" ")), CPU, None)
    text = freeze(config)
    assert load_frozen(text) == config
    run_dir = tmp_path / str(config.run_dir)
    assert (run_dir / FILE).read_text() == text
    assert sorted(path.name for path in run_dir.iterdir()) == [FILE, "logs"]
    assert "!" not in text  # no YAML tag: plain data
    assert yaml.safe_load(text) == dataclasses.asdict(config)
    assert "auto" not in yaml.safe_load(text)["tuning"].values()


def test_what_is_frozen_passes_the_checks_again() -> None:
    """A restart, and a person who feeds a frozen config back, meet the same rules."""
    config = prepare(PROGRAM, ["run_dir=run"], None).config
    assert check(RequestedRun(config, resolve(config, CPU, None), CPU, None)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("seed: 0", "seed: x", "seed=x: must be a whole number"),
        ("momentum:", "momentun:", "optimizer.momentun=0.9: no such key"),
        ("name: sgd", "name: sgdd", "optimizer=sgdd: must be one of"),
        ("mode: train", "- mode", ""),
        ("seed: 0", "seed: !!python/object/apply:os.getcwd []", ""),
        ("strategy:\n  name: ddp", "strategy: 3\nx:\n  name: ddp", "strategy=3: is a section"),
    ],
)
def test_a_spoilt_frozen_config_is_refused(before: str, after: str, expected: str) -> None:
    text = freeze(resolve(composed("run_dir=run"), CPU, None))
    assert before in text
    with pytest.raises(ConfigError) as caught:
        load_frozen(text.replace(before, after))
    assert all(problem.startswith(f"{FILE}: ") for problem in caught.value.problems)
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ["", "3", "[1, 2]", "just words"])
def test_a_frozen_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a mapping"):
        load_frozen(text)


# --- configs of earlier runs ----------------------------------------------------------------------


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
        == "strategy=ddp: the run in run_dir=run has strategy=ordered; use that, or another run_dir"
    )
    evaluation = prepare(
        PROGRAM, ["mode=evaluate", "checkpoint.resume=run", "run_dir=out"], None
    ).config
    assert (evaluation.model.name, evaluation.data.limit, evaluation.data.placement) == (
        "mlp",
        200,
        "device",
    )


# --- what the command tells about itself ----------------------------------------------------------


def test_help_names_every_key() -> None:
    done = launch("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for key in all_keys():
        if not key.endswith((".name", ".arguments")):
            assert f"  {key}=" in done.stdout.replace("._target_=", ".target="), key
    for name in FILES:
        assert name.split("/")[1] in done.stdout


def test_help_names_choices_and_what_works() -> None:
    told = launch("--help").stdout
    for expected in (
        "model._target_=",
        "model.ANY=",
        "(none, batch, group)",
        "(auto, nccl, gloo)",
        "(train, evaluate, predict, export, study, doctor, prove)",
        "MNIST to 99 %",
        "Small, slow and loud",
    ):
        assert expected in told


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_a_terminal_and_loses_no_word(width: int) -> None:
    text = launch("--help").stdout
    seen = wrapped(text, width)
    assert max(map(len, seen.splitlines())) <= width < max(map(len, text.splitlines()))
    assert "".join(seen.split()) == "".join(text.split())
    if width == 80:
        at = seen.index("launch.grace_seconds=30.0")
        first, second = seen[at:].splitlines()[:2]
        assert second.startswith(" " * (first.index("time to save") + 2)), (
            "below the meaning of the key"
        )


def test_help_in_a_terminal_is_folded() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, ROOT / "launch.py", "--help"]
    with subprocess.Popen(command, stdout=follower, env=os.environ | {"COLUMNS": "60"}):
        os.close(follower)
        seen = b""
        with contextlib.suppress(OSError):  # Linux tells so that the other end is closed
            while part := os.read(leader, 65536):
                seen += part
    os.close(leader)
    assert max(map(len, seen.decode().splitlines())) == 60


def test_help_into_a_pipe_that_closes_ends_quietly() -> None:
    command = f"{sys.executable} {ROOT / 'launch.py'} --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_the_version_is_ours() -> None:
    assert launch("--version").stdout == f"ddp_train {__version__}\n"


def test_cfg_job_shows_the_config_and_runs_nothing(tmp_path: Path) -> None:
    done = launch("--cfg", "job", "optimizer=adam", "optimizer.lr=0.25")
    assert done.returncode == 0, done.stderr
    values = yaml.safe_load(done.stdout)
    config, problems = bind(values)
    assert problems == []
    assert config == composed("optimizer=adam", "optimizer.lr=0.25")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_flags_may_stand_in_any_order_with_their_values() -> None:
    done = launch("--cfg", "job", "--package", "train", "train.epochs=3")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["epochs"] == 3


@pytest.mark.slow
def test_info_defaults_shows_the_files(tmp_path: Path) -> None:
    done = launch("--info", "defaults")
    assert done.returncode == 0, done.stderr
    for name in (
        "strategy/ddp",
        "model/cnn",
        "data/digits",
        "optimizer/sgd",
        "schedule/cosine",
        "tuning/recommended",
    ):
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--experiment", "experiment=VALUE"),
        ("--lr", "optimizer.lr=VALUE"),
        ("--batch-size", ""),
        ("--epochs", "train.epochs=VALUE"),
        ("--hlep", "--help"),
    ],
)
def test_a_key_typed_as_a_flag_is_recognised(flag: str, meant: str) -> None:
    assert (
        f"; did you mean {meant}?" if meant else "no such flag"
    ) in "no such flag" + suggestion_for(flag)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("strategy=", {"strategy=ddp", "strategy=dp", "strategy=ordered", "strategy=single"}),
        ("optimizer.mom", {"optimizer.momentum="}),
        ("optimizer=adamw optimizer.be", {"optimizer.beta1=", "optimizer.beta2="}),
    ],
)
def test_the_shell_completes(typed: str, offered: set[str]) -> None:
    """As bash asks, after eval "$(python launch.py -sc install=bash)"."""
    line = f"python launch.py {typed}"
    done = launch(
        "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)), COMP_KEY="9", COMP_TYPE="9"
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == offered


def test_completion_installs_itself() -> None:
    done = launch("-sc", "install=bash")
    assert done.returncode == 0, done.stderr
    assert "complete " in done.stdout


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sweep_checks_its_combinations_not_the_defaults() -> None:
    """The default batch, 96, cannot be split over 5 processes, and nobody asked for it."""
    argv = ["-m", "launch.nproc_per_node=5", "train.global_batch_size=50,100", "seed=1,2,3"]
    assert plan_sweep(PROGRAM, argv).total == 6
    with pytest.raises(ConfigError) as caught:
        plan_sweep(PROGRAM, ["-m", "launch.nproc_per_node=1,5", "train.global_batch_size=96"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "train.global_batch_size=96"
    ]


@pytest.mark.slow
def test_own_arguments_can_be_swept() -> None:
    words = [
        "-m",
        "model._target_=torch.nn.Linear",
        "model.in_features=64",
        "model.out_features=10,12",
    ]
    plan = plan_sweep(PROGRAM, words)
    assert "++model.out_features=10,12" in plan.hydra_arguments and plan.total == 2


def test_a_trial_without_its_objective_keeps_its_row(tmp_path: Path) -> None:
    """A regression on data of one's own has no accuracy, which is not known before it ran."""
    test = {"loss": 0.5, "accuracy": None, "correct": None, "samples": 3}
    (tmp_path / "summary.json").write_text(json.dumps({"test": test, "seconds": 1.0}))
    row = completed_outcome(Config(run_dir=str(tmp_path), objective="test.accuracy"))
    assert (row["status"], row["objective"], row["loss"]) == ("completed", None, 0.5)
    assert (
        completed_outcome(Config(run_dir=str(tmp_path), objective="samples_per_second"))[
            "objective"
        ]
        is None
    )


# --- properties -----------------------------------------------------------------------------------

WORDS = st.from_regex(r"[b-d]{1,5}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(value=VALUES)
def test_a_shown_value_can_be_pasted(value: Any) -> None:
    read = read_overrides(PROGRAM, [f"some.key={shown(value)}"])
    assert read.problems == []
    assert read.given == {"some.key": value}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@example(key="metrics", value=[{}], option=0)
@given(key=st.sampled_from(all_keys()), value=VALUES | st.floats(), option=st.integers(0, 10))
def test_no_value_is_too_odd_to_be_refused(key: str, value: Any, option: int) -> None:
    """Any value of any key ends as a config or as a message that begins with a key; never as a
    traceback."""
    section, *inner, name = key.split(".") if "." in key else ["", key]
    names = list(OPTIONS.get(section, ["recommended"]))
    content: dict[str, Any] = {name: value}
    for part in reversed(inner):
        content = {part: content}
    if section:
        values = {section: {"name": names[option % len(names)], **content}}
    else:
        values = {key: value}
    if section in SECTIONS and section != "tuning":
        values = {section: content}
    config, problems = bind(values)
    machine = Hardware(cpus=2, gpus=option % 2)
    problems += check_rules(config) or check(
        RequestedRun(config, resolve(config, machine, None), machine, None)
    )
    for problem in problems:
        named = re.split(r"=|\[\d", problem)[0]  # metrics[0]._target_ is of metrics
        known = {*all_keys(), *OPTIONS, *SECTIONS} | {f"{s}._target_" for s in OPTIONS}
        assert named in known or named.startswith("data.splits.")  # which has keys of its own
    if isinstance(value, float) and not math.isfinite(value) and problems == []:
        assert shown(value) in ("nan", "inf", "-inf")
        place = functools.reduce(getattr, [part for part in (section, *inner) if part], config)
        assert isinstance(getattr(place, name), str | dict | list)


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_on_slurm_without_its_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without_plugins(name: str, package: str | None = None) -> Any:
        if name == "hydra_plugins":
            return None
        if name.startswith("hydra_plugins."):
            raise ModuleNotFoundError(
                "No module named 'hydra_plugins'"
            )  # what the real one does then
        return real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_plugins)
    with pytest.raises(
        ConfigError,
        match=r"needs the package hydra-submitit-launcher; pip install -e '\.\[slurm\]'",
    ):
        plan_sweep(PROGRAM, ["-m", "hydra/launcher=slurm", "seed=1,2"])


def test_a_report_that_fails_does_not_hide_the_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Path:
        raise OSError("no room for plots")

    monkeypatch.setattr(page, "write", failing)
    runner = TrialRunner(PROGRAM, SweepState(SweepPlan(tmp_path)), None)
    row = {"trial": 0, "overrides": [], "status": "failed", "exit_code": 3}
    runner.state.rows = [row | {"kind": "crash", "reason": "bad"}]
    finish(runner)
    assert runner.state.exit_code() == 3
    runner.page.write_last()
    told = capsys.readouterr()
    assert (
        f"results {tmp_path}/results.jsonl" in told.out
        and "note: no report: OSError: no room for plots" in told.err
    )
