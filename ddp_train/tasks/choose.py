"""The built-in tasks, and which of them fits the targets of a data set."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddp_train.errors import ConfigError
from ddp_train.tasks.builtin import BuiltIn, Classification, Multilabel, Regression, Segmentation
from ddp_train.tasks.language_model.task import LanguageModel

TASKS: dict[str, type[BuiltIn]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "segmentation": Segmentation,
    "language_model": LanguageModel,
}

_TARGETS = {
    "classification": (("integers", 1), ("numbers", 2)),
    "regression": (("numbers", 1), ("numbers", 2)),
    "multilabel": (("numbers", 1), ("numbers", 2), ("integers", 2)),
    "segmentation": (("integers", 3),),
}
"""What the targets of a batch may be: of which kind, with how many dimensions, the batch's
included."""
MANY = 16
"""Samples by which 0 and 1 are told from numbers."""
_NEEDS = {
    "classification": "integers [n], or numbers [n, classes]",
    "multilabel": "0 or 1 in [n, labels], or numbers 0 or 1 in [n]",
    "regression": "numbers [n] or [n, k]",
    "segmentation": "integers [n, h, w]",
}


def choose(name: str, sample: Any) -> str:
    """The task for a batch, where `auto` stands for classification or regression.

    Raises ConfigError if the task does not fit the targets, or if they leave `auto` a choice: with
    the candidates.
    """
    if name == "language_model":
        return name
    pair = isinstance(sample, tuple | list) and len(sample) == 2
    targets = sample[1] if pair else sample
    if not pair or not isinstance(targets, Tensor):
        if not pair:
            what = "no (input, target)"
        else:
            what = f"a pair whose target is a {type(targets).__name__}"
        own = "task=language_model for tokens, or task._target_=your_module.YourTask"
        if isinstance(sample, dict):
            what = f"a dict of {', '.join(map(str, sample))}"
            own = f"the two that are input and target by data.fields=[INPUT,TARGET]; or {own}"
        if pair and isinstance(targets, tuple | list) and targets and isinstance(targets[0], str):
            text = f"a sample is a pair whose target is a text, {targets[0]!r}"
            raise ConfigError([f"task={name}: {text}; return the number of the class, from 0 on"])
        raise ConfigError([f"task={name}: a sample is {what}; choose {own}"])
    kind = "numbers" if targets.is_floating_point() else "integers"
    shape = f"{kind} of shape [{', '.join(['n', *map(str, targets.shape[1:])])}]"
    if name != "auto":
        if (kind, targets.ndim) in _TARGETS[name]:
            return name
        fitting = [other for other, forms in _TARGETS.items() if (kind, targets.ndim) in forms]
        if fitting:
            instead = f"use task={' or '.join(fitting)}"
        else:
            instead = "use task._target_=your_module.YourTask"
        if name == "regression" and kind == "integers":
            instead = f"return them as float32; or {instead}" if targets.ndim < 3 else instead
        raise ConfigError(
            [f"task={name}: needs targets that are {_NEEDS[name]}, not {shape}; {instead}"]
        )
    if kind == "integers" and targets.ndim == 1:
        return "classification"
    if kind == "numbers" and (targets.ndim == 1 or targets.shape[1:] == (1,)):
        return "regression"
    if kind == "integers" and targets.shape[1:] == (1,):
        remedy = (
            "for one class return its number, not a list of one; for one label choose"
            " task=multilabel"
        )
        raise ConfigError([f"task=auto: the targets are {shape}; {remedy}"])
    candidates = {
        ("integers", 2): "language_model (tokens) or multilabel (0 and 1 per label)",
        ("integers", 3): "segmentation (a class per pixel)",
        (
            "numbers",
            2,
        ): (
            "multilabel (0 or 1 per label), regression (k numbers) or classification (a part of"
            " each class)"
        ),
    }.get((kind, targets.ndim), "_target_=your_module.YourTask")
    raise ConfigError([f"task=auto: the targets are {shape}; choose task={candidates}"])


def check_numbers(batch: Any) -> None:
    """Of some samples, for which `auto` chose a regression: raises ConfigError if it may have been
    wrong to."""
    if isinstance(batch[1], Tensor) and {*batch[1].flatten().tolist()} == {0.0, 1.0}:
        choice = (
            "choose task=multilabel if they say yes or no (its loss is bce), or task=regression"
            " (mse)"
        )
        raise ConfigError(
            [f"task=auto: {len(batch[1])} targets that were looked at are 0 or 1; {choice}"]
        )
