"""A trained model without its data: the facts that a checkpoint has for it, and how it is built
again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ddp_train.assembly.model import (
    assemble_module,
    build_built_in_model,
    build_user_model,
    built_in_tasks,
    inputs_of,
)
from ddp_train.checkpoints import reader
from ddp_train.config.user_code import instantiate
from ddp_train.data.datasets import BatchSource
from ddp_train.data.sample_facts import class_names
from ddp_train.distributed.process_group import SHARED_RUN_DIR, same_everywhere
from ddp_train.distributed.world import World
from ddp_train.errors import TaskError
from ddp_train.models.put_back import reading_ahead
from ddp_train.options.custom import CustomOption
from ddp_train.options.schema import Config
from ddp_train.parallel.strategy import Strategy
from ddp_train.tasks.task import ModelWithTask, Task, has_columns
from ddp_train.tasks.user_task import complete


def find_checkpoint(config: Config, world: World, device: str) -> Path | None:
    """The verified checkpoint to start from, the same on all ranks; None to start from step 0.

    Raises DataError if the one that is named is not valid.
    """
    run_dir = Path(str(config.run_dir))
    resume = config.checkpoint.resume
    which = config.checkpoint.which
    found = None
    if config.mode == "train":
        if which == "auto":
            which = "last"
        if world.attempt > 0 and resume != "auto":
            found = reader.find("auto", run_dir)
    if found is None:
        found = reader.find(resume, run_dir, which)
    step = reader.read_manifest(found)["step"] if found else -1
    where = f"run_dir={run_dir}"
    remedy = SHARED_RUN_DIR
    if resume not in ("auto", "never"):
        where = f"checkpoint.resume={resume}"
        remedy = "name a checkpoint on a file system that all hosts share"
    what = f"{where}: the step of the checkpoint to start from"
    same_everywhere(step, device, what, remedy)
    return found


def facts_of_model(config: Config, source: BatchSource, task: Task) -> dict[str, Any]:
    """The entries of a manifest by which the model can be used without the config's data: loaded,
    exported, its outputs read."""
    with reading_ahead(source):
        sample = source.get_batch(np.array([0]), None)
    inputs = inputs_of(sample)
    tasks = built_in_tasks()
    names: dict[type, str] = {task_class: name for name, task_class in tasks.items()}
    facts: dict[str, Any] = {"task": names.get(type(task), "custom")}
    if isinstance(inputs, Tensor):
        facts["input_shape"] = list(inputs.shape[1:])
        facts["input_dtype"] = str(inputs.dtype).removeprefix("torch.")
    if config.model.name != "custom":
        facts["outputs"] = source.outputs
    image = getattr(source, "image_facts", dict)()
    if image:
        facts["image"] = image
        facts["input_dtype"] = "float32"
    classes = class_names(source)
    if classes:
        facts["classes"] = classes
    return facts


def model_of(config: Config, manifest: dict[str, Any]) -> nn.Module:
    """The model of a checkpoint, without its weights, in their precision."""
    section = config.model
    if section.name == "custom":
        model = build_user_model(section)
    else:
        model = build_built_in_model(section, manifest["input_shape"], manifest["outputs"])
    if manifest["config"]["tuning"]["precision"] == "fp64":
        model = model.double()
    return model


def task_of(config: Config, name: str) -> Task:
    """The task that a checkpoint's model was trained for.

    name: as the manifest has it.

    Raises ConfigError if the class of the user's own is not a task.
    """
    if isinstance(config.task, CustomOption):
        return complete(instantiate("task", config.task.code))
    return built_in_tasks()[name]()


def module_of(
    config: Config, manifest: dict[str, Any], strategy: Strategy, device: str
) -> ModelWithTask:
    """The model of a checkpoint with its task, placed and tuned, without its weights.

    It asks no data set: one that is to be predicted may have no targets. Raises TaskError and
    ConfigError.
    """
    task = task_of(config, manifest["task"])
    if not has_columns(task):
        raise TaskError(
            f"the task {type(task).__name__} does not say what it predicts",
            "give it a method predictions(self, model, batch) that returns {NAME: tensor with a row"
            " per sample}",
        )
    model = model_of(config, manifest)
    return assemble_module(config, model, task, strategy, device)
