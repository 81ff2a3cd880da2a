"""A trained model without its data: what a checkpoint must say for it, and how it is built
again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.assembly.model import assemble_module, build_built_in_model, build_user_model
from ddp_train.checkpoints import reader
from ddp_train.config.user_code import instantiate
from ddp_train.data.datasets import BatchSource
from ddp_train.data.sample_facts import class_names
from ddp_train.distributed.process_group import same_everywhere
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, TaskError
from ddp_train.options.custom import CustomOption
from ddp_train.options.schema import Config
from ddp_train.parallel.strategy import Strategy
from ddp_train.tasks.catalog import TASKS
from ddp_train.tasks.task import ModelWithTask, Task, has_columns
from ddp_train.tasks.user_task import complete


def find_checkpoint(config: Config, world: World, device: str) -> Path | None:
    """The verified checkpoint to start from, the same on all ranks; None to start from step 0.
    Raises DataError if the one that is named is not valid."""
    run_dir = Path(str(config.run_dir))
    section = config.checkpoint
    trains = config.mode == "train"
    again = world.attempt > 0 and trains and section.resume != "auto"
    found = reader.find("auto", run_dir) if again else None
    found = found or reader.find(
        section.resume, run_dir, "last" if section.which == "auto" and trains else section.which
    )
    step = reader.read_manifest(found)["step"] if found else -1
    same_everywhere(step, device, f"the checkpoint in {run_dir}")
    return found


def inputs_of(sample: Any) -> Any:
    """What a batch gives to the model: the first of (inputs, targets), or all of it."""
    return sample[0] if isinstance(sample, tuple | list) else sample


def facts_of_model(config: Config, source: BatchSource, task: Task) -> dict[str, Any]:
    """What it takes to use the model without the config's data: to load it, to export it, to read
    its outputs."""
    sample = source.get_batch(np.array([0]), None)
    inputs = inputs_of(sample)
    facts: dict[str, Any] = {
        "task": next((name for name, one in TASKS.items() if type(task) is one), "custom")
    }
    if isinstance(inputs, Tensor):
        facts |= {
            "input_shape": list(inputs.shape[1:]),
            "input_dtype": str(inputs.dtype).removeprefix("torch."),
        }
    if config.model.name != "custom":
        facts["outputs"] = source.outputs
    if image := getattr(source, "image_facts", dict)():
        facts |= {"image": image, "input_dtype": "float32"}
    if classes := class_names(source):
        facts["classes"] = classes
    return facts


def model_of(config: Config, manifest: dict[str, Any], where: str) -> nn.Module:
    """The model of a checkpoint, without its weights, in their precision. Raises DataError if its
    manifest is too old to say what it takes."""
    section = config.model
    if section.name == "custom":
        model = build_user_model(section)
    elif "input_shape" in manifest:
        shape = torch.Size(manifest["input_shape"])
        model = build_built_in_model(section, shape, manifest["outputs"])
    else:
        raise DataError(
            f"{where} does not say what its model takes",
            "resume its run for one step, which saves that",
        )
    wide = manifest["config"]["tuning"].get("precision") == "fp64"
    return model.double() if wide else model


def task_name(config: Config, manifest: dict[str, Any]) -> str:
    """What a checkpoint's model was trained for: the name of a built-in task, or custom; "" if it
    does not say."""
    return manifest.get("task") or (
        config.task.name if config.task.name != "auto" else config.data.task or ""
    )


def task_of(config: Config, name: str) -> Task:
    """name: from `task_name`. Raises ConfigError if the class of the user's own is none."""
    if isinstance(config.task, CustomOption):
        return complete(instantiate("task", config.task.code))
    return TASKS[name]()


def module_of(
    config: Config, manifest: dict[str, Any], strategy: Strategy, device: str
) -> ModelWithTask:
    """The model of a checkpoint with its task, placed and tuned, without its weights. It asks no
    data set: one that is to be predicted may have no targets. Raises DataError and ConfigError."""
    name = task_name(config, manifest)
    if not name:
        raise ConfigError(
            [f"mode={config.mode}: the checkpoint does not say its task; add task=NAME"]
        )
    task = task_of(config, name)
    if not has_columns(task):
        raise TaskError(
            f"the task {type(task).__name__} does not say what it predicts",
            "give it a method predictions(self, model, batch) that returns {NAME: tensor with a row"
            " per sample}",
        )
    model = model_of(config, manifest, config.checkpoint.resume)
    return assemble_module(config, model, task, strategy, device)
