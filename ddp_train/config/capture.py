"""Reasons why a training step cannot be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config

OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture CUDA graphs themselves."""


def capture_blockers(config: Config) -> dict[str, str]:
    """Reasons why a step cannot be captured: key -> `required value (why)`.

    All keys but tuning.cuda_graph are resolved.
    """
    blockers = chain(
        _blockers_of_training(config),
        _blockers_of_tuning(config),
        _blockers_of_parameters(config),
    )
    return dict(blockers)


def _blockers_of_training(config: Config) -> Iterator[tuple[str, str]]:
    train = config.train
    strategy = config.strategy
    if config.hooks:
        yield "hooks", "[] (a captured step runs no Python)"
    if strategy.capture_blocker:
        yield "strategy", f"ddp or single ({strategy.capture_blocker})"
    if train.accumulation_steps > 1:
        yield "train.accumulation_steps", "1 (a graph holds one micro-batch and its update)"
    if config.data.batch_by == "tokens":
        yield "data.batch_by", "samples (with tokens, the shapes of batches differ)"
    if train.on_non_finite == "skip":
        yield "train.on_non_finite", "stop (a captured step cannot skip an update)"
    if strategy.has_process_group and config.launch.backend == "gloo":
        yield "launch.backend", "nccl (gloo copies gradients to the host)"
    if config.schedule.cycles_momentum:
        yield "schedule.cycle_momentum", "false (a captured step cannot change the momentum)"
    # The worker asks a class of your own.
    is_asked_later = config.optimizer.is_custom and config.tuning.cuda_graph is True
    if not config.optimizer.can_be_captured and not is_asked_later:
        able = [name for name, option in OPTIONS["optimizer"].items() if option.can_be_captured]
        yield "optimizer", f"{' or '.join(able)} (the CPU waits for the GPU in other optimizers)"


def _blockers_of_tuning(config: Config) -> Iterator[tuple[str, str]]:
    tuning = config.tuning
    if tuning.compile and tuning.compile_mode in OWN_GRAPHS:
        why = "the other modes capture graphs themselves"
        yield "tuning.compile_mode", f"default or max-autotune-no-cudagraphs ({why})"
    if tuning.activation_checkpointing:
        why = "recomputing reads the random state on the host"
        yield "tuning.activation_checkpointing", f"[] ({why})"
    if config.optimizer.has_fused and tuning.optimizer != "fused":
        why = "the other implementations read the learning rate on the host"
        yield "tuning.optimizer", f"fused ({why})"
    if tuning.precision == "fp64":
        why = "fused optimizers read the learning rate as float32"
        yield "tuning.precision", f"fp32, bf16 or fp16 ({why})"


def _blockers_of_parameters(config: Config) -> Iterator[tuple[str, str]]:
    strategy = config.strategy
    if strategy.find_unused_parameters:
        yield (
            "strategy.find_unused_parameters",
            ("false (DDP would search the autograd graph in each step)"),
        )
    if strategy.comm_hook == "powersgd":
        yield "strategy.comm_hook", "none (a captured step runs no Python)"
    if config.model.freeze_epochs is not None:
        yield "model.freeze_epochs", "null (a captured step always trains the same parameters)"
    if strategy.sync_bn:
        yield "strategy.sync_bn", "false (SyncBatchNorm copies counts from the GPU to the host)"
