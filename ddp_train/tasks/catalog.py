"""The choice of the built-in task that fits the targets of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_train.data.sample_tensors import is_pair
from ddp_train.data.user_dataset import DeclaredClasses
from ddp_train.errors import ConfigError
from ddp_train.tasks.supervised import (
    BuiltIn,
    Supervised,
    TargetForm,
    describe_targets,
    first_numbers,
    form_of,
)
from ddp_train.text import counted

CANDIDATES = {
    TargetForm("integers", 2): "language_model (tokens) or multilabel (0 and 1 per label)",
    TargetForm("integers", 3): "segmentation (a class per pixel)",
    TargetForm("numbers", 2): (
        "multilabel (0 or 1 per label), regression (k numbers) or classification (a part of each"
        " class)"
    ),
}
"""The tasks that task=auto names where the targets leave a choice."""
SAMPLED_TARGETS = 16
"""Samples by which 0 and 1 are told from numbers."""


def choose(name: str, batch: Any, tasks: Mapping[str, type[BuiltIn]]) -> str:
    """The task for a batch, where `auto` stands for classification or regression.

    tasks: the built-in ones by their names.

    Raises ConfigError if the task does not fit the targets, or if they leave `auto` a choice: with
    the candidates.
    """
    if name != "auto" and not issubclass(tasks[name], Supervised):
        return name
    targets = _targets_of(name, batch)
    if name == "auto":
        return _automatic_choice(targets)
    misfit = tasks[name].misfit(batch)
    if not misfit:
        return name
    supervised = {other: task for other, task in tasks.items() if issubclass(task, Supervised)}
    fitting = [other for other, task in supervised.items() if not task.misfit(batch)]
    remedy = "use task._target_=your_module.YourTask"
    if fitting:
        remedy = f"use task={' or '.join(fitting)}"
    advice = supervised[name].advice(targets)
    if advice:
        remedy = f"{advice}; or {remedy}"
    raise ConfigError([f"task={name}: {misfit}; {remedy}"])


def check_numbers(targets: Tensor, declared: DeclaredClasses | None) -> None:
    """Raise ConfigError if numbers may be labels: `auto` may be wrong to choose regression.

    targets: of samples from the whole data set, floating-point numbers [n] or [n, 1].
    declared: the number of classes that something tells; None: nothing does.
    """
    values = sorted(set(targets.flatten().tolist()))
    shown = first_numbers(torch.tensor(values))
    if declared and declared.count > 1:
        raise ConfigError(
            [
                f"task=auto: the targets are floating-point numbers, {shown}, but"
                f" {declared.said_by} gives {declared.count} classes; for labels return"
                " int(target), for numbers choose task=regression"
            ]
        )
    if values == [0.0, 1.0]:
        raise ConfigError(
            [
                f"task=auto: all {len(targets)} sampled targets are 0 or 1; choose task=multilabel"
                " if they say yes or no (its loss is bce), or task=regression (mse)"
            ]
        )
    are_whole = all(value.is_integer() for value in values)
    if len(values) > 1 and are_whole and values[0] in (0, 1) and values[-1] < SAMPLED_TARGETS:
        raise ConfigError(
            [
                f"task=auto: all {len(targets)} sampled targets are whole numbers, {shown}; choose"
                " task=regression if they are amounts (mse), or return integers, as int(target),"
                " if they are labels"
            ]
        )


def check_labels(targets: Tensor, declared: DeclaredClasses) -> None:
    """Raise ConfigError if labels are not those of as many classes as something tells.

    targets: of some samples, or of all: integers [n], or parts of each class [n, k].
    """
    count = declared.count
    tells = f"{declared.said_by} gives {counted(count, 'class')}"
    if targets.ndim == 2:
        if targets.shape[1] <= count:
            return
        raise ConfigError(
            [
                f"task=classification: a target has {targets.shape[1]} numbers, but {tells};"
                f" correct one of them, or {declared.way_to(targets.shape[1])}"
            ]
        )
    if targets.dtype == torch.bool and count != 2:
        raise ConfigError(
            [
                f"task=classification: the targets are true or false, but {tells}; for two classes"
                f" {declared.way_to(2)}; for one label, yes or no, choose task=multilabel and"
                " return float(target)"
            ]
        )
    low = int(targets.min())
    high = int(targets.max())
    if low >= 0 and high < count:
        return
    remedy = f"the labels of {counted(count, 'class')} must be 0 to {count - 1}"
    if low > 0:
        remedy += ": if yours begin at 1, return label - 1"
    raise ConfigError(
        [
            f"task=classification: the labels are {low} to {high}, but {tells}; {remedy}; for more"
            f" classes {declared.way_to(high + 1)}; for numbers return float32 and choose"
            " task=regression"
        ]
    )


def _targets_of(name: str, batch: Any) -> Tensor:
    """The targets of a pair. Raises ConfigError if the batch is something else."""
    choices = "task=language_model for tokens, or task._target_=your_module.YourTask"
    sample = "not a pair (input, target)"
    if is_pair(batch):
        targets = batch[1]
        if isinstance(targets, Tensor):
            return targets
        if isinstance(targets, tuple | list) and targets and isinstance(targets[0], str):
            problem = f"a sample is a pair whose target is a text, {targets[0]!r}"
            remedy = "return the number of the class, from 0 on"
            raise ConfigError([f"task={name}: {problem}; {remedy}"])
        sample = f"a pair whose target is a {type(targets).__name__}"
    elif isinstance(batch, dict):
        sample = f"a dict of {', '.join(map(str, batch))}"
        pair = "input and target by data.fields=[INPUT,TARGET]"
        choices = f"{pair}; or {choices}"
    raise ConfigError([f"task={name}: a sample is {sample}; choose {choices}"])


def _automatic_choice(targets: Tensor) -> str:
    """Classification or regression. Raises ConfigError if the targets may mean something else."""
    form = form_of(targets)
    has_one_number = form.ndim == 1 or targets.shape[1:] == (1,)
    if form == TargetForm("integers", 1):
        return "classification"
    if form.kind == "numbers" and has_one_number:
        return "regression"
    described = describe_targets(targets)
    if has_one_number:
        remedy = (
            "for one class return its number, not a list of one; for one label choose"
            " task=multilabel"
        )
        raise ConfigError([f"task=auto: the targets are {described}; {remedy}"])
    choice = "task._target_=your_module.YourTask"
    if form in CANDIDATES:
        choice = f"task={CANDIDATES[form]}"
    raise ConfigError([f"task=auto: the targets are {described}; choose {choice}"])
