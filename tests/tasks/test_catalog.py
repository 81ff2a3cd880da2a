"""The task that fits the targets of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.assembly.model import build_task, built_in_tasks
from ddp_train.data.datasets import ArraySource
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError
from ddp_train.models.config import MlpConfig
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config
from ddp_train.tasks.catalog import choose
from tests.support.task_samples import IDS, IMAGES, INPUTS, LABELS, MASKS, NEXT, SOFT


@pytest.mark.parametrize(
    ("targets", "task"),
    [(LABELS, "classification"), (INPUTS[:, 0], "regression"), (INPUTS[:, :1], "regression")],
)
def test_auto_takes_what_has_one_meaning(targets: Tensor, task: str) -> None:
    assert choose("auto", (INPUTS, targets), built_in_tasks()) == task


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (
            (INPUTS, SOFT),
            (
                "task=auto: the targets are numbers of shape [n, 3]",
                "multilabel",
                "regression",
                "classif",
            ),
        ),
        ((IMAGES, MASKS), ("integers of shape [n, 4, 4]", "segmentation")),
        ((IDS, NEXT), ("integers of shape [n, 6]", "language_model", "multilabel")),
        (
            (INPUTS, torch.zeros(3, 2, 2)),
            ("of shape [n, 2, 2]", "choose task._target_=your_module.YourTask"),
        ),
        (
            (INPUTS, LABELS[:, None]),
            ("integers of shape [n, 1]", "return its number, not a list of one"),
        ),
        (
            {"words": IDS, "label": LABELS},
            ("a dict of words, label;", "data.fields=[INPUT,TARGET]", "task._target_="),
        ),
        (IDS, ("a sample is not a pair (input, target)", "task=language_model")),
        ((INPUTS, {"boxes": IDS}), ("whose target is a dict", "task._target_=")),
        (
            (INPUTS, ("cat", "dog")),
            ("whose target is a text, 'cat'; return the number of the class",),
        ),
    ],
)
def test_auto_never_guesses(sample: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose("auto", sample, built_in_tasks())
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("task", "targets", "instead"),
    [
        ("classification", INPUTS[:, 0], "use task=regression"),
        ("regression", LABELS, "return them as float32; or use task=classification"),
        ("multilabel", LABELS, "use task=classification"),
        ("segmentation", LABELS, "use task=classification"),
        ("classification", MASKS, "use task=segmentation"),
        ("regression", IMAGES, "use task._target_="),
    ],
)
def test_a_task_that_does_not_fit_is_refused_with_one_that_does(
    task: str, targets: Tensor, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(task, (INPUTS, targets), built_in_tasks())
    assert f"task={task}: needs targets that are" in str(caught.value) and instead in str(
        caught.value
    )


def test_numbers_of_0_and_1_alone_are_no_regression_unasked() -> None:
    """Behind a first sample of each: they may be sorted by class."""
    config = Config(model=MlpConfig())
    binary = ArraySource(torch.randn(40, 3), (torch.arange(40) > 19).float())
    sample = binary.get_batch(np.array([0]), None)
    with pytest.raises(ConfigError, match="0 or 1; choose task=multilabel if they say yes or no"):
        build_task(config.task, binary, sample)
    numbers = ArraySource(torch.randn(40, 3), torch.arange(40.0))
    assert (
        type(build_task(config.task, numbers, numbers.get_batch(np.array([0]), None))).__name__
        == "Regression"
    )


class Told:
    """A data set whose samples have given targets, and that tells what it is given."""

    def __init__(self, targets: Sequence[Any], **told: Any) -> None:
        self.values = targets
        vars(self).update(told)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> tuple[Tensor, Any]:
        return torch.zeros(3), self.values[number]


def task_of(
    targets: Sequence[Any], outputs: int | None = None, name: str = "auto", **told: Any
) -> str:
    """The task that is built for a data set of the user's own."""
    source = UserDataset(Told(targets, **told), 0, outputs=outputs)
    section = OPTIONS["task"][name]()
    return type(build_task(section, source, source.get_batch(np.array([0]), None))).__name__


NAMES = ["a", "b", "c"]
FLOATS = [float(number % 3) for number in range(30)]
READINGS = {
    "float labels beside classes": (
        {"targets": FLOATS, "classes": NAMES},
        "the targets are floating-point numbers, [0, 1, 2], but `classes` of Told gives 3 classes; for labels"
        " return int(target), for numbers choose task=regression",
    ),
    "float labels of numpy beside num_classes": (
        {"targets": [np.float32(value) for value in FLOATS], "num_classes": np.int64(3)},
        "but `num_classes` of Told gives 3 classes; for labels return int(target)",
    ),
    "float labels beside data.outputs": (
        {"targets": FLOATS, "outputs": 3},
        "but data.outputs=3 gives 3 classes",
    ),
    "float labels alone": (
        {"targets": FLOATS},
        "are whole numbers, [0, 1, 2]; choose task=regression if they are amounts",
    ),
    "float labels from 1 on": (
        {"targets": [1.0, 2.0, 3.0] * 9},
        "are whole numbers, [1, 2, 3]; choose task=regression",
    ),
    "labels from 1 on": (
        {"targets": [1, 2, 3] * 9, "classes": NAMES},
        "the labels are 1 to 3, but `classes` of Told gives 3 classes; the labels of 3 classes must"
        " be 0 to 2: if yours begin at 1, return label - 1; for more classes add data.outputs=4",
    ),
    "a label between those that are read": (
        {"targets": [0, 2, 7, *[1] * 30], "classes": NAMES, "labels": [0, 2, 7, *[1] * 30]},
        "the labels are 0 to 7, but `classes` of Told gives 3 classes",
    ),
    "a negative label": (
        {"targets": [*[0, 1] * 9, -1], "classes": 2},
        "the labels are -1 to 0, but `classes` of Told gives 2 classes",
    ),
    "amounts as integers": (
        {"targets": [90_000, 120_000] * 9, "outputs": 1},
        "data.outputs=1 gives 1 class; the labels of 1 class must be 0 to 0: if yours begin at 1,"
        " return label - 1; for more classes use data.outputs=120001; for numbers return float32",
    ),
    "truth beside ten classes": (
        {"targets": [True, False] * 9, "num_classes": 10},
        "the targets are true or false, but `num_classes` of Told gives 10 classes; for",
    ),
    "soft labels of more classes": (
        {"targets": [torch.eye(4)[0]] * 9, "classes": NAMES, "name": "classification"},
        "a target has 4 numbers, but `classes` of Told gives 3 classes; correct one of them, or"
        " add data.outputs=4",
    ),
    "soft labels of more outputs": (
        {"targets": [torch.eye(5)[0]] * 9, "outputs": 3, "name": "classification"},
        "but data.outputs=3 gives 3 classes; correct one of them, or use data.outputs=5",
    ),
    "two numbers of classes": (
        {"targets": [0, 1, 2] * 9, "classes": NAMES, "num_classes": 5},
        "`classes` of Told gives 3 classes, but `num_classes` of Told gives 5; correct one of them",
    ),
}


@pytest.mark.parametrize("kind", READINGS)
def test_targets_that_contradict_what_is_told_are_refused(kind: str) -> None:
    arguments, message = READINGS[kind]
    with pytest.raises(ConfigError) as caught:
        task_of(**arguments)
    assert message in str(caught.value), str(caught.value)


def test_what_agrees_has_its_task() -> None:
    assert task_of([0, 1, 2] * 9, classes=NAMES) == "Classification"
    assert task_of([True, False] * 9, classes=["no", "yes"]) == "Classification"
    assert task_of([0, 1, 2] * 9, classes=NAMES, labels=list(range(27))) == "Classification", (
        "what else is called `labels` is not believed"
    )
    assert task_of([0, 1, 2] * 9, outputs=5, classes=NAMES) == "Classification"
    assert task_of(FLOATS, name="regression", classes=NAMES) == "Regression"
    assert task_of([0.5, 1.5, 2.25] * 9) == "Regression"
    assert task_of([np.float32(value) for value in (0.5, 1.5, 2.25)] * 9) == "Regression"
    assert task_of([float(age) for age in range(20, 60)]) == "Regression"


def test_numbers_of_numpy_are_outputs_of_a_regression() -> None:
    source = UserDataset(Told([np.float32(0.5)] * 3, classes=NAMES), 0)
    assert source.outputs == 1
    assert UserDataset(Told([2] * 3, classes=3), 0).outputs == 3
