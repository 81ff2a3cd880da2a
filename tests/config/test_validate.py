"""Every mistake is named, and costs no more than reading its message.

No worker, no import of torch, no file.
"""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.config.keys import all_keys
from ddp_train.config.prepare import prepare
from ddp_train.config.validate import check, check_rules
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS, RequestedRun
from ddp_train.text import shown, unmatched
from tests.support.commands import PROGRAM
from tests.support.configs import (
    ROOT,
    VALUES,
    launch,
    problems_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")
REFUSED = "must be one of"
COUNT = (
    "must be a whole number of at least 1, or auto, or a range LOW:HIGH, as 2:8 or 2:auto;"
    " use launch.nproc_per_node"
)
BAD: dict[str, list[str]] = {
    # keys that do not exist
    "optimizer.momentun=0.1": ["no such key; did you mean optimizer.momentum?"],
    "++optimizer.momentun=0.1": [
        "optimizer.momentun=0.1: no such key; did you mean optimizer.momentum?"
    ],
    "+foo=1": ["foo=1: no such key"],
    "foo.bar=1": ["foo.bar=1: no such key"],
    "tarin.epochs=3": ["tarin.epochs=3: no such key; did you mean train"],
    "early_stopping.metric=test.loss": [
        "early_stopping.metric=test.loss: no such key; did you mean train.early_stopping.metric?"
    ],
    "fooo.api_key=hunter2": ["fooo.api_key=(hidden): no such key"],
    "+model=mlp": ["+model=mlp: model has a value already; use model=mlp"],
    "optimizer={lr:0.1}": [
        "optimizer={lr:0.1}: a section takes no mapping; set each key separately, for example optimizer.lr=0.1"
    ],
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
    "data.test_sets.a=x": [
        "no such key in data=digits; data=image_folder and text and tokens have it, and"
        " so has a class of your own (data._target_=package.Name)"
    ],
    "schedule.step_size=3": ["no such key in schedule=cosine; schedule=step has it"],
    "strategy=single strategy.sync_bn=true": [
        "strategy.sync_bn=true",
        "no such key in strategy=single",
    ],
    "data.samples=3": ["no such key in data=digits; data=synthetic and linear_regression have it"],
    "model.target=a.b": ["no such key; did you mean model._target_?"],
    "model=custom model.target=a.b": ["the key is model._target_; use model._target_=a.b"],
    "hydra.verbose=false": ["Hydra's own keys act on sweeps only; add -m, or leave the key out"],
    "hydra/sweeper=optuna": ["Hydra's own keys act on sweeps only; add -m, or leave the key out"],
    "strategy._target_=a.b": ["strategy._target_=a.b", "no such key"],
    "schedule=StepLR schedule.interval=epochs": ["must be one of step, epoch", "did you mean"],
    "schedule=ReduceLROnPlateau schedule.metric=val_loss": ["test.NAME", "did you mean"],
    "train._target_=a.b": ["train._target_=a.b", "no such key"],
    # options that do not exist
    "strategy=fsdp2": [
        "there is no sharded strategy: each GPU holds the whole model (see the page"
        ' "Out of memory, too big for one GPU" of the documentation)'
    ],
    "optimizer=AdamW": [REFUSED, "did you mean adamw?"],
    "model=Resnet50": [REFUSED, "did you mean resnet50?"],
    "tracker=wandb,tensorboard": [
        "for several trackers in one run, use 'tracker=[wandb,tensorboard]'; for a sweep, add -m"
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
    "run_dir=~/x": ["run_dir=~/x: ~ is not expanded here; use run_dir=$HOME/x"],
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
    "train.log_every_steps=null": ["must be a whole number"],
    "train.max_steps=1.5": ["must be a whole number or null"],
    "launch.nproc_per_node=1.5": [f"{COUNT}=2"],
    "launch.nproc_per_node=1e3": [f"{COUNT}=1000"],
    "launch.nproc_per_node=-1": [f"{COUNT}=1"],
    "launch.nproc_per_node=true": [f"{COUNT}=auto"],
    "launch.nproc_per_node=null": [f"{COUNT}=auto"],
    "launch.nproc_per_node='2'": [f"{COUNT}=2"],
    "launch.nproc_per_node=auto2": [f"{COUNT}=auto"],
    "launch.nproc_per_node=2:": [f"{COUNT}=auto"],
    "launch.nnodes=1.5": ["must be a whole number of at least 1, or a range LOW:HIGH, as 2:3; use"],
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
    "hooks.0=a.b": ["the list has no item of this number; give the whole list"],
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
    "launch.nproc_per_node=0": [f"{COUNT}=1"],
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
        "96 or 98, or launch.nproc_per_node=1:2: with a range,",
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
        "strategy=dp: runs in one process, not in 2; use strategy=ddp"
    ],
    "launch.nproc_per_node=2 strategy=single": [
        "strategy=single: runs in one process",
        "launch.nproc_per_node=1",
    ],
    "optimizer.momentum=0 optimizer.nesterov=true": [
        "nesterov=true: needs momentum; add optimizer.momentum=0.9"
    ],
    "train.max_steps=10 schedule.warmup_steps=10": [
        "schedule.warmup_steps=10",
        "train.max_steps=10; use schedule.warmup_steps below 10",
    ],
    "train.epochs=3 schedule.warmup_epochs=3": [
        "must end before the run, which has train.epochs=3; use schedule.warmup_epochs below 3"
    ],
    "schedule.warmup_steps=9 schedule.warmup_epochs=1": [
        "contradicts schedule.warmup_steps=9; give one of them"
    ],
    "train.evaluate_every_epochs=2 train.evaluate_every_steps=9": [
        "contradicts train.evaluate_every_epochs=2; give one of them"
    ],
    "optimizer.lr_base_batch=512": [
        "only with optimizer.lr_scaling; add optimizer.lr_scaling=linear"
    ],
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
    "train.accumulation_steps=2 strategy.static_graph=true": ["; use strategy.static_graph=f"],
    "strategy.skip_all_reduce_unused_params=true": ["needs strategy.find_unused_parameters=true"],
    "tuning.precision=fp64 strategy.comm_hook=fp16": ["would undo tuning.precision=fp64"],
    "reasons.compile=mine": ["reasons.compile=mine: no such key"],
    "data=image_folder data.decode=threads": [REFUSED, "auto, pil, processes, gpu"],
    "strategy=sorted": [REFUSED, "ordered"],
    "strategy.virtual_shards=4": ["no such key in strategy=ddp; strategy=ordered has it"],
    "strategy=ordered strategy.sync_bn=true": [
        "no such key in strategy=ordered; strategy=ddp has it"
    ],
    "strategy=ordered strategy.virtual_shards=6": [
        "must be a power of two; use strategy.virtual_shards=4 or 8"
    ],
    "strategy=ordered launch.nproc_per_node=3": [
        "8 virtual shards evenly among 3",
        "use launch.nproc_per_node=2, a power of two up to 8",
    ],
    "strategy=ordered launch.nproc_per_node=16": ["16 processes; use strategy.virtual_shards=16"],
    "strategy=ordered launch.nproc_per_node=1 launch.rdzv_endpoint=a:1 run_dir=a launch.nnodes=3": [
        "launch.nnodes=3 launch.nproc_per_node=1: strategy=ordered cannot divide",
        "use launch.nnodes=2 launch.nproc_per_node=1, powers of two with at most 8 processes in all",
    ],
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
        "overwrite accumulated gradients",
        "or train.accumulation_steps=1",
    ],
    "tuning.activation_checkpointing=Bottleneck": ["must be a list"],
    "strategy=ordered model=gelu_mlp model.fused=true": ["needs model.fused=false"],
    "deterministic=true tuning.cudnn_benchmark=true": ["deterministic=true forbids"],
    "data=linear_regression": ["model=cnn: needs images", "use model=linear_regression or mlp"],
    "experiment=linear_regression task=classification": [
        "has numbers as targets",
        "use task=regression",
    ],
    "experiment=linear_regression objective=test.accuracy": ["no classes; use objective=test.loss"],
    "task=regression": ["data=digits has class labels", "use task=classification"],
    "run_dir=here launch.nnodes=2": ["add launch.rdzv_endpoint=HOST:PORT"],
    "launch.rdzv_endpoint=host:29500": ["add launch.nnodes=2, or leave launch.rdzv_endpoint out"],
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
    "checkpoint.resume=never checkpoint.which=best": [
        "checkpoint.which=best: has no effect with checkpoint.resume=never; to start from"
    ],
    "checkpoint.which=best": ["with checkpoint.resume=auto a run resumes from its last"],
    "checkpoint.resume=/nowhere": [
        "no such folder; use checkpoint.resume=auto, never, or the path"
    ],
    "checkpoint.resume=.": ["holds no checkpoint; give the path of a run"],
    "mode=evaluate checkpoint.resume=.": ["holds no checkpoint"],
    "checkpoint.resume=": ["must not be empty"],
    "mode=evaluate": ["needs a checkpoint", "add checkpoint.resume=PATH"],
    "mode=evaluate checkpoint.resume=never": ["needs a checkpoint", "add checkpoint.resume=PATH"],
    "mode=evaluate checkpoint.resume=/nowhere": ["no such folder"],
    "run_dir=/etc/passwd/x": [
        "cannot be written (/etc/passwd is not a folder); use another folder"
    ],
    "run_dir=": ["must not be empty"],
    "name=a/b": ["must be usable as the name of a folder"],
    "name=-x": ["spaces and . _ + = -, and the first a letter, a digit or _"],
    "model=gpt data=text objective=validation.loss": [
        "there is no validation set; use data.validation_sets.other=FILE"
        " objective=validation/other.loss, or use objective=test.loss"
    ],
    "model=gpt data=text data.validation=0.1": [
        "A test set is held out already (data.test_part); to validate with another text, use"
        " data.validation_sets.other=FILE"
    ],
    "model._target_=torch": ["must be a dotted path, package.Name"],
    "model._target_=torch.nn..Linear": ["must be a dotted path, package.Name"],
    "optimizer._target_=nosuch.Thing": ["no module nosuch is in"],
    "hooks=[nosuch.Hook]": ["no module nosuch is in"],
    "hooks=[{every:5}]": ["hooks[0]._target_=: must be a dotted path, package.Name"],
    "hooks=[{_target_:nosuch.Hook,every:5}]": [
        "hooks[0]._target_=nosuch.Hook: no module nosuch is in"
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
    "hydra.sweeper._target_=os.system": [
        "os.system is code from outside hydra; use a class of hydra"
    ],
    "train.token=hunter2": ["train.token=(hidden): no such key"],
}
"""Command lines with one mistake, and what the one line about it must say besides the key and the
value."""
STARTS = {
    "launch.nproc_per_node=1e3": "launch.nproc_per_node=1000.0",
    "launch.nproc_per_node='2'": "launch.nproc_per_node=2",
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


def test_a_folder_of_images_without_classes_is_to_be_sorted(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    words = ["data=image_folder", f"data.root={tmp_path}"]
    (problem,) = problems_of(*words)
    assert problem == (
        f"data.root={tmp_path}: {tmp_path}/train must hold a folder per class; sort the images of"
        f" {tmp_path}/train into one folder per class, or name the folder that holds train/"
    )
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
    assert problems_of(*words, "data.validation_sets.other=5") == [
        "data.validation_sets.other=5: must name a folder that has one folder per class: a path"
        " relative to data.root, or an absolute path"
    ]


def test_what_compiles_without_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    problems = problems_of("model=gelu_mlp", "model.fused=true", "tuning.compile=false")
    assert [problem for problem in problems if "g++" in problem] == [
        "model.fused=true: on CPU torch.compile needs g++, which is not installed; install g++, or"
        " use model.fused=false"
    ]


def test_a_set_that_is_not_there_is_named() -> None:
    for mode, key in {"evaluate": "evaluate.sets", "predict": "predict.split"}.items():
        value = "[tset]" if mode == "evaluate" else "tset"
        problem = problems_of(f"mode={mode}", f"{key}={value}")[0]
        assert problem == f"{key}=tset: there is no set tset; there are test; did you mean test?"


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
@pytest.mark.slow
def test_the_command_refuses_quickly(tmp_path: Path) -> None:
    began = time.monotonic()
    assert launch("optimizer.momentun=0.1").returncode == 2
    assert time.monotonic() - began < 15, "0.7 s on an idle machine: nothing is waited for"
    assert list(tmp_path.iterdir()) == []


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
        # These have keys of the user's own.
        own = ("data.splits.", "data.validation_sets.", "data.test_sets.")
        assert named in known or named.startswith(own)
    if isinstance(value, float) and not math.isfinite(value) and problems == []:
        assert shown(value) in ("nan", "inf", "-inf")
        place = functools.reduce(getattr, [part for part in (section, *inner) if part], config)
        assert isinstance(getattr(place, name), str | dict | list)


def test_thousands_of_mistakes_are_counted_not_listed() -> None:
    globs = [f"layer{number}.*" for number in range(9_000)]
    problems = unmatched("model.freeze=[{}]", globs, ["head.weight", "head.bias"])
    assert len(problems) == 21
    assert problems[-1] == "model.freeze=[...]: 8,980 more of them match no parameter"
    message = str(ConfigError([f"key{number}" for number in range(9_000)]))
    assert message.startswith("9,000 problems in the configuration:\n  - key0\n")
    assert message.endswith("  - key49\n  - and 8,950 more")
