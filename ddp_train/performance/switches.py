"""Performance switches of the process and of the model. docs/operate/tuning.md lists all tips; the
loop knows none."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from ddp_train.distributed.environment import set_default_variables
from ddp_train.kernels import interface
from ddp_train.performance.activation_checkpointing import checkpoint_blocks
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.task import ModelWithTask


def set_process_flags(threads: int, deterministic: bool, cudnn_benchmark: bool, tf32: bool) -> None:
    """Set what torch keeps for the whole process. To be called before the model is built.

    A parameter with the name of a key of `tuning` gets its value.
    """
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        # Before CUDA starts (cuBLAS manual, reproducibility).
        set_default_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True


def tune_model(
    module: ModelWithTask,
    float64: bool = False,
    channels_last: bool = False,
    checkpointed_blocks: Sequence[str] = (),
    compile_mode: str | None = None,
    triton_kernels: bool = False,
    conv_sums: bool = False,
) -> None:
    """Set number type, memory format, activation checkpointing and compilation of a model that is
    on its device.

    checkpointed_blocks: names of classes.
    compile_mode: of torch.compile; None does not compile.
    triton_kernels: max pooling and the loss of large vocabularies by our own.
    conv_sums: convolutions of a compiled model compute the sums of the batch norm behind them.
    """
    if triton_kernels:
        use_triton_kernels(module)
    if float64:
        module.model = module.model.double()
    if channels_last:
        module.model = module.model.to(memory_format=torch.channels_last)
    if checkpointed_blocks:
        checkpoint_blocks(module.model, list(checkpointed_blocks))
    if compile_mode is not None:
        # In place: torch.compile(module) would prefix the names in checkpoints. Our module, not the
        # model in it: torch 2.11 compiles no nn.Sequential in place, without a word. A graph for
        # each of the few shapes of a run (whole and last batch, in training and in evaluation) is
        # faster than one for all.
        options: dict[str, Any] = {"mode": compile_mode}
        if conv_sums:
            options = {"options": interface.conv_sums_options(compile_mode)}
        module.compile(dynamic=False, **options)
        module.score = torch.compile(module.score, dynamic=False, mode=compile_mode)


def use_triton_kernels(module: ModelWithTask) -> None:
    """Replace layers and the loss by kernels of our own. Triton is imported only for a model and a
    task that have use for it."""
    interface.replace_max_pools(module.model)
    if isinstance(module.task, LanguageModel):
        module.task.cross_entropy_sum = interface.load_cross_entropy_sum()


def set_garbage_collection(freeze: bool) -> None:
    """Let the garbage collector skip all objects that are there now, or look at them again.

    After importing torch they are half a million, which it would look through again and again. To
    be called before the model is wrapped: DDP is part of reference cycles, and must be collected
    before its process group is closed. That collection takes 0.2 s of every process if nothing is
    frozen.
    """
    if freeze:
        gc.collect()
        gc.freeze()
    else:
        gc.unfreeze()  # what the fork server froze
