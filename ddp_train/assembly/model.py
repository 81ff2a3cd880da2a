"""The model with its task, as a config names them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.assembly.arguments import arguments_of, keys_taken_by
from ddp_train.assembly.batches import single_batch
from ddp_train.assembly.metrics import build_further
from ddp_train.config.metrics import further
from ddp_train.config.user_code import instantiate
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key
from ddp_train.errors import ConfigError
from ddp_train.models.freezing import Frozen
from ddp_train.options.custom import CustomOption
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config, ModelConfig
from ddp_train.parallel.strategy import Strategy
from ddp_train.performance import switches
from ddp_train.tasks.catalog import SAMPLED_TARGETS, TASKS, check_numbers, choose
from ddp_train.tasks.task import ModelWithTask, Task
from ddp_train.tasks.trial import check_loss, check_scores
from ddp_train.tasks.user_task import complete

BESIDE_MODEL = tuple(each.name for each in fields(ModelConfig))
"""Keys of `model` that are no arguments of a network."""
AUTOCAST = {"fp32": None, "fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_module(
    config: Config, source: BatchSource, strategy: Strategy, device: str
) -> ModelWithTask:
    """The model with its task, placed, tuned and frozen as asked; the same weights on every
    process."""
    sample = source.get_batch(np.array([0]), None)
    task = build_task(config.task, source, sample)
    torch.manual_seed(hash_key(config.seed, "model"))
    if config.model.name == "custom":
        model = build_user_model(config.model)
    else:
        shape = _input_shape(sample, config.model.name)
        model = build_built_in_model(config.model, shape, source.outputs)
    return assemble_module(config, model, task, strategy, device)


def assemble_module(
    config: Config, model: nn.Module, task: Task, strategy: Strategy, device: str
) -> ModelWithTask:
    """A model with its task on the device of this process, tuned."""
    module = strategy.place(ModelWithTask(model, task, device, AUTOCAST[config.tuning.precision]))
    module.further_metrics = build_further(further(config), task, device)
    tuning = config.tuning
    switches.tune_model(
        module,
        float64=tuning.precision == "fp64",
        channels_last=bool(tuning.channels_last),
        checkpointed_blocks=tuning.activation_checkpointing,
        compile_mode=tuning.compile_mode if tuning.compile else None,
        triton_kernels=bool(tuning.triton_kernels) and config.device == "cuda",
        conv_sums=tuning.conv_sums and config.device == "cuda",
    )
    if (
        config.model.freeze
    ):  # last: what is converted above, batch norms among others, is another object there
        module.frozen = Frozen(module.model, config.model.freeze)
    return module.train()


def build_task(section: Any, source: BatchSource, sample: Any) -> Task:
    """What the model is trained for. sample: a batch of one sample. Raises ConfigError if it does
    not fit the data."""
    if section.name == "custom":
        return complete(instantiate("task", section.code))
    name = choose(section.name, sample)
    if section.name == "auto" and name == "regression":
        # The first ones may be of one class.
        spread = np.linspace(0, len(source) - 1, SAMPLED_TARGETS).astype(int)
        check_numbers(source.get_batch(spread, None))
    task = TASKS[name]
    facts = {"bytes_per_token": getattr(source, "bytes_per_token", None)}
    with contextlib.suppress(ConfigError):  # a data set that does not say how many classes it has
        facts["classes"] = source.outputs
    taken = inspect.signature(task).parameters
    made = task(
        **keys_taken_by(task, section),
        **{name: fact for name, fact in facts.items() if name in taken},
    )
    made.check(sample)
    return made


def try_user_task(config: Config, module: ModelWithTask, source: BatchSource, device: str) -> None:
    """Raises ConfigError if the loss or the scores of a task of the user's own are not what they
    must be."""

    def batch_of(numbers: np.ndarray) -> Any:
        return single_batch(
            config, source, MicroBatch(None, 0, numbers, len(numbers), 1.0, True), device
        ).data

    if isinstance(config.task, CustomOption):
        for check in (check_loss, check_scores):
            check(module, batch_of, len(source), f"task._target_={config.task.target}")


def _input_shape(sample: Any, model: str) -> torch.Size:
    """Of one sample, for a built-in model."""
    inputs = sample[0] if isinstance(sample, tuple | list) else sample
    if isinstance(inputs, Tensor):
        return inputs.shape[1:]
    raise ConfigError(
        [
            f"model={model}: takes one tensor, and an input is a {type(inputs).__name__}; use"
            " model._target_"
        ]
    )


def build_built_in_model(section: ModelConfig, shape: Sequence[int], outputs: int) -> nn.Module:
    """The network that a section of the config names, for samples of this shape.

    outputs: classes, or the numbers of a regression.

    Raises ConfigError if it cannot take such samples.
    """
    build = implementation_of(section.implementation)
    return build(tuple(shape), outputs, **arguments_of(section, *BESIDE_MODEL))


def build_user_model(model: Any) -> nn.Module:
    made = instantiate("model", model.code)
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise ConfigError(
            [
                f"model._target_={model.target}: made an object of {kind}, which is no"
                " torch.nn.Module"
            ]
        )
    return made
