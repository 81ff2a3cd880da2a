"""Data that a trained model cannot be used with."""

from __future__ import annotations

import pytest
import torch

from ddp_train.data.datasets import ArraySource
from ddp_train.data.splits import Splits
from ddp_train.errors import ConfigError, DataError
from ddp_train.runs.inference_run import named_set, refuse_other_data


def test_classes_of_other_names_are_refused() -> None:
    source = ArraySource(torch.zeros(2, 3), torch.tensor([0, 1]))
    source.classes = ["cat", "fox"]
    facts = {"outputs": 2, "input_shape": [3], "classes": ["cat", "dog", "fox"]}
    with pytest.raises(
        DataError, match="the data set has 2 classes, but the checkpoint has 3; they differ in dog"
    ):
        refuse_other_data(source, facts, is_own=False)
    with pytest.raises(DataError, match=r"an input has the shape \[3\], but .* with \[4\]"):
        refuse_other_data(source, {**facts, "input_shape": [4]}, is_own=True)
    refuse_other_data(source, {**facts, "classes": ["cat", "fox"]}, is_own=False)
    refuse_other_data(source, {}, is_own=False)


def test_a_run_uses_a_set_by_its_name() -> None:
    train, test, noisy = (
        ArraySource(torch.zeros(samples, 3), torch.zeros(samples).long()) for samples in (2, 3, 4)
    )
    splits = Splits(train, test, further={"test/noisy": noisy})
    assert named_set(splits, "predict.split", "test/noisy") is noisy
    with pytest.raises(ConfigError, match=r"evaluate\.sets=noisy: .*; did you mean test/noisy\?"):
        named_set(splits, "evaluate.sets", "noisy")
