"""The model with its task, as a config names them."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.assembly.arguments import arguments_of, keys_taken_by
from ddp_train.assembly.batches import single_batch
from ddp_train.assembly.metrics import build_further
from ddp_train.config.metrics import further_metrics
from ddp_train.config.user_code import instantiate
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key
from ddp_train.data.sample_facts import spread, told_labels
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.process_group import ranks, total
from ddp_train.errors import ConfigError
from ddp_train.models.freezing import Frozen
from ddp_train.models.put_back import reading_ahead
from ddp_train.options.custom import CustomOption
from ddp_train.options.registry import OPTIONS, implementation_of
from ddp_train.options.schema import Config, ModelConfig
from ddp_train.parallel.strategy import Strategy
from ddp_train.performance import switches
from ddp_train.tasks.catalog import SAMPLED_TARGETS, check_labels, check_numbers, choose
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.supervised import BuiltIn
from ddp_train.tasks.task import ModelWithTask, Task
from ddp_train.tasks.trial import (
    check_evaluation,
    check_loss,
    check_model,
    check_scores,
    takes_empty_batch,
)
from ddp_train.tasks.user_task import complete

LABELS_READ = 4
"""Samples whose labels are compared with the number of classes: the last one among them, which has
the largest label where they are sorted."""
AUTOCAST = {"fp32": None, "fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_module(
    config: Config, source: BatchSource, strategy: Strategy, device: str
) -> ModelWithTask:
    """The model with its task, placed, tuned and frozen as asked; the same weights on every
    process."""
    with reading_ahead(source):
        sample = source.get_batch(np.array([0]), None)
        task = build_task(config.task, source, sample)
    torch.manual_seed(hash_key(config.seed, "model"))
    if config.model.name == "custom":
        model = build_user_model(config.model)
    else:
        inputs = inputs_of(sample)
        if not isinstance(inputs, Tensor):
            raise ConfigError(
                [
                    f"model={config.model.name}: takes one tensor, but an input is a"
                    f" {type(inputs).__name__}; use a model of your own,"
                    " model._target_=package.Name"
                ]
            )
        model = build_built_in_model(config.model, inputs.shape[1:], source.outputs)
    return assemble_module(config, model, task, strategy, device)


def assemble_module(
    config: Config, model: nn.Module, task: Task, strategy: Strategy, device: str
) -> ModelWithTask:
    """A model with its task on the device of this process, tuned."""
    module = strategy.place(ModelWithTask(model, task, device, AUTOCAST[config.tuning.precision]))
    module.further_metrics = build_further(further_metrics(config), task, device)
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
    # Last: what is converted above, batch norms among others, is another object there.
    if config.model.freeze:
        module.frozen = Frozen(module.model, config.model.freeze)
    return module.train()


def built_in_tasks() -> dict[str, type[BuiltIn]]:
    """The class of each built-in task, by its name."""
    return {
        name: implementation_of(option.implementation)
        for name, option in OPTIONS["task"].items()
        if option.implementation
    }


def build_task(section: Any, source: BatchSource, sample: Any) -> Task:
    """The task that the model is trained for.

    sample: a batch of one sample.

    Raises ConfigError if it does not fit the data.
    """
    if section.name == "custom":
        return complete(instantiate("task", section.code))
    tasks = built_in_tasks()
    name = choose(section.name, sample, tasks)
    check_reading(section.name, name, source)
    task_class = tasks[name]
    arguments = keys_taken_by(task_class, section)
    parameters = inspect.signature(task_class).parameters
    if "bytes_per_token" in parameters:
        arguments["bytes_per_token"] = getattr(source, "bytes_per_token", None)
    if "classes" in parameters:
        # A data set may not say how many classes it has.
        with contextlib.suppress(ConfigError):
            arguments["classes"] = source.outputs
    task = task_class(**arguments)
    task.check(sample)
    return task


def task_of_set(task: Task, source: BatchSource) -> Task:
    """The task with what it must know of a set that is scored: the bytes of its tokens."""
    if not isinstance(task, LanguageModel):
        return task
    task = copy.copy(task)
    task.bytes_per_token = getattr(source, "bytes_per_token", None)
    return task


def check_reading(asked: str, name: str, source: BatchSource) -> None:
    """Raise ConfigError if the targets contradict what else is told of them.

    asked: the task of the config, `auto` perhaps.
    name: the task that was chosen for it.
    """
    declared = source.declared_classes if isinstance(source, UserDataset) else None
    if name == "regression" and asked == "auto":
        # The first ones may be of one class.
        check_numbers(targets_of(source, SAMPLED_TARGETS), declared)
    if name != "classification" or declared is None:
        return
    labels = targets_of(source, LABELS_READ)
    check_labels(labels, declared)
    told = told_labels(source)
    numbers = spread(source, LABELS_READ)
    if told is not None and told[numbers].tolist() == labels.tolist():
        check_labels(torch.from_numpy(told), declared)


def targets_of(source: BatchSource, count: int) -> Tensor:
    """The targets of samples from the whole of a data set."""
    _, targets = source.get_batch(spread(source, count), None)
    return targets


def try_user_code(config: Config, module: ModelWithTask, splits: Splits, device: str) -> None:
    """Try a task or a model of the user's own on a few samples.

    Scores are tried with samples that are scored: they may have another form than those that train.

    Raises ConfigError if the loss or the scores of the task are not what they must be.
    """
    train = splits.train
    batch_of = partial(trial_batch, config, train, device=device)
    if isinstance(config.task, CustomOption):
        key = f"task._target_={config.task.target}"
        scored = splits.scored.source
        scored_batch_of = partial(trial_batch, config, scored, device=device)
        check_loss(module, batch_of, len(train), key)
        check_scores(module, scored_batch_of, len(scored), key)
        check_evaluation(module, scored_batch_of, len(scored), key)
    elif isinstance(config.model, CustomOption) and not config.strategy.fixes_bits:
        check_model(module, batch_of, len(train), f"model._target_={config.model.target}")


def trial_batch(config: Config, source: BatchSource, numbers: np.ndarray, device: str) -> Any:
    """The batch of some samples, as the model gets it; of none, one of the length 0.

    numbers: of the samples, int64 [n].
    """
    indices = numbers if len(numbers) else np.zeros(1, np.int64)
    micro_batch = MicroBatch(
        epoch=None, step=0, indices=indices, num_real=len(numbers), scale=1.0, is_last=True
    )
    batch = single_batch(config, source, micro_batch, device, has_empty_batches=True)
    return batch.data


def may_count_samples(config: Config, module: ModelWithTask) -> bool:
    """True if something beside the loss may count the rows of a batch.

    Code of the user's own may, and torch's SyncBatchNorm does.
    """
    return (
        isinstance(config.model, CustomOption)
        or isinstance(config.task, CustomOption)
        or any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    )


def all_take_empty_batch(
    config: Config, module: ModelWithTask, source: BatchSource, device: str
) -> bool:
    """True if the model with its task takes a batch of the length 0 everywhere. A collective."""
    takes_it = takes_empty_batch(module, partial(trial_batch, config, source, device=device))
    return bool(total(torch.tensor(int(takes_it), device=device)) == ranks())


def inputs_of(sample: Any) -> Any:
    """The part of a batch that the model gets: the first of (inputs, targets), or all of it."""
    return sample[0] if isinstance(sample, tuple | list) else sample


def build_built_in_model(section: ModelConfig, shape: Sequence[int], outputs: int) -> nn.Module:
    """The network that a section of the config names, for samples of this shape.

    outputs: classes, or the numbers of a regression.

    Raises ConfigError if it cannot take such samples.
    """
    build = implementation_of(section.implementation)
    beside_arguments = [field.name for field in fields(ModelConfig)]
    return build(tuple(shape), outputs, **arguments_of(section, *beside_arguments))


def build_user_model(section: Any) -> nn.Module:
    """The model of the user's own class. Raises ConfigError if it is not a torch.nn.Module."""
    model = instantiate("model", section.code)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(
            [
                f"model._target_={section.target}: returns an object of {kind}, which is not a"
                " torch.nn.Module; name a class derived from it, or a function that returns one"
            ]
        )
    return model
