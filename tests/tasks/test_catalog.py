"""The task that fits the targets of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.assembly.model import build_task, built_in_tasks
from ddp_train.data.datasets import ArraySource
from ddp_train.errors import ConfigError
from ddp_train.models.config import MlpConfig
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
            (INPUTS, LABELS[:, None]),
            ("integers of shape [n, 1]", "return its number, not a list of one"),
        ),
        (
            {"words": IDS, "label": LABELS},
            ("a dict of words, label;", "data.fields=[INPUT,TARGET]", "task._target_="),
        ),
        (IDS, ("a sample is no (input, target)", "task=language_model")),
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
