"""Performance tips, each one switch that acts in one place. docs/tuning.md lists them all; the loop knows none."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from ddp_train.config.schema import Config, TuningConfig
from ddp_train.distributed.environment import set_cublas_workspace
from ddp_train.performance.activation_checkpointing import checkpoint_blocks
from ddp_train.task import ModelWithLoss

AUTOCAST = {"fp32": None, "fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_process_flags(config: Config) -> None:
    """The switches that torch keeps for the whole process. Before the model is built."""
    torch.set_num_threads(int(config.launch.threads_per_process))
    torch.backends.cudnn.benchmark = bool(config.tuning.cudnn_benchmark)
    torch.backends.cuda.matmul.allow_tf32 = bool(config.tuning.tf32)
    torch.backends.cudnn.allow_tf32 = bool(config.tuning.tf32)
    if config.deterministic:
        set_cublas_workspace()
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True


def shape_model(module: ModelWithLoss, tuning: TuningConfig) -> None:
    """Memory format, number type and compilation of the model with its loss, on its device."""
    if tuning.precision == "fp64":
        module.model = module.model.double()
    if tuning.channels_last:
        module.model = module.model.to(memory_format=torch.channels_last)
    if tuning.activation_checkpointing:
        checkpoint_blocks(module.model, tuning.activation_checkpointing)
    if tuning.compile:
        # In place: torch.compile(module) would prefix the names in checkpoints. Our module, not the model in it: torch
        # 2.11 compiles no nn.Sequential in place, without a word. A graph for each of the few shapes of a run (whole
        # and last batch, in training and in evaluation) is faster than one for all.
        module.compile(dynamic=False, mode=tuning.compile_mode)
        module.score = torch.compile(module.score, dynamic=False, mode=tuning.compile_mode)


@contextlib.contextmanager
def frozen_gc(tuning: TuningConfig) -> Iterator[None]:
    """Inside, the garbage collector passes over all objects that were there before: half a million after importing
    torch, which it would look through again and again."""
    gc.collect()
    if tuning.gc_freeze:
        gc.freeze()
    else:  # the fork server froze what it imported
        gc.unfreeze()
    try:
        yield
    finally:
        gc.unfreeze()  # DDP must be collected before its process group is closed
